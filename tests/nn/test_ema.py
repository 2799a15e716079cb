import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


class Model(eqx.Module):
    weight: jax.Array
    half: jax.Array
    counts: jax.Array
    key: jax.Array
    buffer: jax.Array = eqx.field(trainable=False)
    fixed: object
    activation: object
    rate: float

    def __init__(self, step):
        self.weight = jnp.array([1.0, -2.0]) * step
        self.half = jnp.array([1.0, 0.25], jnp.bfloat16) + step
        self.counts = jnp.arange(2) + step
        self.key = jax.random.key(step)
        self.buffer = jnp.ones(1) * step
        self.fixed = eqx.frozen(jnp.ones(2) * step)
        self.activation = jnp.tanh
        self.rate = 0.5


def models(number):
    return [Model(step) for step in range(1, number + 1)]


def in_numpy(values, decays, debias=True, start=0.0):
    """Kingma and Ba 2015: the average, and the product of decays for the divisor."""
    average, product = start, 1.0
    for value, decay in zip(values, decays, strict=True):
        average = decay * average + (1 - decay) * np.asarray(value, np.float64)
        product *= decay
    return average / (1 - product) if debias else average


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_average_is_that_of_the_formula(decay, number) -> None:
    seen = models(number)
    ema = nn.EMA(Model(7), decay)
    for model in seen:
        ema = ema.update(model)
    for name in ("weight", "half"):
        values = [np.asarray(getattr(m, name)) for m in seen]
        expected = in_numpy(values, [decay] * number)
        np.testing.assert_allclose(getattr(ema.average, name), expected, rtol=2e-6)
    assert ema.steps == number
    np.testing.assert_allclose(ema.weight, 1 - decay**number, rtol=1e-5)


def test_average_without_correction_starts_at_the_model() -> None:
    start, seen = Model(7), models(4)
    ema = nn.EMA(start, 0.9, debias=False)
    for model in seen:
        ema = ema.update(model)
    values = [m.weight for m in seen]
    expected = in_numpy(values, [0.9] * 4, debias=False, start=np.asarray(start.weight))
    np.testing.assert_allclose(ema.average.weight, expected, rtol=1e-6)


def test_decay_may_be_a_schedule_of_the_number_of_updates() -> None:
    schedule = lambda steps: jnp.minimum(0.8, (1 + steps) / (10 + steps))  # noqa: E731
    seen = models(40)
    ema = nn.EMA(seen[0], schedule)
    update = eqx.filter_jit(lambda ema, model: ema.update(model))
    for model in seen:
        ema = update(ema, model)
    decays = [min(0.8, (1 + t) / (10 + t)) for t in range(40)]
    expected = in_numpy([m.weight for m in seen], decays)
    np.testing.assert_allclose(ema.average.weight, expected, rtol=1e-5)


def test_average_is_in_float32_at_least_and_the_model_in_its_dtypes(strict) -> None:
    ema = nn.EMA(Model(1)).update(Model(1))
    assert ema.average.half.dtype == ema.average.weight.dtype == jnp.float32
    model = ema.model()
    assert model.half.dtype == jnp.bfloat16 and model.weight.dtype == jnp.float32
    ema = nn.EMA(Model(1), dtype=jnp.float16).update(Model(2))
    assert ema.average.weight.dtype == jnp.float16
    complexes = nn.EMA({"w": jnp.ones(2, jnp.complex64)})
    complexes = complexes.update({"w": jnp.full(2, 1j, jnp.complex64)})
    assert complexes.average["w"].dtype == jnp.complex64
    chosen = nn.EMA({"w": jnp.ones(2, jnp.complex64)}, dtype=jnp.float16)
    assert chosen.average["w"].dtype == jnp.complex64
    assert (complexes.model()["w"] == 1j).all()


def test_small_steps_of_half_precision_are_not_lost() -> None:
    ema = nn.EMA({"w": jnp.zeros(1, jnp.bfloat16)}, 0.999, debias=False)
    update = eqx.filter_jit(lambda ema: ema.update({"w": jnp.ones(1, jnp.bfloat16)}))
    for _ in range(100):
        ema = update(ema)
    np.testing.assert_allclose(ema.average["w"], 1 - 0.999**100, rtol=1e-4)


def test_average_of_a_constant_is_that_constant() -> None:
    model = {"w": jnp.array([0.1, 1e30, -3.3])}
    ema = nn.EMA({"w": jnp.array([jnp.nan, 1.0, jnp.inf])}, 0.99)
    for _ in range(5):
        ema = ema.update(model)
        assert (ema.model()["w"] == model["w"]).all()


def test_decay_of_one_keeps_the_start() -> None:
    ema = nn.EMA(Model(3), 1.0).update(Model(5))
    assert (ema.average.weight == Model(3).weight).all()


def test_everything_else_is_that_of_the_last_model() -> None:
    ema = nn.EMA(Model(1))
    assert eqx.tree_equal(ema.model(), Model(1))
    last = eqx.tree_at(lambda m: m.rate, Model(5), 0.25)
    model = ema.update(Model(3)).update(last).model()
    assert model.counts.tolist() == [5, 6] and model.buffer == 5
    assert (model.fixed.value == 5).all()
    assert (jax.random.key_data(model.key) == jax.random.key_data(last.key)).all()
    assert model.activation is jnp.tanh and model.rate == 0.25
    assert jax.tree.structure(model) == jax.tree.structure(last)


def buffers(tree):
    arrays = [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    datas = [jax.random.key_data(x) if is_key(x) else x for x in arrays]
    return {x.unsafe_buffer_pointer() for x in datas}


def test_no_array_is_shared_with_the_model() -> None:
    model = Model(1)
    first = nn.EMA(model)
    for ema in (first, first.update(model)):
        assert all(eqx.is_array(leaf) for leaf in jax.tree.leaves(ema))
        assert not buffers(model) & buffers(ema)


@pytest.mark.parametrize("donate", ["strict", ("model", "ema")])
def test_it_is_donated_with_the_model(donate) -> None:
    @eqx.filter_jit(donate=donate)
    def step(model, ema):
        model = eqx.tree_at(lambda m: m.weight, model, model.weight + 1)
        return model, ema.update(model)

    model, ema = Model(1), nn.EMA(Model(1), 0.5)
    values = []
    for _ in range(3):
        model, ema = step(model, ema)
        values.append(np.asarray(model.weight))
    np.testing.assert_allclose(
        ema.average.weight, in_numpy(values, [0.5] * 3), rtol=1e-6
    )


def test_model_of_the_average_is_kept_if_the_ema_is_donated() -> None:
    ema = nn.EMA(Model(1))
    teacher = ema.model()
    assert not buffers(teacher) & buffers(ema)
    update = eqx.filter_jit(lambda model, ema: ema.update(model), donate=("ema",))
    ema = update(Model(2), ema)
    assert eqx.tree_equal(teacher, Model(1))
    assert eqx.tree_equal(eqx.filter_jit(lambda ema: ema.model())(ema), Model(2))


def test_model_may_hold_numpy_arrays() -> None:
    model = {"weight": np.ones(2), "counts": np.arange(2)}
    ema = nn.EMA(model).update(model)
    teacher = ema.model()
    assert teacher["weight"].dtype == jnp.float32 and teacher["weight"].sum() == 2
    assert teacher["counts"].tolist() == [0, 1]
    assert teacher["counts"] is not ema.average["counts"]


def test_its_text_is_that_of_its_fields() -> None:
    assert "Skeleton" not in repr(nn.EMA(Model(1)))


def test_it_is_a_carry_of_a_scan() -> None:
    model = nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)

    def step(carry, x):
        arrays, ema = carry
        arrays = jax.tree.map(lambda a: a + x, arrays)
        return (arrays, ema.update(eqx.combine(arrays, rest))), None

    xs = jnp.arange(4.0)
    (_, ema), _ = jax.lax.scan(step, (arrays, nn.EMA(model, 0.9)), xs)
    values = [model.layers[0].weight + sum(range(i + 1)) for i in range(4)]
    expected = in_numpy(values, [0.9] * 4)
    np.testing.assert_allclose(ema.average.layers[0].weight, expected, rtol=1e-5)
    assert ema.model()(jnp.ones(2)).shape == (1,)
    # Weak types would change on the way.
    weak = {"w": jnp.asarray(1.0)}
    jax.lax.scan(lambda ema, x: (ema.update({"w": x}), None), nn.EMA(weak), xs)


def test_it_has_nothing_to_train_and_is_saved(tmp_path) -> None:
    ema = nn.EMA(Model(1)).update(Model(2))
    assert jax.tree.leaves(eqx.filter(ema, eqx.trainable)) == []
    like = nn.EMA(Model(3))
    eqx.save(tmp_path / "ema", ema)
    loaded = eqx.load(tmp_path / "ema", like)
    assert (loaded.average.weight == ema.average.weight).all() and loaded.steps == 1


def test_other_model_is_an_error() -> None:
    ema = nn.EMA({"a": jnp.ones(2), "b": jnp.ones(3)})
    with pytest.raises(
        ValueError, match=r"`model\['b'\]` is shape \(3,\).*shape \(4,\)"
    ):
        ema.update({"a": jnp.ones(2), "b": jnp.ones(4)})
    with pytest.raises(ValueError, match="`model"):
        ema.update({"a": jnp.ones(2)})


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((jnp.ones(2), 1.5), {}, ValueError, "`decay` between 0 and 1; got 1.5"),
        ((jnp.ones(2), jnp.ones(())), {}, TypeError, "number or a function as `decay`"),
        ((jnp.arange(2),), {}, TypeError, "trainable parameters; got .* without any"),
        ((eqx.frozen(jnp.ones(2)),), {}, TypeError, "got a Frozen without any"),
        ((jnp.ones(2),), {"dtype": jnp.int32}, ValueError, "floating dtype as `dtype`"),
    ],
)
def test_wrong_argument_is_an_error(
    args, options, error, message, without_type_checks
) -> None:
    with pytest.raises(error, match=message):
        nn.EMA(*args, **options)


def test_narrow_average_saturates() -> None:
    linear = nn.Linear(2, 2, use_bias=False, weight_init=1e5, key=jax.random.key(0))
    ema = nn.EMA(linear, 0.5, dtype=jnp.float16)
    for average in (ema, ema.update(linear)):
        np.testing.assert_array_equal(average.average.weight, 65504)
        np.testing.assert_array_equal(average.model().weight, 65504)
