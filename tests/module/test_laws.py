"""Python's tools that work on dataclasses work on Modules."""

import abc
import copy
import dataclasses
import functools
import importlib
import inspect
import pickle
import pydoc
import subprocess
import sys
import textwrap
import types
import typing
import weakref
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable
from unittest import mock

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation

import equinox_like as eqx

_T = TypeVar("_T")


class Plain(eqx.Module):
    x: Any
    n: int = eqx.field(static=True, default=1)

    def method(self, y: int, *, z: "int" = 2) -> int:
        """Documented."""
        return y + z


class WithInit(Plain):
    def __init__(self, x: Any, n: int = 1):
        self.x = x
        self.n = n


class Converted(Plain):
    x: Any = eqx.field(converter=jnp.asarray)


class Abstract(eqx.Module):
    x: eqx.AbstractVar[Any]
    n: eqx.AbstractVar[int]

    @abc.abstractmethod
    def method(self, y: int, *, z: "int" = 2) -> int: ...


class Concrete(Abstract):
    x: Any
    n: int = eqx.field(static=True, default=1)

    def method(self, y: int, *, z: "int" = 2) -> int:
        """Documented."""
        return y + z


class OfAny(Plain, Generic[_T]):
    pass


class Wrapped(eqx.Module):
    x: Any
    n: int = eqx.field(static=True, default=1)

    @eqx.filter_jit
    def method(self, y: int, *, z: "int" = 2) -> int:
        """Documented."""
        return y + z


class Cached(eqx.Module):
    x: Any
    n: int = eqx.field(static=True, default=1)

    @functools.lru_cache  # noqa: B019
    def method(self, y: int, *, z: "int" = 2) -> int:
        """Documented."""
        return y + z


class Mixin:
    def method(self, y: int, *, z: "int" = 2) -> int:
        """Documented."""
        return y + z


class Mixed(Mixin, eqx.Module):
    x: Any
    n: int = eqx.field(static=True, default=1)


class Derived(Plain):
    z: int = 3


CLASSES = (
    Plain,
    WithInit,
    Converted,
    Concrete,
    OfAny,
    Wrapped,
    Cached,
    Mixed,
    Derived,
)
of_each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)


def names(cls):
    return [f.name for f in dataclasses.fields(cls)]


def use(module):
    """All that makes a Module remember something."""
    jtu.tree_flatten(module)
    jax.jit(lambda m: m)(module)
    return eqx.filter_jit(lambda m: m)(module), module.method(1)


@of_each_class
def test_dictionary_of_an_instance_are_its_fields(cls):
    module = cls(1.5)
    assert sorted(vars(module)) == sorted(names(cls))
    use(module)
    assert sorted(vars(module)) == sorted(names(cls))
    assert cls(**vars(module)) == module


@of_each_class
def test_type_hints_of_a_class_are_its_fields(cls):
    assert set(typing.get_type_hints(cls)) == set(names(cls))
    assert typing.get_type_hints(eqx.Module) == {}


@of_each_class
def test_signature_is_that_of_init(cls):
    parameters = names(cls)
    assert list(inspect.signature(cls).parameters) == parameters
    assert inspect.getfullargspec(cls.__init__).args == ["self", *parameters]
    assert inspect.getfullargspec(cls).args == parameters
    assert set(typing.get_type_hints(cls.__init__)) == {*parameters, "return"} - (
        {"return"} if cls is WithInit else set()
    )


@of_each_class
def test_functions_of_dataclasses_work(cls):
    module = cls(1.5)
    assert dataclasses.is_dataclass(cls) and dataclasses.is_dataclass(module)
    assert dataclasses.replace(module, x=2.5) == cls(2.5)
    as_dict = dataclasses.asdict(module)
    assert list(as_dict) == names(cls) and as_dict["x"] == 1.5
    assert dataclasses.astuple(module)[:2] == (1.5, 1)
    assert cls.__match_args__ == tuple(names(cls))


@of_each_class
def test_method_shows_what_the_function_shows(cls):
    method = cls(1.5).method
    assert method.__name__ == "method" and method.__doc__ == "Documented."
    assert inspect.getdoc(method) == "Documented."
    assert method.__annotations__ == {"y": int, "z": "int", "return": int}
    assert str(inspect.signature(method)) == "(y: int, *, z: 'int' = 2) -> int"
    assert method(1) == 3 and method(1, z=1) == 2


@pytest.mark.parametrize("cls", [Plain, WithInit, Concrete, OfAny, Mixed, Derived])
def test_type_hints_of_a_method_are_those_of_the_function(cls):
    expected = {"y": int, "z": int, "return": int}
    assert typing.get_type_hints(cls(1.5).method) == expected
    assert typing.get_type_hints(cls.method) == expected


@pytest.mark.parametrize("cls", [Plain, Concrete])
def test_function_in_the_dictionary_of_a_class_is_one(cls):
    function = vars(cls)["method"]
    assert callable(function) and inspect.isfunction(function)
    assert function.__code__ is cls.method.__code__
    assert function.__kwdefaults__ == {"z": 2} and function.__globals__ is globals()
    assert inspect.signature(function) == inspect.signature(cls.method)
    assert function(cls(1.5), 1) == 3
    kinds = {a.name: a.kind for a in inspect.classify_class_attrs(cls)}
    assert kinds["method"] == "method"
    found = dict(inspect.getmembers(cls, inspect.isfunction))
    assert found["method"] is cls.method
    assert inspect.isfunction(inspect.getattr_static(cls(1.5), "method"))


@of_each_class
def test_field_is_to_its_class_what_it_is_to_one_with_slots(cls):
    # That is, something in the dictionary of the class: JAX's outputs need it.
    @dataclasses.dataclass(slots=True)
    class Slotted:
        x: Any

    for each in cls, Slotted:
        assert isinstance(each.x, types.MemberDescriptorType)
        assert inspect.getattr_static(each(1.5), "x") is each.x
        for name in vars(each):  # as `%autoreload` does
            getattr(each, name)
    assert cls.n == 1

    @runtime_checkable
    class HasX(Protocol):
        def x(self) -> Any: ...

    @runtime_checkable
    class HasY(Protocol):
        y: Any

    assert issubclass(cls, HasX) and issubclass(Slotted, HasX)
    assert isinstance(cls(1.5), HasX) and not isinstance(cls(1.5), HasY)


@of_each_class
def test_classes_are_derived_as_any_class(cls):
    class Meta(type(eqx.Module)):
        pass

    class WithMeta(cls, metaclass=Meta):
        pass

    for derived in (
        type(eqx.Module)("Called", (cls,), {}),
        type(cls)("Called", (cls,), {}),
        types.new_class("New", (cls,)),
        types.new_class("New", (cls,), {"metaclass": Meta}),
        WithMeta,
        type("Two", (cls, eqx.nn.Identity), {}),
    ):
        module = derived(1.5)
        assert isinstance(module, cls) and module.method(1) == 3
        returned, _ = use(module)
        assert type(returned) is derived and returned == module


@of_each_class
def test_generic_class_takes_types(cls):
    class Of(cls, Generic[_T]):
        pass

    assert typing.get_origin(Of[int]) is Of and typing.get_args(Of[int]) == (int,)
    module = Of[int](1.5)
    assert type(module) is Of and module == Of(1.5)
    assert jtu.tree_structure(module) == jtu.tree_structure(Of(1.5))
    assert module.__orig_class__ == Of[int]

    class OfInt(Of[int]):
        pass

    assert OfInt(1.5).method(1) == 3


@pytest.mark.parametrize(
    "cls",
    [
        eqx.Partial,
        eqx.nn.SpectralNorm,
        eqx.nn.WeightNorm,
        eqx.nn.Shared,
        eqx.nn.Stacked,
        eqx.nn.StateIndex,
    ],
)
def test_wrapper_takes_the_type_of_what_it_wraps(cls):
    assert typing.get_origin(cls[int]) is cls


@of_each_class
@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        dataclasses.replace,
    ],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
def test_copy_is_equal(cls, again):
    for module in (cls(1.5), use(cls(1.5))[0]):
        other = again(module)
        assert type(other) is cls and other == module
        assert jtu.tree_structure(other) == jtu.tree_structure(module)
        if again is not dataclasses.replace:
            assert again(module.method)(1) == 3


@of_each_class
def test_structure_can_be_pickled_after_a_call_too(cls):
    module = Plain(1.5) if cls is Converted else cls(1.5)
    eqx.filter_jit(lambda module: None)(module)
    structure = jtu.tree_structure(module)
    again = pickle.loads(pickle.dumps(structure))
    assert again == structure
    unpickled = again.unflatten(jtu.tree_leaves(module))
    assert eqx.filter_jit(lambda module: module)(unpickled) == module


@of_each_class
def test_instance_can_be_hashed_and_referred_to_weakly(cls):
    module = Plain(1.5) if cls is Converted else cls(1.5)
    assert {module: 1}[type(module)(1.5)] == 1
    reference = weakref.ref(module)
    assert reference() is module


@of_each_class
def test_method_can_be_replaced_for_a_while(cls):
    module = cls(1.5)
    with mock.patch.object(cls, "method", return_value=7):
        assert module.method(1) == 7
    with mock.patch.object(cls, "method", lambda self, y: self.x + y):
        assert module.method(1) == 2.5 and isinstance(module.method, eqx.Module)
    assert module.method(1) == 3 and isinstance(module.method, eqx.Module)
    assert mock.create_autospec(module).method


@of_each_class
def test_help_shows_the_documentation(cls):
    shown = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    assert "Documented." in shown and "Makes an instance" not in shown


@pytest.mark.parametrize("cls", [Plain, WithInit, Concrete, OfAny, Derived])
def test_beartype_checks_the_methods_of_a_class(cls):
    @beartype
    class Checked(cls):
        def own(self, y: int) -> int:
            return y

        def __call__(self, y: int) -> int:
            return y

        @classmethod
        def of_class(cls, y: int) -> int:
            return y

        @staticmethod
        def of_none(y: int) -> int:
            return y

        @property
        def wrong(self) -> int:
            return "text"  # pyright: ignore

    module = Checked(1.5)
    for function in module.own, module, module.of_class, module.of_none:
        assert function(1) == 1
        with pytest.raises(BeartypeCallHintParamViolation):
            function("text")
    with pytest.raises(Exception, match=r"wrong.*return"):
        module.wrong  # noqa: B018
    assert isinstance(module.own, eqx.Module) and jtu.tree_leaves(module.own)[0] == 1.5


SOURCE = """
    import equinox_like as eqx

    class Net(eqx.Module):
        x: int
        n: int = eqx.field(static=True, default=1)

        def method(self, y: int) -> int:
            return y + 1

        def __call__(self, y: int) -> int:
            return y
"""


def write(folder, name, source=SOURCE):
    (folder / name).write_text(textwrap.dedent(source))
    importlib.invalidate_caches()


def test_beartype_checks_a_package(tmp_path):
    # By its import hooks, which are process-wide.
    package = tmp_path / "claw_of_net"
    package.mkdir()
    write(package, "net.py")
    write(package, "__init__.py", "from beartype.claw import beartype_this_package\n")
    with (package / "__init__.py").open("a") as file:
        file.write("beartype_this_package()\nfrom .net import Net as Net\n")
    program = """
        import jax
        from beartype.roar import BeartypeCallHintParamViolation
        from claw_of_net import Net

        net = Net(1)
        assert net.method(1) == 2 and jax.tree.leaves(net.method) == [1]
        for wrong in (lambda: net.method("a"), lambda: net("a"), lambda: Net("a")):
            try:
                wrong()
            except BeartypeCallHintParamViolation:
                continue
            raise AssertionError("not checked")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env={
            "PYTHONPATH": ":".join([str(tmp_path), *sys.path]),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write(tmp_path, "net_to_reload.py")
    yield importlib.import_module("net_to_reload")
    del sys.modules["net_to_reload"]


def test_module_can_be_reloaded(module, tmp_path):
    old = module.Net(1)
    write(tmp_path, "net_to_reload.py", SOURCE.replace("y + 1", "y + 2"))
    importlib.reload(module)
    new = module.Net(1)
    assert (old.method(1), new.method(1)) == (2, 3)
    assert new != old and jtu.tree_structure(new) != jtu.tree_structure(old)
    assert eqx.filter_jit(lambda m: m.method(1))(new) == 3


def test_autoreload_of_ipython_changes_classes_and_instances(module, tmp_path):
    from IPython.extensions.autoreload import superreload

    old = module.Net(1)
    assert use(old)[1] == 2
    changed = SOURCE.replace("y + 1", "y + 2").replace("default=1", "default=4")
    write(tmp_path, "net_to_reload.py", changed)
    superreload(module)
    assert old.method(1) == 3 and type(old) is module.Net
    assert old.n == 1 and module.Net(1).n == 4
    assert module.Net(1).method(1) == 3 and jtu.tree_leaves(module.Net(5)) == [5]


def test_autoreload_may_add_a_field(module, tmp_path):
    from IPython.extensions.autoreload import superreload

    old = module.Net(jnp.ones(2))
    around = eqx.Partial(old.method)  # a node above it, which is cached, too
    for each in (old, around):
        eqx.filter_jit(lambda m: m)(each)
    changed = SOURCE.replace("def method", "scale: float = 3.0\n\n        def method")
    write(tmp_path, "net_to_reload.py", changed)
    superreload(module)
    f = eqx.filter_jit(lambda m, x: (m, x * 2))
    for each in (old, around, module.Net(jnp.ones(2))):
        for _ in range(2):
            out, doubled = f(each, jnp.ones(()))
            assert doubled == 2 and eqx.tree_equal(out, each)
    assert old.scale == 3 and len(jtu.tree_leaves(module.Net(1))) == 2


def test_bodies_may_hold_what_functools_makes(tmp_path):
    class Body(eqx.Module):
        x: int

        @functools.singledispatchmethod
        def single(self, y):
            return "any"

        @single.register
        def _(self, y: int):
            return "int"

        part = functools.partialmethod(lambda self, y: self.x + y, 2)

        @functools.cached_property
        def cached(self):
            return self.x + 1

    body = Body(1)
    assert (body.single("a"), body.single(1), body.part()) == ("any", "int", 3)
    assert body.cached == 2 and jtu.tree_structure(body) == jtu.tree_structure(Body(1))
