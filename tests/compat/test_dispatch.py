"""Calls of `filter_jit` that JAX knows come to Python in no way, and are right."""

import copy
import enum
import functools
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import warnings
import weakref
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import _environment
from equinox_like._compat import dispatch as module
from equinox_like._jit import jit, quick, stages

PJIT = importlib.import_module("jaxlib._jax").pjit


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    """As with EQX_DISPATCH=jax, by default; for functions that are made from now on."""
    monkeypatch.setattr(module, "DISPATCH", "jax")


class Layer(eqx.Module):
    weight: jax.Array
    size: int = eqx.field(static=True)
    activation: Any = jax.nn.relu

    @eqx.filter_jit
    def method(self, x):
        return self.activation(self.weight * x), self.size


class Point(NamedTuple):
    x: Any
    name: str


class Foreign:
    def __init__(self, x, unit):
        self.x = x
        self.unit = unit


jtu.register_pytree_node(
    Foreign, lambda f: ((f.x,), f.unit), lambda unit, xs: Foreign(xs[0], unit)
)


@pytest.fixture
def calls(monkeypatch):
    """The calls that are made in Python."""
    found = []

    def call(self, tree, args, kwargs, miss=None):
        found.append(args)
        return original(self, tree, args, kwargs, miss)

    original = jit.Program.call
    monkeypatch.setattr(jit.Program, "call", call)
    return found


def calls_of_third(calls, f, make):
    """How often Python is come to by a third call of the same kind; and its output."""
    for _ in range(2):
        f(*make())
    args = make()
    calls.clear()
    out = f(*args)
    return len(calls), out


def run(code, dispatch="jax"):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, "EQX_DISPATCH": dispatch},
    )
    assert not done.returncode, done.stderr
    return done.stdout


ONE = jnp.ones(2)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": ONE, "b": [ONE]},
        Layer(ONE, 3),
        [Layer(ONE, 3), Layer(ONE, 4), "name", None],
        Point(ONE, "unit"),
        (jax.random.key(0), 1.5, 2j, len),
    ],
    ids=["dict", "Module", "Modules", "NamedTuple", "key and statics"],
)
def test_known_calls_do_not_come_to_python(calls, tree):
    def change(x):
        if not eqx.is_array(x):
            return x
        return jax.random.fold_in(x, 1) if x.ndim == 0 else x + 1

    f = eqx.filter_jit(lambda tree: (jtu.tree_map(change, tree), 7))
    count, out = calls_of_third(calls, f, lambda: (tree,))
    assert count == 0
    assert eqx.tree_equal(out, (jtu.tree_map(change, tree), 7), typematch=True)


def test_nodes_of_others_are_taken_apart_and_built(calls):
    f = eqx.filter_jit(lambda foreign: (foreign.x * 2, foreign.unit))
    count, (x, unit) = calls_of_third(calls, f, lambda: (Foreign(ONE, "m"),))
    assert (count, x.tolist(), unit) == (0, [2, 2], "m")
    f = eqx.filter_jit(lambda foreign: Foreign(foreign.x * 2, foreign.unit))
    count, out = calls_of_third(calls, f, lambda: (Foreign(ONE, "m"),))
    assert (count, out.x.tolist(), out.unit) == (0, [2, 2], "m")


def test_methods_keywords_and_callable_modules(calls):
    layer = Layer(ONE, 3)
    assert calls_of_third(calls, layer.method, lambda: (ONE,))[0] == 0
    f = eqx.filter_jit(lambda model, a, z: model.weight * a - z)
    for _ in range(2):
        f(layer, a=ONE, z=ONE)
    calls.clear()
    assert f(layer, a=ONE, z=ONE).tolist() == [0, 0]
    assert not calls
    bound = eqx.filter_jit(layer.method)
    count, (out, size) = calls_of_third(calls, bound, lambda: (ONE + 1,))
    assert (count, out.tolist(), size) == (0, [2, 2], 3)


def test_keywords_in_another_order_than_the_parameters_are_called_in_python(calls):
    f = eqx.filter_jit(lambda z, a: z - a)
    for _ in range(3):
        calls.clear()
        assert f(z=ONE, a=2 * ONE).tolist() == [-1, -1]
    assert len(calls) == 1


def test_programs_with_checks_or_callbacks_are_called_in_python(calls):
    f = eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, "negative"))
    seen = []
    g = eqx.filter_jit(lambda x: jax.debug.callback(seen.append, x))
    assert calls_of_third(calls, f, lambda: (ONE,))[0] == 1
    with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
        f(-ONE)
    assert calls_of_third(calls, g, lambda: (ONE,))[0] == 1
    jax.effects_barrier()
    assert len(seen) == 3


def test_static_values_are_told_apart_strictly():
    counted = eqx.debug.assert_max_traces(max_traces=None)(lambda x, v: (x, repr(v)))
    f = eqx.filter_jit(counted)
    values = [1, 1.0, True, 0.0, -0.0, 1j, "1", (1,), (1.0,), frozenset({1})]
    values += [frozenset({True}), float("nan")]
    for _ in range(3):
        assert [f(ONE, v)[1] for v in values] == list(map(repr, values))
    assert eqx.debug.get_num_traces(f) == len(values)


def test_static_values_whose_comparison_is_no_bool():
    class Vector:
        def __init__(self, *numbers):
            self.numbers = numbers

        def __eq__(self, other):
            return np.asarray(self.numbers) == np.asarray(other.numbers)

        __hash__ = object.__hash__

    f = eqx.filter_jit(lambda x, vector: x + sum(vector.numbers))
    vectors = Vector(1, 2), Vector(3, 4)
    for _ in range(3):
        assert [f(ONE, v).tolist() for v in vectors] == [[4, 4], [8, 8]]


def test_static_value_without_a_hash_is_named():
    class Unhashable(list):
        pass

    f = eqx.filter_jit(lambda x, value: x)
    for _ in range(3):
        with pytest.raises(ValueError, match="static leaf `value` is a Unhashable"):
            f(ONE, Unhashable())


class Swapped(NamedTuple):
    x: Any
    y: Any


jtu.register_pytree_node(
    Swapped, lambda s: ((s.y, s.x), None), lambda _, c: Swapped(*c[::-1])
)


def test_namedtuple_that_is_registered_as_another_node():
    f = eqx.filter_jit(lambda pair: (pair.x - pair.y, pair.x * 2))
    compiled = f.lower(Swapped(3 * ONE, ONE + 0)).compile()
    g = eqx.filter_jit(lambda x, y: (Swapped(x, y), "static"))
    for _ in range(3):
        (x, y), _ = g(3 * ONE, ONE)
        assert (x.tolist(), y.tolist()) == ([3, 3], [1, 1])
    for function in (f, compiled):
        for _ in range(3):
            out = function(Swapped(3 * ONE, ONE + 0))
            assert [x.tolist() for x in out] == [[2, 2], [6, 6]]


class Checked:
    """A node that looks at what it is given, and at its data."""

    def __init__(self, x, name):
        assert isinstance(name, str)
        self.x = x
        self.name = name


def flatten_checked(node):
    if type(node.x) is type(ONE) and node.x.is_deleted():
        raise RuntimeError("looked at data that are gone")
    return (node.x, node.name), None


jtu.register_pytree_node(Checked, flatten_checked, lambda _, c: Checked(*c))


def test_nodes_that_look_at_what_they_hold():
    f = eqx.filter_jit(lambda node: Checked(node.x + 1, node.name))
    for _ in range(3):
        out = f(Checked(ONE + 1, "a"))
        assert (out.x.tolist(), out.name) == ([3, 3], "a")


class Picky:
    def __init__(self, x):
        self.x = x


class Pair(NamedTuple):
    x: Any


class PickyPair(Pair):
    def __new__(cls, x):
        refuse_infinite(x)
        return super().__new__(cls, x)


ERROR = ValueError


def refuse_infinite(x):
    if type(x) is type(ONE) and not jnp.isfinite(x).all():
        raise ERROR("not finite")


def build_picky(_, children):
    refuse_infinite(children[0])
    return Picky(*children)


jtu.register_pytree_node(Picky, lambda picky: ((picky.x,), None), build_picky)


@pytest.mark.parametrize("is_ahead_of_time", [False, True])
@pytest.mark.parametrize("error", [ValueError, RuntimeError, TimeoutError])
@pytest.mark.parametrize("kind", [Picky, PickyPair])
def test_output_that_cannot_be_built(monkeypatch, is_ahead_of_time, error, kind):
    monkeypatch.setitem(globals(), "ERROR", error)
    f = eqx.filter_jit(lambda x: kind(1 / x), donate="none")
    owner = jit.Program
    if is_ahead_of_time:
        f = eqx.filter_jit(lambda x: kind(1 / x), donate="arrays")
        f, owner = f.lower(ONE).compile(), stages.Compiled
    for _ in range(3):
        f(ONE + 0)
    called = []
    monkeypatch.setattr(owner, "call", lambda *args: called.append(args))
    x = ONE - 1
    with pytest.raises(error, match="not finite") as info:
        f(x)
    assert not called
    assert x.is_deleted() == is_ahead_of_time
    notes = getattr(info.value, "__notes__", [])
    assert ("Donated arrays are lost: `x`." in notes) == is_ahead_of_time


class Interrupted:
    """A node with a list of errors: taking it apart raises the last one, once."""

    def __init__(self, *errors):
        self.errors = list(errors)


def flatten_interrupted(node):
    if node.errors:
        raise node.errors.pop()
    return (), None


jtu.register_pytree_node(Interrupted, flatten_interrupted, lambda *_: Interrupted())


@pytest.mark.parametrize("error", [TypeError, AttributeError, TimeoutError])
def test_error_of_the_users_code_is_not_lost_by_asking_again(error):
    f = eqx.filter_jit(lambda x, node: x + 1)
    for _ in range(3):
        f(ONE, Interrupted())
    with pytest.raises(error, match="mine"):
        f(ONE, Interrupted(error("mine")))
    assert f(ONE, Interrupted()).tolist() == [2, 2]


def test_signal_that_comes_as_the_call_returns(monkeypatch):
    f = eqx.filter_jit(lambda x: x + 1)
    for _ in range(3):
        f(ONE)

    def handler(*_):
        raise TypeError("time is up")

    def function(*args):
        out = known(*args)
        signal.raise_signal(signal.SIGUSR1)
        return out

    before = signal.signal(signal.SIGUSR1, handler)
    known = f._program.quick._function
    monkeypatch.setattr(f._program.quick, "_function", function)
    with pytest.raises(TypeError, match="time is up"):
        f(ONE)
    signal.signal(signal.SIGUSR1, before)


def test_error_of_a_first_call_has_no_other_behind_it():
    class New:
        pass

    def fail(x, new):
        assert sys.exc_info() == (None, None, None)
        raise KeyError("mine")

    jtu.register_pytree_node(New, lambda new: ((), None), lambda *_: New())
    f = eqx.filter_jit(fail)
    for _ in range(3):
        with pytest.raises(KeyError, match="mine") as info:
            f(ONE, New())
        assert info.value.__context__ is None and info.value.__cause__ is None


def test_error_keeps_what_it_came_after():
    @eqx.filter_jit
    def fail(x):
        try:
            raise KeyError("first")
        except KeyError:
            raise RuntimeError("second") from None

    for _ in range(3):
        try:
            raise OSError("out there")
        except OSError:
            with pytest.raises(RuntimeError, match="second") as info:
                fail(ONE)
        context = info.value.__context__
        assert isinstance(context, KeyError)
        assert isinstance(context.__context__, OSError)


def test_program_that_is_refused_its_arguments_is_not_asked_for_again(monkeypatch):
    f = eqx.filter_jit(lambda x, y: (x * 2, y + 1), donate="arrays")
    compiled = f.lower(ONE, ONE).compile()
    for _ in range(3):
        compiled(ONE + 1, ONE + 2)
    called = []
    monkeypatch.setattr(stages.Compiled, "call", lambda *args: called.append(args))
    x = ONE + 1
    with pytest.raises(eqx.DonationError, match="`x` and `y` are the same array"):
        compiled(x, x)
    assert not called


def test_error_of_one_kind_of_call_leaves_the_others_known(calls):
    fails = True

    def fail(x, name):
        if name == "bad" and fails:
            raise KeyError("mine")
        return x + 1

    f = eqx.filter_jit(fail)
    for _ in range(3):
        f(ONE, "good")
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            f(ONE, "bad")
        with pytest.raises(ValueError, match="static leaf `name`"):
            f(ONE, bytearray())
    calls.clear()
    assert f(ONE, "good").tolist() == [2, 2] and not calls
    fails = False
    for _ in range(2):
        f(ONE, "bad")
    calls.clear()
    assert f(ONE, "bad").tolist() == [2, 2] and not calls


def test_arguments_of_a_call_that_failed_are_let_go_of():
    f = eqx.filter_jit(lambda node, x: x)
    for _ in range(3):
        f(Interrupted(), ONE)
    x, node = ONE + 0, Interrupted()
    x.delete()
    reference = weakref.ref(node)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(eqx.DonationError, match="`x`"):
            f(node, x)
        del node
        assert reference() is None
    finally:
        gc.enable()


class Color(enum.Enum):
    RED = 1


def test_program_of_which_no_call_can_be_quick_is_called_in_python(calls):
    f = eqx.filter_jit(lambda x, color: x)
    calls_of_third(calls, f, lambda: (ONE, Color.RED))
    assert f._program.quick is quick.IN_PYTHON
    f = eqx.filter_jit(lambda x, color: x)
    f(ONE, None)
    f(ONE, None)
    calls_of_third(calls, f, lambda: (ONE, Color.RED))
    calls.clear()
    f(ONE, None)
    assert not calls


# Also where it claims to be of a package whose types are what they are for good.
@pytest.mark.parametrize("module", [__name__, "builtins", "numpy.no", None, 3])
def test_type_that_becomes_a_node_later(module):
    late_type = type("Late", (), {"__module__": module})

    def with_x(x):
        late = late_type()
        late.x = x
        return late

    f = eqx.filter_jit(lambda x, late: x + late.x.sum())
    late = with_x(jnp.ones(2))
    for _ in range(3):
        assert f(ONE, late).tolist() == [3, 3]
    jtu.register_pytree_node(
        late_type, lambda late: ((late.x,), None), lambda _, c: with_x(*c)
    )
    late.x = 10 * late.x
    for _ in range(3):
        assert f(ONE, late).tolist() == [21, 21]


def test_type_of_python_that_becomes_a_node_later():
    code = """
        import functools
        import jax, jax.numpy as jnp, numpy as np, equinox_like as eqx
        f = eqx.filter_jit(lambda x, p: x + p.args[0].sum())
        constant = np.ones(2)
        p = functools.partial(len, constant)
        print([f(jnp.ones(2), p).tolist() for _ in range(3)][-1])
        jax.tree_util.register_pytree_node(
            functools.partial,
            lambda p: (p.args, p.func),
            lambda func, args: functools.partial(func, *args),
        )
        constant *= 10
        print([f(jnp.ones(2), p).tolist() for _ in range(3)][-1])
    """
    assert run(code) == "[3.0, 3.0]\n[21.0, 21.0]\n"


def test_list_that_is_shortened_while_it_is_taken_apart():
    code = """
        import jax, jax.numpy as jnp, equinox_like as eqx
        class Shortens:
            does = False
        def flatten(node):
            if Shortens.does:
                Shortens.does = False
                values.clear()
            return (), None
        jax.tree_util.register_pytree_node(Shortens, flatten, lambda *_: Shortens())
        f = eqx.filter_jit(lambda x, values: x)
        for i in range(20):
            values = [1.5, Shortens()] + [0.5] * 1000
            f(jnp.ones(2), values)
            Shortens.does = i > 3
            f(jnp.ones(2), values)
        print("survived")
    """
    assert run(code) == "survived\n"


def test_calls_while_types_are_learned_and_the_dispatch_is_looked_for():
    code = """
        import signal, threading
        import jax, jax.numpy as jnp, equinox_like as eqx
        from equinox_like._compat import dispatch

        def handler(*_):
            print("in the handler", g(x).tolist())
        def look(pjit, find=dispatch.find):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            return find(pjit)
        signal.signal(signal.SIGUSR1, handler)
        dispatch.find = look
        x = jnp.ones(2)
        g = eqx.filter_jit(lambda x: x + 1)
        print(eqx.filter_jit(lambda x: x * 3)(x).tolist())

        class Node: pass
        class Static: pass
        def flatten(node):
            h(x, Static())
            return (eqx.filter_jit(lambda x: x * 2)(x),), None
        h = eqx.filter_jit(lambda x, static: x)
        jax.tree_util.register_pytree_node(Node, flatten, lambda *_: Node())
        f = eqx.filter_jit(lambda node, x: x)
        print([f(Node(), x).tolist() for _ in range(3)][-1])
    """
    found = run(code)
    assert sorted(found.splitlines()) == [
        "[1.0, 1.0]",
        "[3.0, 3.0]",
        "in the handler [2.0, 2.0]",
    ]


class Compared:
    """A value that remembers which functions have compared it."""

    by: ClassVar[list[str]] = []

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        Compared.by.append(sys._getframe(1).f_code.co_qualname)
        return isinstance(other, Compared) and self.number == other.number

    def __hash__(self):
        return 13


class Irregular(eqx.Module):
    x: jax.Array
    tag: Any = eqx.field(static=True)

    @functools.cached_property
    def later(self):
        return 1


def irregular(x, tag):
    module = Irregular(x, tag)
    assert module.later
    return module


@pytest.mark.parametrize("node", [Foreign, Irregular, irregular])
@pytest.mark.parametrize("donate", ["none", "arrays"])
def test_structures_are_not_compared_in_the_table_of_cpp(calls, node, donate):
    # Else it could change in between, if another thread clears JAX's caches.
    Compared.by.clear()
    traces = []
    f = eqx.filter_jit(lambda node: traces.append(0) or node.x * 1, donate=donate)
    for n in (3, 4):
        count, out = calls_of_third(calls, f, lambda n=n: (node(ONE + 0, Compared(n)),))
        assert (count, out.tolist()) == (0, [1, 1])
    assert len(traces) == 2
    assert Compared.by
    above_cpp = quick.Guarded.__name__, quick._seeing_to_donation.__name__
    assert not [name for name in Compared.by if name.startswith(above_cpp)]


@pytest.mark.parametrize("node", [Foreign, Irregular, irregular])
@pytest.mark.parametrize("make", [lambda n: [n], lambda n: {"a": n}])
def test_structure_without_a_hash_may_change(node, make):
    def total(tag):
        return sum(tag.values() if isinstance(tag, dict) else tag)

    def read(node):
        return node.x[0] * total(node.unit if isinstance(node, Foreign) else node.tag)

    f, g = eqx.filter_jit(read), eqx.filter_jit(lambda node: node.x[0])
    first, second = node(ONE, make(1)), node(ONE, tag := make(1))
    for _ in range(3):
        assert (f(first), f(second), g(second)) == (1, 1, 1)
    tag["a" if isinstance(tag, dict) else 0] = 9
    assert (f(second), f(node(ONE, make(9))), f(first)) == (9, 9, 1)


def test_structure_that_was_copied_or_unpickled_is_the_same(calls):
    layer = Layer(ONE, 3)
    f = eqx.filter_jit(lambda layer: layer.weight + 1)
    for _ in range(3):
        f(layer)
    structure = jtu.tree_structure(layer)
    calls.clear()
    for again in (copy.deepcopy(structure), pickle.loads(pickle.dumps(structure))):
        assert f(again.unflatten(jtu.tree_leaves(layer))).tolist() == [2, 2]
    assert not calls


class Unlike:
    """Equal to others, whose hash is another."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Unlike) and self.number == other.number

    __hash__ = object.__hash__


@pytest.mark.parametrize("node", [Foreign, Irregular])
@pytest.mark.parametrize("is_ahead_of_time", [False, True])
def test_structures_that_are_not_known_again_are_left_to_python(
    monkeypatch, node, is_ahead_of_time
):
    monkeypatch.setattr(jit, "MANY", 4)
    monkeypatch.setattr(stages, "MANY", 4)
    traces = []
    f = jitted = eqx.filter_jit(lambda node: traces.append(0) or node.x + 1)
    if is_ahead_of_time:
        f = jitted.lower(node(ONE, Unlike(3))).compile()
    for _ in range(12):
        assert f(node(ONE, Unlike(3))).tolist() == [2, 2]
    assert len(traces) == 1
    program = f if is_ahead_of_time else jitted._program
    assert program.quick is quick.IN_PYTHON


class Raises:
    """Raises what it is told to when it is compared."""

    error: ClassVar[Any] = None

    def __eq__(self, other):
        if Raises.error is not None:
            raise Raises.error
        return isinstance(other, Raises)

    def __hash__(self):
        return 13


@pytest.mark.parametrize("node", [Foreign, Irregular])
def test_error_of_comparing_structures_is_not_lost(monkeypatch, node):
    f = eqx.filter_jit(lambda node: node.x + 1)
    for _ in range(3):
        f(node(ONE, Raises()))
    monkeypatch.setattr(Raises, "error", TimeoutError("in time"))
    with pytest.raises(TimeoutError, match="in time"):
        f(node(ONE, Raises()))
    monkeypatch.setattr(Raises, "error", None)
    assert f(node(ONE, Raises())).tolist() == [2, 2]


class Stubborn:
    """Refuses to be hashed, but not by a `TypeError`."""

    error: ClassVar[type[Exception]] = ValueError

    def __hash__(self):
        raise Stubborn.error("no")


@pytest.mark.parametrize("error", [ValueError, AttributeError, NotImplementedError])
@pytest.mark.parametrize("node", [Foreign, Irregular])
def test_structure_that_refuses_its_hash_is_left_to_python(monkeypatch, node, error):
    monkeypatch.setattr(Stubborn, "error", error)
    f = eqx.filter_jit(lambda tree: jtu.tree_leaves(tree)[0] + 1)
    tag = Stubborn()
    # More calls than Python's stack is deep: JAX gives back no depth after an error.
    for _ in range(1200):
        assert f(ONE).shape == f(node(ONE, tag)).shape == (2,)


def test_wrapped_function_is_known_by_its_names(calls):
    def loss(x: jax.Array, scale: float) -> jax.Array:
        return (x**2).sum() * scale

    for transform in (
        eqx.filter_grad,
        eqx.filter_value_and_grad,
        eqx.filter_vmap(in_axes=(0, None)),
        eqx.filter_jacrev,
        eqx.filter_checkpoint,
    ):
        f = eqx.filter_jit(transform(loss))
        assert calls_of_third(calls, f, lambda: (ONE, 2.0))[0] == 0


@pytest.mark.parametrize("donate", ["none", "arrays"])
def test_callback_that_fails_runs_once(donate):
    code = f"""
        import jax, jax.numpy as jnp, equinox_like as eqx
        runs = []
        def host(x):
            runs.append(1)
            if x.sum() < 0:
                raise KeyError("host")
            return x
        f = eqx.filter_jit(
            lambda x, name: jax.pure_callback(host, x, x), donate={donate!r}
        )
        for _ in range(3):
            f(jnp.ones(3), "name")
        runs.clear()
        x = -jnp.ones(3)
        try:
            jax.block_until_ready(f(x, "name"))
        except Exception as e:
            lost = [note for note in e.__notes__ if "onated array" in note]
            print(type(e).__name__, len(runs), x.is_deleted(), *lost)
    """
    found = run(code)
    assert found == run(code, "public") and found.startswith("ValueError 1 ")


def test_output_that_cannot_be_taken_apart_once_it_is_there():
    class Traced:
        def __init__(self, x):
            self.x = x

    def flatten(traced):
        assert type(traced.x) is not type(ONE), "only while it is traced"
        return (traced.x,), None

    jtu.register_pytree_node(Traced, flatten, lambda _, c: Traced(*c))
    f = eqx.filter_jit(lambda x: (Traced(x + 1), "static"))
    for _ in range(3):
        out, static = f(ONE + 0)
        assert (out.x.tolist(), static) == ([2, 2], "static")


def test_types_of_static_values_are_let_go_of():
    def use():
        class Local:
            pass

        f = eqx.filter_jit(lambda x, local: x)
        for _ in range(3):
            f(ONE, Local())
        return weakref.ref(Local)

    dead = use()
    eqx.clear_caches()
    jax.clear_caches()
    for _ in range(3):
        gc.collect()
    assert dead() is None


def test_program_tells_of_the_users_line_alone():
    f = eqx.filter_jit(jnp.cbrt)
    f(ONE)  # traced from within the dispatch
    text = f.lower(ONE).lowered.as_text(debug_info=True)
    assert __file__ in text and "equinox_like/_" not in text


def test_shapes_are_found_without_a_backend():
    code = (
        "import jax, jax.numpy as jnp, equinox_like as eqx\n"
        "from jax._src import xla_bridge\n"
        "f = eqx.filter_jit(lambda x, n: x, donate='arrays')\n"
        "jax.eval_shape(lambda x: f(x, 1), jax.ShapeDtypeStruct((2,), 'float32'))\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    assert run(code) == "False\n"


def test_without_threads_calls_are_right(monkeypatch):
    def start(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(module, "_found", [])
    f = eqx.filter_jit(lambda x, name: x + 1)
    with monkeypatch.context() as patch:
        patch.setattr(module.threading.Thread, "start", start)
        for _ in range(2):
            assert f(ONE, "name").tolist() == [2, 2]
    assert module.dispatch() is not None


def test_self_test_is_not_told_of():
    code = """
        import jax, equinox_like as eqx
        jax.config.update("jax_log_compiles", True)
        eqx.filter_jit(lambda x: x)(jax.numpy.ones(2))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=120,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "EQX_DISPATCH": "jax"},
    )
    assert "<lambda>" in done.stderr and "self_test" not in done.stderr


@pytest.mark.parametrize("name", ["disable_jit", "no_tracing", "debug_key_reuse"])
def test_self_test_is_not_misled_by_settings(name):
    code = (
        "import jax\n"
        f"jax.config.update('jax_{name}', True)\n"
        "from equinox_like._compat.dispatch import dispatch\n"
        "print(dispatch() is None)"
    )
    assert run(code) == "False\n"


def test_error_of_a_comparison_is_the_users_own():
    class Unlucky(str):
        def __eq__(self, other):
            raise KeyError("unlucky")

        def __hash__(self):
            return 13

    f = eqx.filter_jit(lambda x, value: x)
    f(ONE, Unlucky())
    with pytest.raises(KeyError, match="unlucky"):
        f(ONE, Unlucky())


def test_clearing_brings_the_dispatch_back(calls, monkeypatch):
    monkeypatch.setattr(jit, "MANY", 2)
    f = eqx.filter_jit(lambda x, n: x)
    for n in range(4):
        f(ONE, n)
    assert calls_of_third(calls, f, lambda: (ONE, 0))[0] == 1
    f.clear_cache()
    assert calls_of_third(calls, f, lambda: (ONE, 0))[0] == 0


def test_function_that_calls_itself():
    @eqx.filter_jit
    def f(x, n):
        return x if n == 0 else f(x, n - 1) * 2

    for _ in range(3):
        assert f(ONE, 3).tolist() == [8, 8]


def test_while_another_thread_has_it_python_serves(calls):
    f = eqx.filter_jit(lambda x: x + 1)
    for _ in range(2):
        f(ONE)
    calls.clear()
    guarded = f._program.quick
    taken = guarded._free.pop()
    assert f(ONE).tolist() == [2, 2] and len(calls) == 1
    guarded._free.append(taken)
    assert f(ONE).tolist() == [2, 2] and len(calls) == 1


def test_static_field_that_was_changed_behind_our_back_is_seen():
    f = eqx.filter_jit(lambda layer: layer.weight * layer.size)
    layer = Layer(ONE, 3)
    for _ in range(3):
        assert f(layer).tolist() == [3, 3]
    object.__setattr__(layer, "size", 4)
    assert f(layer).tolist() == [4, 4]


def test_module_that_lacks_a_field():
    class Lazy(eqx.Module):
        a: Any
        b: Any = eqx.field(init=False)

    layer = Lazy.__new__(Lazy)
    f = eqx.filter_jit(lambda layer, x: x * len(jtu.tree_leaves(layer)))
    for _ in range(3):
        assert f(layer, ONE).tolist() == [0, 0]
    object.__setattr__(layer, "a", ONE)
    for _ in range(3):
        assert f(layer, ONE).tolist() == [1, 1]


def test_calls_without_arrays():
    f = eqx.filter_jit(lambda n: n + 1, donate="arrays")
    assert [f(1), f(1), f(2)] == [2, 2, 3]


def test_nothing_is_donated_under_transformations():
    f = eqx.filter_jit(lambda x, y: x * y, donate="arrays")
    x, y = ONE + 1, ONE + 2
    for _ in range(3):
        assert f(x.copy(), y.copy()).tolist() == [6, 6]
    for _ in range(3):
        assert jax.vmap(lambda i: f(x, y) * i)(ONE).tolist() == [[6, 6]] * 2
        assert jax.grad(lambda x: f(x, y).sum())(x).tolist() == [3, 3]
        assert jax.grad(lambda z: (f(x, y) * z).sum())(ONE).tolist() == [6, 6]
        assert jax.jit(lambda: f(x, y))().tolist() == [6, 6]
    assert not x.is_deleted() and not y.is_deleted()


def test_error_of_a_known_call_is_explained():
    f = eqx.filter_jit(lambda state: jtu.tree_map(lambda x: x + 1, state))
    for _ in range(3):
        f({"a": ONE, "b": ONE})
    x = ONE + 1
    x.delete()
    with pytest.raises(eqx.DonationError, match=r"`state\['b'\]`.*has been deleted"):
        f({"a": ONE, "b": x})


def test_node_that_fails_to_flatten_is_told_of_by_itself():
    class Failing:
        fails = False

    def flatten(node):
        if node.fails:
            raise AttributeError("cannot")
        return (), None

    jtu.register_pytree_node(Failing, flatten, lambda *_: Failing())
    f = eqx.filter_jit(lambda x, node: x)
    node = Failing()
    for _ in range(3):
        f(ONE, node)
    node.fails = True
    with pytest.raises(AttributeError, match="cannot"):
        f(ONE, node)


def test_clearing_makes_a_new_trace():
    f = eqx.filter_jit(eqx.debug.assert_max_traces(max_traces=None)(lambda x: x + 1))
    for clear in (jax.clear_caches, f.clear_cache):
        for _ in range(3):
            f(ONE)
        before = eqx.debug.get_num_traces(f)
        clear()
        f(ONE)
        assert eqx.debug.get_num_traces(f) == before + 1, clear


def test_settings_of_jax_are_respected():
    traces = []
    f = eqx.filter_jit(lambda x, name: (traces.append(name), jnp.sin(x) / x)[1])
    for _ in range(3):
        f(ONE, "a")
    assert len(traces) == 1
    with jax.disable_jit():
        f(ONE, "a")
    assert len(traces) == 2
    with jax.no_tracing():
        f(ONE, "a")
        with pytest.raises(RuntimeError, match="no_tracing"):
            f(ONE, "b")
    with jax.enable_x64(True):
        assert f(jnp.ones(2, "float64"), "a").dtype == "float64"
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        f(0 * ONE, "a")


def test_calls_with_new_types_become_known(calls):
    class New:
        pass

    jtu.register_pytree_node(New, lambda new: ((), None), lambda *_: New())
    f = eqx.filter_jit(lambda x, new: x)
    new = New()
    for _ in range(2):
        f(ONE, new)
    calls.clear()
    f(ONE, new)
    assert not calls


def test_what_was_compiled_ahead_of_time(monkeypatch):
    calls = []

    def call(self, *args):
        calls.append(args)
        return original(self, *args)

    original = stages.Compiled.call
    monkeypatch.setattr(stages.Compiled, "call", call)
    f = eqx.filter_jit(lambda layer, n: (layer.weight * n, layer.activation))
    compiled = f.lower(Layer(ONE, 3), 2).compile()
    count, out = calls_of_third(calls, compiled, lambda: (Layer(ONE + 1, 3), 2))
    assert (count, out[0].tolist(), out[1]) == (0, [4, 4], jax.nn.relu)
    for args, path in (
        ((Layer(ONE, 4), 2), "`layer.size`"),
        ((Layer(ONE, 3), 2.0), "`n`"),
        ((Layer(jnp.ones(5), 3), 2), "layer.weight"),
    ):
        for _ in range(3):
            with pytest.raises(TypeError, match=path):
                compiled(*args)
    out, _ = compiled(Layer(ONE + 2, 3), n=2)
    assert out.tolist() == [6, 6]


def test_what_was_compiled_ahead_of_time_by_public_names(monkeypatch):
    monkeypatch.setattr(module.Dispatch, "function_of", lambda *_: None)
    compiled = eqx.filter_jit(lambda x, n: (x * n, n)).lower(ONE, 2).compile()
    for _ in range(3):
        assert eqx.tree_equal(compiled(ONE, 2), (2 * ONE, 2), typematch=True)


def test_very_many_static_values_are_looked_up_in_python(calls, monkeypatch):
    monkeypatch.setattr(jit, "MANY", 4)
    f = eqx.filter_jit(lambda x, n: (x + 1, n))
    for expected in (0, 1):
        for n in range(4):
            count, (x, m) = calls_of_third(calls, f, lambda n=n: (ONE, n))
            assert (count, x.tolist(), m) == (expected, [2, 2], n)
        f(ONE + 1, 4)


# Functions that donate


class Net(eqx.Module):
    layers: list
    activation: Any = jax.nn.relu

    @eqx.filter_jit(donate="arrays")
    def moved(self, by, name):
        return jtu.tree_map(lambda x: x + by if eqx.is_array(x) else x, self), name

    @eqx.filter_jit(donate="all-except-first")
    def kept(self, x):
        return x + self.layers[0]

    # With a parameter of which no other test has a callable: these share a program.
    def __call__(self, shift):
        return shift + self.layers[0]


def make_net():
    return Net([Layer(ONE + 0, 3), ONE + 1])


def grow(tree):
    return jtu.tree_map(lambda x: x + 1 if eqx.is_array(x) else x, tree)


def fates(tree):
    return [x.is_deleted() for x in jtu.tree_leaves(tree) if isinstance(x, jax.Array)]


@pytest.mark.parametrize("mode", ["arrays", "warn", "strict", ("tree",)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ONE + 1,
        lambda: {"a": ONE + 0, "b": [ONE + 1, 1.5, "name"]},
        make_net,
        lambda: (Point(ONE + 0, "unit"), Foreign(ONE + 0, "m"), None),
    ],
    ids=["array", "dict", "Module", "nodes"],
)
def test_known_calls_that_donate_do_not_come_to_python(calls, mode, make):
    f = eqx.filter_jit(lambda tree: (grow(tree), 7), donate=mode)
    trees = [make() for _ in range(3)]
    left = iter(trees)
    count, out = calls_of_third(calls, f, lambda: (next(left),))
    assert count == 0
    assert all(map(all, map(fates, trees)))
    assert eqx.tree_equal(out, (grow(make()), 7), typematch=True)


def test_methods_and_callables_that_donate(calls):
    for _ in range(3):
        calls.clear()
        net, by = make_net(), jnp.array(1.0)
        out, name = net.moved(by, "name")
        assert all(fates(net)) and not by.is_deleted() and name == "name"
        assert out.layers[1].tolist() == [3, 3]
    assert not calls
    net = Net([ONE + 1])
    wrapped = eqx.filter_jit(net, donate="arrays")
    for f in (net.kept, wrapped):
        for _ in range(3):
            calls.clear()
            x = ONE + 0
            assert f(x).tolist() == [3, 3]
            assert x.is_deleted() and fates(net) == [False]
        assert not calls


def test_by_keyword_and_beside_what_is_kept(calls):
    def move(a, b, n, *, c):
        return b + n, c + 1, a.sum()

    for donate, expected in (
        ("arrays", [False, True, True]),
        ("all-except-first", [False, True, True]),
        (("c",), [False, False, True]),
        (("a", "c"), [True, False, True]),
    ):
        f = eqx.filter_jit(move, donate=donate)
        for _ in range(3):
            calls.clear()
            a, b, c = jnp.ones(5), ONE + 0, jnp.ones(3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", eqx.DonationWarning)
                out = f(a, b, 2, c=c)
            assert [x.tolist() for x in out] == [[3, 3], [2, 2, 2], 5]
            assert fates([a, b, c]) == expected, donate
        assert not calls


@pytest.mark.parametrize("mode", ["arrays", "warn", "strict", ("x",)])
def test_array_that_somebody_looks_at_is_gone_all_the_same(calls, mode):
    f = eqx.filter_jit(lambda x: x + 1, donate=mode)
    for _ in range(3):
        calls.clear()
        x = ONE + 1
        view = np.asarray(x)
        assert f(x).tolist() == [3, 3]
        assert x.is_deleted() and view.tolist() == [2, 2]
    assert not calls


def test_kinds_of_call_with_other_arrays_gone_are_told_apart(calls):
    f = eqx.filter_jit(lambda x, y: {"x": x + 1, "y": y[:2]}, donate="arrays")
    for _ in range(3):
        calls.clear()
        for y, is_gone in ((ONE + 0, True), (jnp.ones(3), False)):
            x = ONE + 0
            f(x, y)
            assert fates([x, y]) == [True, is_gone]
        for x in (np.ones(2, "float32"), np.float32(1)):
            y = ONE + 0
            assert f(x, y)["x"].sum() == (x + 1).sum()
            assert y.is_deleted()
    assert not calls


def test_what_is_gone_by_chance_is_not_deleted_again(calls):
    f = eqx.filter_jit(lambda params, ema: params + 1, donate="arrays")
    for _ in range(3):
        x = ONE + 0
        f(x, x)  # `ema` is not used, so it may be the same array
    for _ in range(3):
        calls.clear()
        params, ema = ONE + 0, ONE + 0
        f(params, ema)
        assert fates([params, ema]) == [True, False]
    assert not calls

    params, ema = ONE + 0, ONE + 0
    ema.delete()
    f.clear_cache()
    for _ in range(3):
        assert f(params.copy(), ema).tolist() == [2, 2]

    def forget(x):
        arrays[1].delete()

    f = eqx.filter_jit(
        lambda x, y: (jax.pure_callback(forget, None, x), x + 1)[1], donate="arrays"
    )
    for _ in range(4):
        arrays = ONE + 0, jnp.ones(3)
        f(*arrays)


def test_kinds_that_only_structure_tells_apart_are_left_to_python_sooner(
    calls, monkeypatch
):
    monkeypatch.setattr(jit, "MANY_DONATING", 4)
    f = eqx.filter_jit(lambda tree: grow(tree), donate="arrays")
    nested = [
        lambda n=n: ({"a": ONE + 0} if n == 0 else [None] * n + [ONE + 0],)
        for n in range(6)
    ]
    counts = [calls_of_third(calls, f, make)[0] for make in nested]
    assert counts == [0, 0, 0, 0, 1, 1]


def test_use_of_what_is_gone_is_told_of_and_forgotten(calls):
    @eqx.filter_jit(donate="arrays")
    def update(model, n):
        return grow(model)

    f = update
    for _ in range(3):
        used = {"w": ONE + 0, "b": ONE + 1}
        f(used, 3)
    for _ in range(2):
        with pytest.raises(
            eqx.DonationError, match=r"`model\['b'\]`.*donated to `update`"
        ):
            f({"w": ONE, "b": used["b"]}, 3)
        assert not ONE.is_deleted()
    x = ONE + 0
    with pytest.raises(
        eqx.DonationError, match=r"`model\['b'\]` and `model\['w'\]` are the same"
    ):
        f({"w": x, "b": x}, 3)
    assert not x.is_deleted()
    calls.clear()
    assert f({"w": x, "b": ONE + 1}, 3)["w"].tolist() == [2, 2]
    assert not calls


def test_arrays_on_several_devices_are_donated_in_python(calls):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("d"))
    f = eqx.filter_jit(lambda x: x + 1, donate="arrays")
    for make in (lambda: (jax.device_put(ONE, sharding),), lambda: (ONE + 0,)):
        args = [make() for _ in range(3)]
        left = iter(args)
        calls_of_third(calls, f, left.__next__)
        assert all(map(all, map(fates, args)))
    x = jax.device_put(ONE, sharding)
    f(x)
    with pytest.raises(eqx.DonationError, match=r"`x`.*has been deleted"):
        f(x)


def test_what_was_traced_ahead_of_time_becomes_known(calls):
    f = eqx.filter_jit(lambda x: x[:1], donate="warn")
    f.donation_report(ONE)
    with pytest.warns(eqx.DonationWarning, match="`x`") as caught:
        assert calls_of_third(calls, f, lambda: (ONE,))[0] == 0
    assert len(caught) == 1
    with pytest.warns(eqx.DonationWarning, match=r"`x` \(float32\[5\]\)"):
        f(jnp.ones(5))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_without_jit_or_with_a_search_for_nans_donation_is_right(count):
    f = eqx.filter_jit(lambda x: x / x, donate="arrays")
    for _ in range(count):
        f(ONE + 0)
    with jax.disable_jit():
        x = ONE + 0
        assert f(x).tolist() == [1, 1] and not x.is_deleted()
    for is_known in (True, False):
        if not is_known:
            f.clear_cache()
        x = ONE * 0
        with jax.debug_nans(True), pytest.raises(FloatingPointError) as info:
            f(x)
        is_gone = "arguments were donated" in str(info.value)
        assert x.is_deleted() == is_gone == is_known
    f.clear_cache()
    x = ONE + 0
    assert f(x).tolist() == [1, 1] and x.is_deleted()


def test_arguments_of_a_call_that_donates_are_let_go_of():
    f = eqx.filter_jit(lambda tree, node: grow(tree), donate="arrays")
    for _ in range(3):
        node = Foreign(None, "m")
        dead, x = weakref.ref(node), ONE + 0
        f({"x": x}, node)
        del node
        assert dead() is None and x.is_deleted()


# Without the private names


def test_what_has_changed_is_not_used():
    assert isinstance(module.find(PJIT), module.Dispatch)
    assert module.find(None) is None
    assert module.find(lambda *args: lambda *args: None) is None


@pytest.mark.parametrize("name", ["run", "returning", "function"])
def test_what_does_not_work_is_not_used(monkeypatch, name):
    monkeypatch.setattr(module.Dispatch, name, lambda *_: None)
    assert module.find(PJIT) is None


def test_static_values_must_be_told_apart(monkeypatch):
    def blind(self, x, key_of):
        return lambda value: ((), None)

    state = jax.jit(lambda x: x).__getstate__()
    assert module.works(module.Dispatch(state, PJIT))
    monkeypatch.setattr(module.Dispatch, "_flatten_for", blind)
    assert not module.works(module.Dispatch(state, PJIT))


def test_without_it_calls_are_right(monkeypatch):
    monkeypatch.setattr(quick, "dispatch", lambda: None)
    for donate in ("none", "arrays"):
        f = eqx.filter_jit(lambda tree, n: (tree, n), donate=donate)
        for n in (1, 1.0, True):
            for _ in range(3):
                out = f(Layer(ONE + 1, 3), n)
                assert eqx.tree_equal(out, (Layer(ONE + 1, 3), n), typematch=True)


def test_environment_chooses():
    code = (
        "from equinox_like._compat.dispatch import dispatch\nprint(dispatch() is None)"
    )
    assert run(code) == "False\n"
    assert run(code, "public") == "True\n"
    with pytest.raises(ValueError, match="EQX_DISPATCH is jax or public; got 'x'"):
        _environment.read_dispatch("x")
