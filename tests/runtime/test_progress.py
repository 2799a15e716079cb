"""Progress meters: what they print, when, and under which transformations."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import equinox_like as eqx
from equinox_like import internal

TEXT = internal.TextProgressMeter(minimum_increase=0.25)
BAR = internal.TqdmProgressMeter(refresh_steps=4)
METERS = {"none": internal.NoProgressMeter(), "text": TEXT, "bar": BAR}


def run(x, meter, rate=1.1):
    """Ten steps."""

    def body(carry, i):
        x, state = carry
        return (rate * x, meter.step(state, (i + 1) / 10)), None

    (x, state), _ = lax.scan(body, (x, meter.init()), jnp.arange(10))
    assert meter.close(state) is None
    return x


def until(x, meter):
    """A loop whose number of steps differs in a batch."""

    def body(carry):
        i, state = carry
        return i + 1, meter.step(state, jnp.minimum((i + 1) / x, 1))

    i, state = lax.while_loop(lambda carry: carry[0] < x, body, (0.0, meter.init()))
    meter.close(state)
    return i


def lines(capsys):
    jax.effects_barrier()
    return [line.removesuffix(".00%") for line in capsys.readouterr().out.split()]


def percentages(capsys):
    """Those that a bar showed."""
    jax.effects_barrier()
    found = [part.partition("%|")[0] for part in capsys.readouterr().err.split("\r")]
    return [float(part) for part in found if part.strip()]


USES = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x]))[0],
    "jit of vmap": lambda f: jax.jit(lambda x: jax.vmap(f)(jnp.stack([x, x]))[0]),
    "grad": lambda f: lambda x: jax.grad(f)(x) * x,
    "jit of vmap of grad": lambda f: jax.jit(
        lambda x: (jax.vmap(jax.grad(f))(jnp.stack([x, x])) * x)[0]
    ),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
}
uses = pytest.mark.parametrize("use", USES)


@uses
def test_lines_are_printed_once_for_all_elements_in_their_order(use, capsys):
    out = USES[use](lambda x: run(x, TEXT))(2.0)
    assert jnp.allclose(out, 2 * 1.1**10)
    assert lines(capsys) == ["0", "30", "60", "90", "100"]


@pytest.mark.parametrize("use", ["eager", "jit of vmap", "jit of vmap of grad"])
def test_bar_is_drawn_at_some_steps_and_ends_full(use, capsys):
    out = USES[use](lambda x: run(x, BAR))(2.0)
    assert jnp.allclose(out, 2 * 1.1**10)
    assert percentages(capsys) == [0, 10, 50, 90, 100]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_batch_shows_its_slowest_element(wrap, capsys):
    f = wrap(jax.vmap(lambda x: until(x, TEXT)))
    assert f(jnp.asarray([2.0, 4.0])).tolist() == [2, 4]
    assert lines(capsys) == ["0", "50", "100"]


def test_progress_is_printed_if_it_has_grown_enough_or_is_one(capsys):
    state = TEXT.init()
    for progress in (0.1, 0.26, jnp.asarray(0.5), 0.52, 0.9, 1, 1.0):
        state = TEXT.step(state, progress)
    assert [*lines(capsys)] == ["0", "26", "52", "90", "100"]
    TEXT.close(state)
    assert lines(capsys) == []


def test_loop_that_is_left_early_ends_at_100_percent(capsys):
    TEXT.close(TEXT.step(TEXT.init(), 0.5))
    assert lines(capsys) == ["0", "50", "100"]


def test_after_the_close_nothing_is_shown(capsys):
    state = TEXT.step(TEXT.init(), 0.5)
    TEXT.close(state)
    lines(capsys)
    TEXT.step(state, 0.9)
    TEXT.close(state)
    assert lines(capsys) == []


def test_meters_do_not_mix(capsys):
    @jax.jit
    def nested(x):
        return lax.scan(lambda c, _: (run(c, TEXT), None), x, None, 2)[0]

    assert jnp.allclose(nested(1.0), 1.1**20)
    assert lines(capsys) == ["0", "30", "60", "90", "100"] * 2

    # The compiler must not move the start of a meter out of the outer loop.
    assert jax.jit(lambda xs: lax.map(lambda x: run(x, TEXT), xs))(jnp.ones(3)).size
    assert lines(capsys) == ["0", "30", "60", "90", "100"] * 3

    first, second = TEXT.init(), TEXT.init()
    second = TEXT.step(second, 0.5)
    TEXT.close(first)
    TEXT.close(TEXT.step(second, 0.51))
    assert lines(capsys) == ["0", "0", "50", "100", "100"]


def test_progress_of_another_shape_is_refused():
    for meter in TEXT, BAR:
        state = meter.init()
        with pytest.raises(ValueError, match=r"`progress` .* got one of shape \(2,\)"):
            meter.step(state, jnp.zeros(2))
        meter.close(state)


def test_progress_has_no_derivative():
    def f(x, meter):
        meter.close(meter.step(meter.init(), x))
        return x**2

    for meter in METERS.values():
        assert jax.grad(lambda x, meter=meter: f(x, meter))(0.5) == 1


def test_loop_is_run_again_in_a_backward_pass():
    f = jax.checkpoint(lambda x: run(jnp.sin(x), TEXT))
    expected = jax.grad(lambda x: 1.1**10 * jnp.sin(x))(1.0)
    assert jnp.allclose(jax.jit(jax.grad(f))(1.0), expected)


def test_several_devices_have_one_meter(capsys):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones(2), NamedSharding(mesh, PartitionSpec("a")))
    assert jnp.allclose(jax.jit(lambda x: run(x, TEXT))(x), 1.1**10)
    assert lines(capsys) == ["0", "30", "60", "90", "100"]


def test_meters_are_static():
    for meter in METERS.values():
        assert jax.tree.leaves(meter) == []
        assert jax.jit(run)(1.0, meter) > 2
    assert internal.TextProgressMeter().minimum_increase == 0.02
    assert internal.TqdmProgressMeter().refresh_steps == 20
    assert METERS["none"].init() is None
    assert METERS["none"].step(None, 0.5) is None


def test_meter_of_the_users_own():
    class Steps(internal.AbstractProgressMeter):
        def init(self):
            return jnp.asarray(0)

        def step(self, state, progress):
            return state + 1

        def close(self, state):
            assert state.shape == ()

    assert jnp.allclose(jax.jit(run)(1.0, Steps()), 1.1**10)
    with pytest.raises(TypeError, match="abstract"):
        internal.AbstractProgressMeter()


def test_without_tqdm_a_bar_cannot_be_made(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match="needs tqdm"):
        internal.TqdmProgressMeter()
