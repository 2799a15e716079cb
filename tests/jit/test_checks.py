"""A program that holds a check is waited for; others are not. The check is one of ours."""

import concurrent.futures

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

import equinox_like as eqx
from equinox_like._jit import checks

BEGIN, END = "a check failed", "until here"


class CheckFailed(Exception):
    pass


def fail_unless_positive(x):
    if not (x > 0).all():
        raise ValueError(f"\n{BEGIN}\n`x` must be positive\n{END}\n")
    return x


def call_back(x):
    return jax.pure_callback(
        fail_unless_positive, jax.ShapeDtypeStruct(x.shape, x.dtype), x
    )


positive_p = Primitive("test_positive")
positive_p.def_impl(call_back)
positive_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(positive_p, mlir.lower_fun(call_back, multiple_results=False))
batching.defvectorized(positive_p)


def positive(x):
    return positive_p.bind(x)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    known = checks.registered_checks
    for primitive in list(known):
        monkeypatch.delitem(known, primitive)
    monkeypatch.setitem(known, positive_p, None)  # is removed at the end
    checks.register_check(positive_p, BEGIN, END, CheckFailed)


@pytest.fixture
def waits(monkeypatch):
    """What was waited for, one entry for each call."""
    found = []

    def wait_for(out):
        found.append(out)
        return checks.wait_for(out)

    for module in ("specialization", "stages"):
        monkeypatch.setattr(f"equinox_like._jit.{module}.wait_for", wait_for)
    return found


def test_failed_check_is_raised_by_the_call_itself():
    f = eqx.filter_jit(lambda x: positive(x) + 1)
    assert f(jnp.ones(2)).tolist() == [2, 2]
    for _ in range(2):
        with pytest.raises(CheckFailed, match="must be positive") as info:
            f(-jnp.ones(2))
        assert info.value.__cause__ is None
    assert f(jnp.ones(2)).tolist() == [2, 2]


def test_only_programs_with_a_check_are_waited_for(waits):
    f = eqx.filter_jit(lambda x, check: positive(x) if check else x + 1)
    f(jnp.ones(2), False)
    assert waits == []
    for n in (1, 2):
        f(jnp.ones(2), True)
        assert len(waits) == n
    f(jnp.ones(2), False)
    assert len(waits) == 2


def test_shapes_of_one_function_are_told_apart(waits):
    f = eqx.filter_jit(lambda x: positive(x) if x.size > 2 else x + 1)
    f(jnp.ones(2))
    f(jnp.ones(3))
    assert len(waits) == 1
    f(jnp.ones(2))
    assert len(waits) == 1
    f(jnp.ones(3))
    assert len(waits) == 2


def test_what_another_thread_traces_meanwhile_is_waited_for(waits, monkeypatch):
    f = eqx.filter_jit(lambda x: positive(x) if x.size > 2 else x + 1)
    traced = []

    def meanwhile(*args):
        found = checks.holds_check(*args)
        if not traced:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                traced.append(pool.submit(f.trace, jnp.ones(3)).result())
        return found

    with monkeypatch.context() as patch:
        patch.setattr("equinox_like._jit.specialization.holds_check", meanwhile)
        f(jnp.ones(2))
    assert waits == []
    f(jnp.ones(3))
    assert len(waits) == 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: jax.jit(f),
        lambda f: eqx.filter_jit(f),
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
        lambda f: lambda x: jax.lax.cond(True, f, lambda x: x, x),
        lambda f: jax.vmap(f),
        lambda f: jax.checkpoint(f),
    ],
    ids=["jit", "filter_jit", "scan", "cond", "vmap", "checkpoint"],
)
def test_check_is_found_in_what_was_traced_before(wrap, waits):
    inner = wrap(positive)
    inner(jnp.ones(2))
    waits.clear()
    f = eqx.filter_jit(lambda x: inner(x) * 2)
    f(jnp.ones(2))
    assert len(waits) == 1
    with pytest.raises(CheckFailed):
        f(-jnp.ones(2))


def test_inner_functions_leave_the_waiting_to_the_outermost(waits):
    inner = eqx.filter_jit(positive)

    @eqx.filter_jit
    def outer(x):
        y = inner(x)
        assert waits == []
        return y

    outer(jnp.ones(2))
    assert len(waits) == 1
    # Traced first under another function, and then called by itself.
    inner(jnp.ones(2))
    assert len(waits) == 2


def test_compiled_ahead_of_time_it_is_waited_for_too(waits):
    f = eqx.filter_jit(positive)
    compiled = f.lower(jnp.ones(2)).compile()
    compiled(jnp.ones(2))
    assert len(waits) == 1
    eqx.filter_jit(lambda x: x + 1).lower(jnp.ones(2)).compile()(jnp.ones(2))
    assert len(waits) == 1
    with pytest.raises(CheckFailed):
        compiled(-jnp.ones(2))


def test_losses_by_donation_are_told():
    f = eqx.filter_jit(lambda x, y: (positive(x) + y, y + 1), donate=("y",))
    y = jnp.ones(2)
    f(jnp.ones(2), y)
    with pytest.raises(CheckFailed) as info:
        f(-jnp.ones(2), jnp.ones(2))
    assert "lost: `y`" in info.value.__notes__[0]


def test_other_errors_stay_what_they_are():
    def fail(x):
        raise ValueError("something else")

    @eqx.filter_jit
    def f(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(fail, out, positive(x))

    with pytest.raises(Exception, match="something else") as info:
        f(jnp.ones(2))
    assert not isinstance(info.value, CheckFailed)


EAGER = {
    "vmap": lambda f: jax.vmap(f),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[0],
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x))),
}


@pytest.mark.parametrize("wrap", EAGER)
def test_call_in_an_eager_transformation_is_waited_for(wrap, waits):
    with_check = eqx.filter_jit(lambda x: positive(jax.lax.stop_gradient(x)) * x)
    without = eqx.filter_jit(lambda x: x + 1)
    EAGER[wrap](without)(jnp.ones(2))
    assert waits == []
    EAGER[wrap](with_check)(jnp.ones(2))
    assert len(waits) == 1
    assert jax.tree.leaves(waits[0])
    with pytest.raises(CheckFailed, match="must be positive"):
        EAGER[wrap](with_check)(-jnp.ones(2))


ELSEWHERE = {
    "trace": lambda f, x: f.trace(x),
    "lower": lambda f, x: f.lower(x),
    "eval_shape": lambda f, x: f.eval_shape(x),
    "jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "thread": lambda f, x: in_a_thread(lambda: f.lower(x)),
}


def in_a_thread(f):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return pool.submit(f).result()


@pytest.mark.parametrize("donate", ["none", "arrays"])
@pytest.mark.parametrize("traced", ELSEWHERE)
def test_call_whose_trace_was_made_elsewhere_is_waited_for(traced, donate, waits):
    f = eqx.filter_jit(lambda x: positive(x) if x.size > 2 else x + 1, donate=donate)
    traces = ELSEWHERE[traced](f, jnp.ones(3))
    f(jnp.ones(2))
    waits.clear()
    for n in (1, 2):
        f(jnp.ones(3))
        assert len(waits) == n
    f(jnp.ones(2))
    assert len(waits) == 2
    del traces


@pytest.mark.parametrize("options", [{}, {"in_shardings": PartitionSpec()}])
def test_trace_made_elsewhere_is_found_in_the_cache(options):
    sizes = []
    f = eqx.filter_jit(lambda x: (sizes.append(x.size), x + 1)[1], **options)
    with jax.set_mesh(jax.make_mesh((1,), ("d",))):
        f.lower(jnp.ones(3))
        f(jnp.ones(2))
        f(jnp.ones(3))
    assert sizes == [3, 2]


def test_call_within_a_program_is_not_waited_for(waits):
    f = eqx.filter_jit(lambda x: positive(jax.lax.stop_gradient(x)) * x)
    jax.jit(jax.vmap(f))(jnp.ones(2))
    jax.jit(jax.grad(f))(jnp.ones(()))
    assert waits == []


def test_what_an_unknown_tracer_holds_is_not_waited_for(waits, monkeypatch):
    monkeypatch.setattr("equinox_like._compat.tracing._HOLD", ())
    f = eqx.filter_jit(lambda x: positive(x) + 1)
    jax.vmap(f)(jnp.ones(2))
    assert waits == []
