import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn

K = jax.random.key(0)
X = jnp.linspace(-1, 1, 3)
MLP = nn.MLP(3, 3, 4, 2, key=K)


def halve(h):
    return h / 2


def by_hand(x):
    h = jax.nn.relu(MLP.layers[0](x) / 2)
    return MLP.layers[2](jax.nn.relu(MLP.layers[1](h)))


def test_output_is_replaced_in_passing_under_transformations() -> None:
    f = eqx.intervene(MLP, {"layers[0]": halve})
    xs = jnp.stack([X, -X])
    np.testing.assert_array_equal(f(X), by_hand(X))
    np.testing.assert_allclose(eqx.filter_jit(f)(X), by_hand(X), rtol=1e-6)
    np.testing.assert_allclose(eqx.filter_vmap(f)(xs), jax.vmap(by_hand)(xs), rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda x: f(x).sum())(X),
        jax.grad(lambda x: by_hand(x).sum())(X),
        rtol=1e-6,
    )


def test_function_may_close_over_traced_arrays() -> None:
    def loss(shift):
        return eqx.intervene(MLP, {"layers[2]": lambda h: h + shift})(X).sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros(3)), jnp.ones(3))


def test_function_at_a_path_is_kept_by_no_cache_and_retraces_nothing() -> None:
    traces = []

    @jax.jit
    def act(x):
        traces.append(None)
        return jnp.tanh(x)

    def loss(shift):
        model = eqx.intervene(MLP, {"layers[2]": lambda h: act(h) + shift})
        return model(X).sum()

    with jax.checking_leaks():
        jax.grad(loss)(jnp.zeros(3))
    loss(jnp.zeros(3))
    traces.clear()
    loss(jnp.ones(3))
    assert not traces


def test_each_layer_of_a_stack_is_replaced() -> None:
    stacked = nn.Stacked(lambda k: nn.Linear(3, 3, key=k), 2, key=K)
    out = eqx.intervene(stacked, {"layers": jnp.tanh})(X)
    first, second = stacked.unstack()
    np.testing.assert_allclose(out, jnp.tanh(second(jnp.tanh(first(X)))), rtol=1e-6)


def test_capture_sees_what_replaces_a_value_under_the_same_path() -> None:
    model = eqx.intervene(MLP, {"layers[0]": halve})
    _, values = eqx.capture(model, ["layers[0]", "layers[1]"])(X)
    np.testing.assert_array_equal(values["layers[0]"], MLP.layers[0](X) / 2)
    again = eqx.intervene(model, {"layers[0]": halve})
    _, values = eqx.capture(again, "layers[0]")(X)
    np.testing.assert_array_equal(values["layers[0]"], MLP.layers[0](X) / 4)


def test_values_with_a_name_are_replaced_also_in_what_was_compiled_before() -> None:
    f = jax.jit(lambda x: eqx.tag(x + 1, "y") * 2)
    f(X)
    np.testing.assert_array_equal(eqx.intervene(f, {"y": halve})(X), X + 1)
    np.testing.assert_array_equal(f(X), (X + 1) * 2)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda h: h[:2], r"`layers\[0\]` is float32\[4\].* returned float32\[2\]"),
        (lambda h: h.astype(jnp.float16), r"`layers\[0\]` is .* returned float16\[4\]"),
        (lambda h: 0.0, r"`layers\[0\]` is .* returned float32\[\]"),
        (lambda h: (h, h), r"`layers\[0\]` there must be a leaf; got a tuple"),
    ],
)
def test_another_type_is_refused_by_path(function, match) -> None:
    with pytest.raises(eqx.ShapeError, match=match):
        eqx.intervene(MLP, {"layers[0]": function})(X)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_result_is_taken_in_the_dtype_that_jax_gives_it(dtype) -> None:
    f = eqx.intervene(MLP, {"layers[2]": lambda h: np.zeros(3, dtype)})
    assert (f(X) == 0).all() and f(X).dtype == X.dtype
    constant = nn.Sequential([nn.Lambda(lambda x: np.ones(3, dtype))])
    assert (eqx.intervene(constant, {"layers[0]": halve})(X) == 0.5).all()


def test_what_is_not_an_array_may_become_anything() -> None:
    model = nn.Sequential([nn.Lambda(lambda x: (x, "label")), nn.Lambda(lambda xy: xy)])
    f = eqx.intervene(model, {"layers[0]": lambda xy: (-xy[0], 3)})
    x, label = f(X)
    assert (x == -X).all() and label == 3


def test_pattern_that_chooses_nothing_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'nope' chooses no Module.*`layers\[0\]`"):
        eqx.intervene(MLP, {"nope": halve})(X)


def test_what_is_no_function_or_has_arrays_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear for 'layers"):
        eqx.intervene(MLP, {"layers[0]": nn.Linear(4, 4, key=K)})
