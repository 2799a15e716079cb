"""Arrays in compiled functions that JAX does not see: in attributes, and new Refs."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx

X = jnp.ones(3)


class Trainer:
    def __init__(self):
        self.weight = jnp.ones(3)
        self.calls = 0

    def plain(self, x):
        self.calls += 1
        self.weight = {"new": [self.weight * x]}
        return x.sum()

    method = eqx.filter_jit(plain)
    donating = eqx.filter_jit(plain, donate="arrays")


def bound(trainer):
    return eqx.filter_jit(trainer.plain)


@pytest.mark.parametrize(
    "get", [lambda trainer: trainer.method, lambda trainer: trainer.donating, bound]
)
def test_assigned_array_is_named_once(get):
    trainer = Trainer()
    call = get(trainer)
    message = "`plain` assigned an array to the attribute `weight` of a `Trainer`"
    with pytest.warns(UserWarning, match=message) as found:
        call(X)
    assert [w.filename for w in found if "weight" in str(w.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(X)
    assert trainer.calls == 1


def test_warning_is_given_after_a_stage_too():
    trainer = Trainer()
    Trainer.method.lower(trainer, X)
    with pytest.warns(UserWarning, match="`weight` of a `Trainer`"):
        trainer.method(X)


def test_what_is_assigned_before_or_is_no_array_of_the_trace_is_not_named():
    class Counter:
        array = None

        @eqx.filter_jit
        def inner(self, x):
            self.count = 3
            return x

    @jax.jit
    def outer(x):
        counter = Counter()
        counter.array = x
        return counter.inner(x)

    outer(X)


def test_ref_of_the_trace_in_the_output_is_refused_by_its_path():
    class Counting(eqx.Module):
        calls: jax.Ref

        def __init__(self):
            self.calls = jax.new_ref(jnp.zeros(()))

    message = (
        r"returned a `jax.Ref` that exists only while it is traced, at `out\[0\].calls`"
    )
    make = eqx.filter_jit(lambda: [Counting()])
    for f in (
        make,
        eqx.filter_jit(lambda: make()),
        jax.jit(lambda: make()[0].calls[...]),
    ):
        with pytest.raises(TypeError, match=message):
            f()
    # Under `jax.jit` a Ref of the caller is a tracer, too.
    f = jax.jit(lambda ref: eqx.filter_jit(lambda refs: refs)([ref])[0][...])
    with pytest.raises(TypeError, match=r"`jax.Ref` .* at `out\[0\]`"):
        f(jax.new_ref(jnp.zeros(())))


def test_ref_of_the_caller_may_be_returned():
    ref = jax.new_ref(jnp.zeros(()))

    @eqx.filter_jit
    def f(refs):
        refs[0][...] += 1
        return refs, jax.new_ref(refs[0][...])[...]

    for wrap in lambda f: f, eqx.filter_jit:
        (same,), count = wrap(f)([ref])
        assert same is ref and count == ref[...]
    assert ref[...] == 2


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda x: lambda y: x * y, "x"),
        (lambda x: functools.partial(jnp.multiply, [x]), "args"),
        (lambda x: functools.partial(jnp.multiply, y=x), "keywords"),
    ],
)
def test_function_that_captures_an_array_of_the_trace_is_refused(wrap, name):
    message = rf"at `out\['f'\]` that holds an array of its trace, in `{name}`"
    with pytest.raises(TypeError, match=message):
        eqx.filter_jit(lambda x: {"f": wrap(x)})(X)
    kept = wrap(X)
    assert eqx.filter_jit(lambda: kept)() is kept

    @jax.jit
    def outer(x):  # an array of an outer trace may be captured: it is still there
        f = wrap(x)
        assert eqx.filter_jit(lambda f: f)(f) is f
        return x

    outer(X)


def test_function_that_captures_a_variable_without_a_value_is_returned():
    @eqx.filter_jit
    def make():
        def f():
            return later

        if f is None:
            later = 1
        return f

    assert callable(make())


def _yields(x):
    yield x


async def _awaited(x):
    return x


# JAX will refuse generators in a pytree.
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("function", [_yields, _awaited, lambda x: (x for _ in "ab")])
def test_code_that_would_run_after_the_trace_is_refused(function):
    jitted = eqx.filter_jit(function)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"at `out` .* after the trace"):
            jitted(jnp.ones(2))
