"""What libraries written for Equinox are tried with. Run by `.ci/run`, `scripts/ecosystem`.

`ecosystem.py NAME` runs the example of a library, which imports `equinox` by that name.
Each follows what the library's own documentation shows first.
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def close(a, b, **tolerances):
    np.testing.assert_allclose(a, b, **({"rtol": 1e-4, "atol": 1e-5} | tolerances))


def lineax():
    """A least-squares problem; its solution is differentiated and batched."""
    import lineax as lx

    matrix = jnp.asarray([[2.0, 1.0], [1.0, 3.0], [0.0, 1.0]])
    vector = jnp.asarray([1.0, 2.0, 3.0])
    operator = lx.MatrixLinearOperator(matrix)

    @eqx.filter_jit
    def solve(vector):
        solver = lx.AutoLinearSolver(well_posed=None)
        return lx.linear_solve(operator, vector, solver).value

    inverse = np.linalg.pinv(matrix)
    close(solve(vector), inverse @ vector)
    close(jax.jacrev(solve)(vector), inverse)
    close(jax.jacfwd(solve)(vector), inverse)
    close(jax.vmap(solve)(jnp.stack([vector, 2 * vector]))[1], 2 * inverse @ vector)


def optimistix():
    """A root is found, and differentiated; a minimum is found."""
    import optimistix as optx

    def residual(y, a):
        return y - jnp.tanh(y * a + 1)

    @eqx.filter_jit
    def root(a):
        solver = optx.Newton(rtol=1e-6, atol=1e-6)
        return optx.root_find(residual, solver, jnp.asarray(0.0), args=a).value

    a = jnp.asarray(0.5)
    y = root(a)
    close(residual(y, a), 0, atol=1e-5)
    slope = 1 - jnp.tanh(y * a + 1) ** 2
    close(jax.grad(root)(a), slope * y / (1 - slope * a))
    found = optx.minimise(
        lambda y, _: ((y - 3) ** 2).sum(), optx.BFGS(1e-6, 1e-6), jnp.zeros(2)
    )
    close(found.value, [3, 3])


def diffrax():
    """A stiff differential equation (Robertson 1966), and its gradient."""
    import diffrax as dfx

    def field(t, y, k):
        a, b, c = y
        k1, k2, k3 = k
        reverse = k3 * b * c
        return jnp.stack([reverse - k1 * a, k1 * a - k2 * b**2 - reverse, k2 * b**2])

    @eqx.filter_jit
    def solve(k):
        solution = dfx.diffeqsolve(
            dfx.ODETerm(field),
            dfx.Kvaerno5(),
            t0=0.0,
            t1=40.0,
            dt0=2e-4,
            y0=jnp.asarray([1.0, 0.0, 0.0]),
            args=k,
            stepsize_controller=dfx.PIDController(rtol=1e-4, atol=1e-7),
        )
        return solution.ys[-1]

    k = jnp.asarray([0.04, 3e7, 1e4])
    # The reference of Hairer and Wanner, "Solving Ordinary Differential Equations II".
    close(solve(k), [0.7158, 9.186e-6, 0.2842], rtol=1e-2)
    gradient = eqx.filter_jit(jax.grad(lambda k: solve(k)[2]))(k)
    step = 0.05
    faster, slower = (solve(k.at[0].multiply(1 + s))[2] for s in (step, -step))
    close(gradient[0], (faster - slower) / (2 * step * k[0]), rtol=0.1)


def quax():
    """LoRA by an array-ish type of its own."""
    import quax
    from quax.examples import lora

    key = jax.random.key(0)
    linear = eqx.nn.Linear(4, 3, key=key)
    model = lora.loraify(linear, rank=2, key=key)
    call = eqx.filter_jit(lambda model, x: quax.quaxify(model)(x))
    close(call(model, jnp.ones(4)), linear(jnp.ones(4)))


def flowjax():
    """A normalising flow is fitted."""
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow
    from flowjax.train import fit_to_data

    keys = jax.random.split(jax.random.key(0), 3)
    data = 2 * jax.random.normal(keys[0], (500, 2)) + 3
    flow = coupling_flow(
        keys[1], base_dist=Normal(jnp.zeros(2)), flow_layers=2, nn_width=8
    )
    fitted, losses = fit_to_data(
        keys[2], flow, data, learning_rate=1e-2, max_epochs=10, show_progress=False
    )
    assert losses["train"][-1] < losses["train"][0]
    assert np.isfinite(fitted.log_prob(data)).all()
    assert fitted.sample(keys[0], (5,)).shape == (5, 2)


def paramax():
    """Parameters with a constraint, and ones that are not trained."""
    import paramax

    tree = {
        "scale": paramax.Parameterize(jnp.exp, jnp.zeros(2)),
        "fixed": paramax.NonTrainable(jnp.ones(2)),
    }
    value = paramax.unwrap(tree)
    close(value["scale"], [1, 1])

    def loss(tree):
        tree = paramax.unwrap(tree)
        return (tree["scale"] * tree["fixed"]).sum()

    gradient = eqx.filter_grad(loss)(tree)
    close(jax.tree.leaves(gradient["fixed"])[0], 0)


def distreqx():
    """A distribution, batched and differentiated."""
    from distreqx import distributions

    normal = distributions.Normal(jnp.asarray(1.0), jnp.asarray(2.0))
    close(normal.log_prob(jnp.asarray(1.0)), -np.log(2 * np.sqrt(2 * np.pi)))
    gradient = eqx.filter_grad(lambda d: d.log_prob(jnp.asarray(3.0)))(normal)
    close(jax.tree.leaves(gradient)[0], 0.5)
    samples = jax.vmap(normal.sample)(jax.random.split(jax.random.key(0), 1000))
    close(samples.mean(), 1, atol=0.3)


def sympy2jax():
    """Symbolic expressions as a model with trainable numbers."""
    import sympy
    import sympy2jax

    x = sympy.symbols("x")
    model = sympy2jax.SymbolicModule([x**2 + 1.5, sympy.sin(x)])
    out = eqx.filter_jit(model)(x=jnp.asarray(2.0))
    close(out, [5.5, np.sin(2.0)])
    gradient = eqx.filter_grad(lambda m: m(x=jnp.asarray(2.0))[0])(model)
    assert len(jax.tree.leaves(gradient)) > 0


EXAMPLES = {
    f.__name__: f
    for f in (
        quax,
        lineax,
        optimistix,
        diffrax,
        flowjax,
        paramax,
        distreqx,
        sympy2jax,
    )
}

if __name__ == "__main__":
    EXAMPLES[sys.argv[1]]()
    print(sys.argv[1], "passed")
