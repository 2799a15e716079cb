"""A function of any tree, its derivatives by plain JAX in float64, and nests around it.

Whatever stands between a derivative and a function that it does not change, the derivative
must be the same: each law on derivatives is tested through nests of transformations.
"""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from hypothesis import settings
from strategies import same, static_leaves, trees

import equinox_like as eqx

FLOATS = (
    jnp.linspace(-1.0, 1.0, 3),
    jnp.asarray([[0.3, -0.2], [0.7, 1.1]]),
    jnp.asarray(0.4),
    np.float32(0.25),
    np.ones((1, 2), np.float32),
)
OTHERS = (jnp.arange(2), np.arange(2), jax.random.key(0), jnp.asarray(True))
floats = st.sampled_from(FLOATS)
few = settings(max_examples=15)


class Scale(eqx.Module):
    factor: Any
    name: str = eqx.field(static=True, default="scale")

    def __call__(self, x):
        return self.factor * x


def mixed_trees(max_leaves=5):
    """Trees with at least one float32 array, and of everything else."""
    others = st.one_of(st.sampled_from(OTHERS), static_leaves)
    return st.tuples(floats, trees(st.one_of(floats, others), max_leaves))


def mix(tree):
    """A smooth function: each inexact array of the result depends on all of them."""
    leaves, treedef = jtu.tree_flatten(tree)
    return treedef.unflatten(_mix(leaves))


def _mix(leaves):
    total = sum(jnp.sum(jnp.sin(x)) for x in leaves if eqx.is_inexact_array(x))
    return [x * jnp.cos(total) + x**2 if eqx.is_inexact_array(x) else x for x in leaves]


def in_float64(derivative, *trees):
    """`derivative(function of a list of arrays, *lists of arrays)`, in float64."""
    with jax.enable_x64(True):
        lists = [
            [jnp.asarray(np.asarray(x), jnp.float64) for x in inexact(tree)]
            for tree in trees
        ]
        out = derivative(_mix, *lists)
        return [np.asarray(x) for x in jtu.tree_leaves(out)]


def inexact(tree):
    return [x for x in jtu.tree_leaves(tree) if eqx.is_inexact_array(x)]


def agree(tree, reference):
    """Whether the inexact arrays of `tree` are close to those of a float64 reference."""
    ours = inexact(tree)
    return len(ours) == len(reference) and all(
        np.allclose(np.asarray(a), b, rtol=2e-5, atol=2e-5)
        for a, b in zip(ours, reference, strict=True)
    )


def same_statics(a, b):
    """Whether two trees are the same but for the values of their arrays."""
    (xs, one), (ys, other) = map(jtu.tree_flatten, (a, b))
    return one == other and all(
        eqx.is_array(y) if eqx.is_array(x) else same(x, y)
        for x, y in zip(xs, ys, strict=True)
    )


def like(tree, seed=0):
    """A tangent of `tree`: random at inexact arrays, `None` elsewhere."""
    rng = np.random.default_rng(seed)

    def random(x):
        return jnp.asarray(rng.normal(size=jnp.shape(x)), x.dtype)

    return jtu.tree_map(random, eqx.filter(tree, eqx.is_inexact_array))


def _converted(f):
    return lambda x: eqx.filter_closure_convert(f, x)(x)


def _batched(f):
    def call(x):
        x = jtu.tree_map(lambda a: a[None] if eqx.is_array(a) else a, x)
        out = eqx.filter_vmap(f)(x)
        return jtu.tree_map(lambda a: a[0] if eqx.is_array(a) else a, out)

    return call


def _with_own_jvp(f):
    @eqx.filter_custom_jvp
    def arrays(x):
        return eqx.filter(f(x), eqx.is_array)

    def rule(primals, tangents):
        out, tangent = eqx.filter_jvp(f, primals, tangents)
        return eqx.filter(out, eqx.is_array), tangent

    arrays.def_jvp(rule)
    return lambda x: eqx.combine(arrays(x), eqx.filter(x, eqx.is_array, inverse=True))


def with_own_vjp(f, **options):
    g = eqx.filter_custom_vjp(f, **options)
    g.def_fwd(lambda perturbed, x: eqx.filter_vjp(f, x))

    def bwd(pullback, cotangent, perturbed, x):
        zeros = jtu.tree_map(jnp.zeros_like, eqx.filter(f(x), eqx.is_inexact_array))
        return pullback(eqx.combine(cotangent, zeros))[0]

    g.def_bwd(bwd)
    return g


FORWARD = {
    "jit": eqx.filter_jit,
    "checkpoint": eqx.filter_checkpoint,
    "convert": _converted,
    "vmap": _batched,
    "custom_jvp": _with_own_jvp,
}
REVERSE = FORWARD | {
    "custom_vjp": with_own_vjp,
    "custom_vjp_remat": lambda f: with_own_vjp(f, optimize_remat=True),
}


def nests(wrappers):
    """Compositions of up to three of `wrappers`, which are named in what is shown."""
    names = st.lists(st.sampled_from(sorted(wrappers)), max_size=3)
    return names.filter(_can_run).map(lambda names: Nest(names, wrappers))


def _can_run(names):
    """Whether no rule for forward mode calls a function that has reverse mode only."""
    reverse_only = [i for i, name in enumerate(names) if name.startswith("custom_vjp")]
    return not reverse_only or "custom_jvp" not in names[reverse_only[0] :]


class Nest:
    def __init__(self, names, wrappers):
        self.names, self.wrappers = names, wrappers

    def __call__(self, f):
        for name in self.names:
            f = self.wrappers[name](f)
        return f

    def __repr__(self):
        return " of ".join(self.names) or "nothing"
