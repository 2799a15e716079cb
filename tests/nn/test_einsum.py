import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn

SIZES = {"d": 4, "h": 2, "k": 3, "i": 5}

# Equation, shape of the input, axes of the bias, fan-in.
CASES = [
    ("d,dhk->hk", (4,), (2, 3), 4),
    ("...d,dhk->...hk", (6, 7, 4), (2, 3), 4),
    ("s...d,dhk->hs...k", (6, 7, 4), (2, 3), 4),
    ("sd,kd->ks", (6, 4), (3,), 4),
    ("...hk,hkd->...d", (6, 2, 3), (4,), 6),
    ("shk,khd->sd", (6, 2, 3), (4,), 6),
    ("...hk,hkd->...hd", (6, 2, 3), (2, 4), 3),
    ("shk,idkh->dhsi", (6, 2, 3), (4, 2, 5), 3),
    ("h,h->h", (2,), (2,), 1),
    ("s,d->sd", (6,), (4,), 1),
]
every_case = pytest.mark.parametrize(("equation", "shape", "bias", "fan_in"), CASES)


def make(equation, **options):
    weight = equation.split(",")[1].split("->")[0]
    sizes = {name: SIZES[name] for name in weight}
    return nn.Einsum(equation, sizes, key=jax.random.key(0), **options)


@every_case
def test_result_is_that_of_numpy(equation, shape, bias, fan_in, strict, draw) -> None:
    layer = make(equation)
    x = draw(*shape).astype(jnp.float32)
    assert layer.bias.shape == bias
    y = np.einsum(equation, x, np.asarray(layer.weight))
    out = equation.split("->")[1].replace("...", "pq"[: y.ndim - len(bias)])
    out = out if y.ndim == len(out) else equation.split("->")[1].replace("...", "p")
    spread = [
        n if name in equation.split(",")[1].split("->")[0] else 1
        for name, n in zip(out, y.shape, strict=True)
    ]
    expected = y + np.asarray(layer.bias).reshape(spread)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)
    without = make(equation, use_bias=False)
    assert without.bias is None and (without.weight == layer.weight).all()
    np.testing.assert_allclose(without(x), y, rtol=1e-5, atol=1e-6)


@every_case
def test_first_values_are_uniform_by_the_fan_in(equation, shape, bias, fan_in) -> None:
    layer = make(equation)
    limit = 1 / np.sqrt(fan_in)
    assert abs(layer.weight).max() < limit and abs(layer.bias).max() < limit
    assert abs(layer.weight).max() > 0.5 * limit


def test_it_is_a_linear_layer_of_the_last_axis(draw) -> None:
    linear = nn.Linear(4, 3, key=jax.random.key(0))
    layer = nn.Einsum("...i,oi->...o", {"i": 4, "o": 3}, key=jax.random.key(0))
    assert (layer.weight == linear.weight).all() and (layer.bias == linear.bias).all()
    x = draw(5, 4)
    np.testing.assert_allclose(layer(x), jax.vmap(linear)(x), rtol=1e-5)


@every_case
def test_initialiser_sees_fan_in_and_fan_out(equation, shape, bias, fan_in) -> None:
    seen = []

    def init(key, shape, dtype):
        seen.append((str(jax.random.key_data(key)), shape))
        return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)

    layer = make(equation, weight_init=init, bias_init="ones")
    terms = equation.replace("->", ",").split(",")
    shared = [n for n in terms[1] if n in terms[0] and n in terms[2]]
    fan_out = np.prod([SIZES[n] for n in terms[1] if n not in terms[0]], dtype=int)
    assert len(seen) == len(set(seen)) == np.prod([SIZES[n] for n in shared], dtype=int)
    assert {shape for _, shape in seen} == {(fan_in, fan_out)}
    # Moved to its axes: summed ones vary slower than new ones.
    summed = [n for n in terms[1] if n not in terms[2]]
    new = [n for n in terms[1] if n not in terms[0]]
    order = [terms[1].index(n) for n in (*shared, *summed, *new)]
    moved = np.asarray(layer.weight).transpose(order).reshape(len(seen), -1)
    assert (moved == np.arange(fan_in * fan_out)).all() and (layer.bias == 1).all()


def test_reinit_draws_in_the_same_layout(key) -> None:
    make_layer = functools.partial(
        nn.Einsum, "...hk,hkd->...hd", {"h": 2, "k": 3, "d": 4}
    )
    shapes = []

    def init(key, shape, dtype):
        shapes.append(shape)
        return jnp.ones(shape, dtype)

    for layer, number in (
        (make_layer(key=key), 2),
        (nn.Stacked(lambda key: make_layer(key=key), 5, key=key), 10),
    ):
        shapes.clear()
        new = nn.reinit(layer, [(nn.Einsum, init)], key=key)
        assert shapes == [(3, 4)] * number
        weight = new.weight if isinstance(new, nn.Einsum) else new.layers.weight
        assert (weight == 1).all()


@pytest.mark.parametrize(
    ("equation", "shape", "message"),
    [
        (
            "...d,dhk->...hk",
            (6, 5),
            r"axis 'd' has size 4, but .*\(6, 5\), .* has size 5",
        ),
        ("shk,hkd->sd", (6, 3, 3), "axis 'h' has size 2"),
        ("...hk,hkd->...d", (3,), r"takes `x` of shape \(2, 3\)"),
        (
            "sd,dk->sk",
            (7, 6, 4),
            r"\(any, 4\).*one extra leading axis.*`jax.vmap\(model\)",
        ),
    ],
)
def test_wrong_shape_names_the_axis(equation, shape, message) -> None:
    with pytest.raises(eqx.ShapeError, match=message):
        make(equation)(jnp.ones(shape))


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("sd->s", "does not have the form 'input,weight->output'"),
        ("sd,dk", "does not have the form"),
        ("s,d,dk->k", "does not have the form"),
        ("sd,...dk->...sk", "the weight has a '...'"),
        ("...d,dk->k", "either the input or the output has a '...', but not both"),
        ("dd,dk->k", "'dd' has the same axis twice"),
        ("s1,1k->sk", "something other than letters"),
        ("sd,dkh->sk", "the axis 'h' is only in the weight"),
        ("sd,dk->k", "the axis 's' is only in the input"),
        ("sd,dk->skh", "the axis 'h' is only in the output"),
    ],
)
def test_other_equations_are_refused(equation, message, key) -> None:
    with pytest.raises(ValueError, match=message):
        nn.Einsum(equation, SIZES, key=key)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"d": 4}, r"Einsum\(sd,dk->sk\).*\('d', 'k'\), as `sizes`; got {'d': 4}"),
        (
            {"d": 4, "k": 3, "s": 5},
            r"\('d', 'k'\), as `sizes`; got {'d': 4, 'k': 3, 's': 5}",
        ),
        ({"d": 4, "k": -1}, r"int >= 0 as `sizes\['k'\]`; got -1"),
    ],
)
def test_sizes_are_those_of_the_weight(sizes, message, key) -> None:
    with pytest.raises(ValueError, match=message):
        nn.Einsum("s d, d k -> s k", sizes, key=key)


def test_equation_is_a_string_and_sizes_are_a_dict(key, without_type_checks) -> None:
    with pytest.raises(
        TypeError, match="Einsum takes a string as `equation`; got an int"
    ):
        nn.Einsum(3, {}, key=key)
    with pytest.raises(TypeError, match=r"takes a dict as `sizes`.*; got an int"):
        nn.Einsum("d,dk->k", 3, key=key)


def test_empty_axes_are_allowed(key) -> None:
    layer = nn.Einsum("...i,io->...o", {"i": 0, "o": 3}, key=key)
    assert (layer(jnp.ones((2, 0))) == layer.bias).all()
    layer = nn.Einsum(
        "hi,hio->ho", {"h": 0, "i": 2, "o": 3}, key=key, weight_init="ones"
    )
    assert layer.weight.shape == (0, 2, 3)


def test_ensemble_called_as_one_is_an_error(key) -> None:
    make_one = eqx.filter_vmap(
        lambda key: nn.Einsum("i,io->o", {"i": 2, "o": 3}, key=key)
    )
    ensemble = make_one(jax.random.split(key, 4))
    with pytest.raises(eqx.ShapeError, match="under `filter_vmap`"):
        ensemble(jnp.ones(2))


def test_bias_decides_whether_it_is_added(key, draw) -> None:
    layer = nn.Einsum("i,io->o", {"i": 2, "o": 3}, key=key)
    x = draw(2)
    without = eqx.tree_at(lambda m: m.bias, layer, None)
    np.testing.assert_allclose(without(x), layer(x) - layer.bias, rtol=1e-5, atol=1e-6)
