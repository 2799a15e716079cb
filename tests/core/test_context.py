import asyncio
import concurrent.futures
import copy
import threading

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx

mode = eqx.Context("a", name="mode")


def counting():
    """A function compiled by plain `jax.jit` that tells the mode, and its traces."""
    traced = []

    @jax.jit
    def f(x):
        traced.append(mode.value)
        return x + {"a": 1, "b": 2}.get(mode.value, 3)

    return f, traced


def test_compiled_functions_obey_and_are_traced_once_per_value() -> None:
    f, traced = counting()
    assert f(0.0) == 1
    for _ in range(2):
        with mode("b"):
            assert f(0.0) == 2
            with mode("a"):  # the default, and so what was compiled first
                assert f(0.0) == 1
    assert f(0.0) == 1 and traced == ["a", "b"]


def test_a_function_compiled_within_another_obeys_too() -> None:
    inner = jax.jit(lambda x: x + (mode.value == "b"))

    @jax.jit
    def outer(x):
        with mode("b"):
            y = inner(x)
        return inner(x), y

    assert outer(0.0) == (0, 1)


@pytest.mark.parametrize("values", [(1, 1.0, True), (0.0, -0.0), ((1,), (True,))])
def test_values_that_python_calls_equal_do_not_share_a_trace(values) -> None:
    traced = []
    f = jax.jit(lambda x: traced.append(mode.value) or x)
    for value in values:
        with mode(value):  # pyright: ignore[reportArgumentType]
            f(0.0)
    assert list(map(repr, traced)) == list(map(repr, values))


def test_value_without_a_hash_is_refused_before_it_is_entered() -> None:
    with pytest.raises(TypeError, match=r"context `mode` .* hash.* got \[1\].*tuple"):
        mode([1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"context `x` .* hash"):
        eqx.Context({}, name="x")
    assert mode.value == "a"


def test_a_manager_can_be_used_again_and_within_itself_and_after_an_error() -> None:
    manager = mode("b")
    for _ in range(2):
        with manager, manager:
            assert mode.value == "b"
        assert mode.value == "a"
    with pytest.raises(ZeroDivisionError), manager:
        _ = 1 / 0
    assert mode.value == "a"


def test_each_thread_starts_with_the_default_and_keeps_its_own() -> None:
    f, _ = counting()
    seen = []

    def work() -> None:
        seen.append((mode.value, int(f(0.0))))
        with mode("c"):
            seen.append((mode.value, int(f(0.0))))

    with mode("b"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert f(0.0) == 2
    assert seen == [("a", 1), ("c", 3)]


def test_with_between_two_awaits_is_fine() -> None:
    async def task(value):
        await asyncio.sleep(0)
        with mode(value):
            seen = mode.value
        await asyncio.sleep(0)
        return seen

    async def main():
        return await asyncio.gather(task("b"), task("c"))

    assert asyncio.run(main()) == ["b", "c"]


def test_decorated_function_runs_within() -> None:
    @mode("b")
    def f(x):
        return x, mode.value

    assert f(1) == (1, "b") and f.__name__ == "f" and mode.value == "a"


def test_generators_and_async_functions_cannot_be_decorated() -> None:
    def generator():
        yield

    async def coroutine():
        pass

    async def both():
        yield

    for function in (generator, coroutine, both):
        with pytest.raises(TypeError, match="`mode` cannot decorate a generator or an"):
            mode("b")(function)


def test_context_is_not_copied() -> None:
    with pytest.raises(TypeError, match="context `mode` cannot be copied"):
        copy.deepcopy(mode)


def test_explain_names_the_context_and_both_values() -> None:
    f = eqx.filter_jit(lambda x: x)
    f(jnp.ones(3))
    with mode("b"):
        retrace = f.explain(jnp.ones(3))
        assert retrace is not None
        (difference,) = retrace.differences
        assert difference.kind == "user context"
        assert str(difference) == "`the context mode` was 'a', and is now 'b'."
        f(jnp.ones(3))
        assert f.explain(jnp.ones(3)) is None
    with mode("c"):
        assert "'c'" in str(f.explain(jnp.ones(3)))


def test_static_outputs_of_filter_jit_follow_the_context() -> None:
    f = eqx.filter_jit(lambda x: (x, mode.value))
    assert f(jnp.ones(()))[1] == "a"
    with mode("b"):
        assert f(jnp.ones(()))[1] == "b"
    assert f(jnp.ones(()))[1] == "a"


def test_what_was_compiled_ahead_of_time_keeps_its_value() -> None:
    f, _ = counting()
    with mode("b"):
        compiled = f.lower(0.0).compile()
    assert compiled(0.0) == 2


def times(x):
    return x * (3.0 if mode.value == "b" else 2.0)


@eqx.filter_custom_vjp
def with_vjp(x):
    return times(x)


with_vjp.def_fwd(lambda perturbed, x: (times(x), None))
with_vjp.def_bwd(lambda residuals, ct, perturbed, x: times(ct))


@eqx.filter_custom_jvp
def with_jvp(x):
    return times(x)


with_jvp.def_jvp(lambda primals, tangents: (times(*primals), times(*tangents)))


@pytest.mark.parametrize(
    "f",
    [
        with_vjp,
        with_jvp,
        jax.checkpoint(times),
        eqx.filter_checkpoint(times),
        lambda x: eqx.filter_scan(lambda c, _: (times(c), None), x, None, 1)[0],
        lambda x: eqx.filter_scan(
            lambda c, _: (times(c), None), x, None, 1, checkpoint="all"
        )[0],
        lambda x: eqx.filter_while_loop(
            lambda c: c[1] < 1,
            lambda c: (times(c[0]), c[1] + 1),
            (x, 0),
            max_steps=3,
            kind="checkpointed",
        )[0],
        lambda x: eqx.filter_invertible(
            lambda _, x: times(x), inverse=lambda _, y: y / times(1.0)
        )([None], x),
    ],
    ids=[
        "custom_vjp",
        "custom_jvp",
        "checkpoint",
        "filter_checkpoint",
        "scan",
        "checkpointed_scan",
        "checkpointed_while",
        "invertible",
    ],
)
def test_derivatives_see_the_context_of_the_forward_pass(f) -> None:
    @jax.jit
    def forward(x):
        with mode("b"):
            return f(x)

    x = jnp.asarray(1.0)
    assert forward(x) == 3
    assert jax.grad(forward)(x) == 3
    with mode("b"):
        _, pull_back = jax.vjp(f, x)
    assert pull_back(jnp.ones(())) == (3,)


def test_a_new_context_leaves_what_is_compiled() -> None:
    f, traced = counting()
    f(0.0)
    other = eqx.Context(0, name="other")
    f(0.0)
    assert traced == ["a"]
    with other(1):
        f(0.0)
    f(0.0)
    assert traced == ["a", "a"]


def test_contexts_that_are_left_in_another_order_are_an_error() -> None:
    other = eqx.Context(0, name="other")
    first, second = mode("b"), other(1)
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="`mode` was left before one that was"):
        first.__exit__(None, None, None)
    assert (mode.value, other.value) == ("a", 1)
    second.__exit__(None, None, None)
    assert (mode.value, other.value) == ("a", 0)


def test_with_around_a_yield_is_an_error_if_the_context_is_entered_meanwhile() -> None:
    def steps():
        with mode("b"):
            yield

    step = steps()
    next(step)
    with mode("c"):
        with pytest.raises(RuntimeError, match="around the `yield` of a generator"):
            next(step)
        assert mode.value == "c"
    assert mode.value == "a"


def test_context_that_is_left_in_another_thread_is_an_error() -> None:
    entered = mode("b")
    entered.__enter__()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with pytest.raises(RuntimeError, match="`mode` was entered in another thread"):
            pool.submit(entered.__exit__, None, None, None).result()
    assert mode.value == "b"
    entered.__exit__(None, None, None)
    assert mode.value == "a"


def test_the_order_of_entering_two_contexts_does_not_matter() -> None:
    other = eqx.Context(0, name="other")
    f, traced = counting()
    with mode("b"), other(1):
        f(0.0)
    with other(1), mode("b"):
        f(0.0)
    assert traced == ["b"]
