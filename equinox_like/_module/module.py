"""`Module`: a frozen dataclass that is a pytree, and whose methods are pytrees too.

The metaclass makes each subclass a dataclass, chooses its `__init__`, registers it with
JAX, and controls each construction. Reading an attribute runs no code of the metaclass:
methods become pytrees through a descriptor on the class.
"""

import abc
import dataclasses
import functools
import inspect
import types
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NoReturn, dataclass_transform

import jax.tree_util as jtu

from .._annotations import signature_of
from .._call_path import add_note_on_path, leave_out_this_frame
from .._tree.cached import MISSING, Attribute, Cached, raw_dict, set_raw_dict
from .._tree.deleted import deleted_named, raise_if_deleted_here
from .._tree.equal import tree_equal
from .._tree.filters import is_array_like
from .._tree.format import tree_pformat
from .._tree.strict import compared_as_trees
from .construct import (
    ModuleSpec,
    construct,
    convert_annotations,
    generate_init,
    has_custom_init,
    spec_of,
    warn_of_unused_post_init,
)
from .fields import field, is_dunder, make_dataclass, put_attributes
from .flatten import (
    ASSIGNABLE,
    WRAPPER_ATTRIBUTES,
    Node,
    is_empty,
    register,
    register_empty,
    restore,
)
from .instance import (
    Immutable,
    OfCallables,
    raise_assignment_error,
    render,
    show_function,
)
from .values import ARRAYS, JITTED, check_hashable, identity_key, warn_of_unannotated

_new = object.__new__
_SCREEN = 40  # lines
_SHORTER = "\n# In fewer lines: equinox_like.nn.summary(model)"


class MethodDescriptor:
    """Replaces a function in a class body. Reading it from an instance gives a pytree.

    For tools that decorate the functions in `vars(cls)` it looks like the function: it
    has all attributes of the function, and passes `isinstance` checks for one.
    """

    # The rest is in the `__dict__`, which cloudpickle takes for that of the function.
    __slots__ = ("__dict__", "attributes", "function")

    def __init__(self, function: Any):
        functools.update_wrapper(self, function)  # pyright: ignore[reportArgumentType]
        del self.__dict__["__wrapped__"]
        self.function = function
        # cloudpickle drops the names of a function of `jax.jit`.
        names = "__module__", "__name__", "__qualname__", "__doc__"
        self.attributes = {name: getattr(function, name, None) for name in names}
        self.attributes["__func__"] = function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.function
        bound: Any = _new(BoundMethod)
        attributes = self.attributes.copy()
        attributes["__self__"] = instance
        set_raw_dict(bound, attributes)
        return bound

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.function)

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # `copy` and `pickle` read attributes before it is set
            raise AttributeError(name)
        return getattr(self.function, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self):
        return MethodDescriptor, (self.function,)


class _Forwarder:
    """Binds a method of a base class that is not a Module, like a Module's method.

    It looks the method up each time, since the base class may be changed.
    """

    def __init__(self, owner: type, name: str):
        self.owner = owner
        self.name = name
        self.last: MethodDescriptor | None = None

    def __get__(self, instance: Any, owner: type) -> Any:
        found = self._find(owner)
        if type(found) in _METHODS:
            last = self.last
            if last is None or last.function is not found:
                last = self.last = MethodDescriptor(found)
            found = last
        bind = getattr(type(found), "__get__", None)
        return found if bind is None else bind(found, instance, owner)

    def _find(self, cls: type) -> Any:
        """The attribute that Python would find without any `_Forwarder`."""
        order = cls.__mro__
        for base in order[order.index(self.owner) + 1 :]:
            found = base.__dict__.get(self.name, self)
            if type(found) is not _Forwarder:
                return found
        raise AttributeError(
            f"{cls.__name__!r} object has no attribute {self.name!r}", name=self.name
        )


_METHODS = types.FunctionType, type(functools.lru_cache(lambda: None)), JITTED


def _as_method(name: str, value: Any) -> Any:
    return MethodDescriptor(value) if _is_method(name, value) else value


def _is_method(name: str, value: Any) -> bool:
    return type(value) in _METHODS and not is_dunder(name)


def _forward_methods(cls: type) -> None:
    """Lets `cls` bind the methods of its base classes that are not Modules."""
    names = {
        name
        for base in cls.__mro__[:-1]
        if not issubclass(base, Node)
        for name, value in base.__dict__.items()
        if _is_method(name, value)
    }
    for name in names:
        found = next(b.__dict__[name] for b in cls.__mro__ if name in b.__dict__)
        if _is_method(name, found):
            setattr(cls, name, _Forwarder(cls, name))


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field, field))
class ModuleMeta(abc.ABCMeta):
    """Makes each subclass of `Module` a dataclass and a pytree node."""

    # Hidden from type checkers, so that a call of the class is checked by `__init__`.
    if not TYPE_CHECKING:
        __call__ = construct

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        is_abstract: bool = False,
        strict: Any = False,
        kw_only: bool = False,
        init: bool = True,
        **kwargs: Any,
    ):
        body_is_empty = is_empty(namespace)
        namespace = {key: _as_method(key, x) for key, x in namespace.items()}
        # Fields are in the `__dict__`; a slot of the same name would hide them.
        namespace.pop("__slots__", None)
        # An earlier base class that is not a Module would bring a plain `__dict__`.
        namespace.setdefault("__dict__", vars(Cached)["__dict__"])
        cls: Any = super().__new__(mcs, name, bases, namespace, **kwargs)
        make_dataclass(cls, kw_only)
        put_attributes(cls)
        _forward_methods(cls)
        plain_setattr = cls.__setattr__ is Immutable.__setattr__
        generated = None
        if has_custom_init(cls):
            warn_of_unused_post_init(cls)
        elif not init:
            raise TypeError(
                f"`init=False` for {name}: neither it nor a base class defines `__init__`."
            )
        else:
            generated = cls.__init__ = generate_init(cls)
        spec = ModuleSpec(
            cls,
            is_abstract=is_abstract or getattr(strict, "force_abstract", False),
            init=generated,
            plain_setattr=plain_setattr,
            is_immutable=plain_setattr and cls.__delattr__ is Immutable.__delattr__,
        )
        if spec.converters and "__init__" in cls.__dict__:
            convert_annotations(cls.__init__, spec)
        if "__doc__" not in namespace:
            shown = str(signature_of(cls)).removesuffix(" -> None")
            cls.__doc__ = cls.__name__ + shown
        _set_spec(cls, spec)
        warn_of_unannotated(cls, namespace)
        if body_is_empty:
            register_empty(cls)
        elif not namespace.get("_registers_itself_", False):
            register(cls, spec.dynamic, spec.static, spec.is_immutable)
        return cls

    @property
    def __signature__(cls) -> inspect.Signature:
        # Otherwise `inspect` would show the signature of the metaclass's `__call__`.
        signature = signature_of(cls.__init__)  # pyright: ignore[reportAttributeAccessIssue]
        parameters = list(signature.parameters.values())[1:]
        return signature.replace(parameters=parameters)

    @property
    def __abstractvars__(cls) -> frozenset[str]:
        return cls._module_spec_.abstract_variables  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def __abstractclassvars__(cls) -> frozenset[str]:
        return cls._module_spec_.abstract_class_variables  # pyright: ignore[reportAttributeAccessIssue]

    def __setattr__(cls, name: str, value: Any) -> None:
        spec = spec_of(cls)
        if name == "_module_spec_" and spec is not None:
            restore(cls, spec, value)
            _set_spec(cls, value)
            return
        if type(value) is Attribute:  # `%autoreload` copies that of another class
            value = Attribute(cls, name, value.default)
        elif type(cls.__dict__.get(name)) is Attribute and not hasattr(
            type(value), "__set__"
        ):
            value = Attribute(cls, name, value)
        super().__setattr__(name, _as_method(name, value))

    def __delattr__(cls, name: str) -> None:
        found = cls.__dict__.get(name)
        if type(found) is Attribute and found.default is not MISSING:
            type.__setattr__(cls, name, Attribute(cls, name))
        else:
            super().__delattr__(name)

    def __dir__(cls) -> list[str]:
        # An `OfCallables` is of instances only. `typing.no_type_check` reads each name.
        return [name for name in super().__dir__() if hasattr(cls, name)]

    def register(cls, subclass: type) -> NoReturn:
        raise ValueError(
            f"Cannot register {subclass!r} as a virtual subclass of "
            f"{cls.__qualname__}: only classes that inherit from Module are Modules. "
            "Make it a base class."
        )


def _set_spec(cls: Any, spec: ModuleSpec) -> None:
    type.__setattr__(cls, "_module_spec_", spec)
    cls._module_fields_ = frozenset(spec.names)
    cls._assignable_names_ = cls._module_fields_.union(WRAPPER_ATTRIBUTES)


class Module(Immutable, Hashable, metaclass=ModuleMeta):
    """Base class of models: a frozen dataclass that is also a JAX pytree.

    Annotate the fields in the class body, as for a dataclass. Instances can be passed
    through any function of JAX that takes pytrees; their leaves are the values of the
    fields, except for fields declared `field(static=True)`, which are part of the
    structure.

    If you do not write an `__init__`, one is generated. During construction, by `__new__`
    and `__init__`, declared fields can be assigned. After it the instance is immutable: to
    change something, make a changed copy by [`equinox_like.tree_at`][] or
    `dataclasses.replace`. If there is a method `__check_init__(self)`, it runs after each
    construction, and so do those of all base classes. `class Derived(Base, kw_only=True)`
    makes the fields that it declares keyword-only. If a class inherits an `__init__` that
    is written out, type checkers take the one of a dataclass for it: `class Derived(Base,
    init=False)` tells them otherwise. A class cannot be instantiated if it is made by
    `class Base(Module, is_abstract=True)`, or has an [`equinox_like.AbstractVar`][] or an
    abstract method.

    A method read from an instance is a pytree with the leaves of the instance. It can
    also be the function of `jax.jit` and the like: it has a hash, and equals the same
    method of the identical instance. An instance with arrays has no hash. A special
    method, such as `__call__`, is a pytree for the transformations of this library, as in
    `filter_vmap(model.__call__)`, and as an argument of what `filter_jit` returns.

    **Raises:**

    `TypeError` if a field was not set, or the class is abstract.
    `dataclasses.FrozenInstanceError` on assignment to anything that is not a field, and on
    any assignment after construction.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class Affine(eqx.Module):
            weight: jax.Array
            bias: jax.Array

            def __call__(self, x):
                return self.weight @ x + self.bias

        layer = Affine(jnp.eye(2), jnp.ones(2))
        assert len(jax.tree.leaves(layer)) == 2
        doubled = jax.tree.map(lambda leaf: 2 * leaf, layer)
        assert jnp.allclose(doubled(jnp.ones(2)), 4.0)
        ```
    """

    # JAX unwraps what it transforms, to name it. It would print a whole Module otherwise.
    __wrapped__ = OfCallables(lambda self: self.__call__)

    def __eq__(self, other: object) -> Any:
        if type(self) is not type(other):
            # Another object may be equal to anything, as `mock.ANY` and the snapshots of
            # syrupy are. An array of NumPy would compare its elements.
            return False if is_array_like(other) else NotImplemented
        if identity_key(self)[0] == identity_key(other)[0]:
            return True
        # Without arrays they have a hash, and are compared as static values are.
        leaves = jtu.tree_leaves((self, other))
        return any(isinstance(x, ARRAYS) for x in leaves) and _equal(self, other)

    def __hash__(self) -> int:
        check_hashable(self)
        return hash(identity_key(self)[0])

    def __repr__(self) -> str:
        text = tree_pformat(self)
        is_long = text.count("\n") > _SCREEN
        return text + _SHORTER if is_long else text

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return render(self, path, subtree_renderer)


# An error about a deleted array names the sides.
_equal = deleted_named(lambda left, right: tree_equal(left, right))


class Function(Module):
    """A Module that is a function and not data, so it has a hash."""

    def _key_(self) -> Any:
        return identity_key(self)

    def __eq__(self, other: Any) -> Any:
        if type(self) is type(other):
            return self._key_() == other._key_()
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self._key_())


# Those in static fields are compared as trees.
compared_as_trees.update({Module, Function})


class BoundMethod(Function):
    """A bound method: the function is structure, and the instance is a subtree."""

    __func__: Any = field(static=True)
    __self__: Any

    _registers_itself_ = True
    _passes_calls_on_ = True

    # For annotations of the type that a call returns.
    __class_getitem__ = classmethod(types.GenericAlias)

    @property
    def __wrapped__(self) -> types.MethodType:
        return types.MethodType(self.__func__, self.__self__)

    def _shown_(self) -> Any:
        return self.__func__

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By name where possible, since a function that is wrapped may not be picklable.
        name = self.__func__.__name__
        if getattr(type(self.__self__), name, None) is self.__func__:
            return getattr, (self.__self__, name)
        return super().__reduce_ex__(protocol)

    def _key_(self) -> Any:
        return id(self.__func__), id(self.__self__)  # as Python's methods

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.__func__(self.__self__, *args, **kwargs)
        except Exception as e:
            add_note_on_path(e)
            leave_out_this_frame(e)
            raise_if_deleted_here(e, self.__func__, (self.__self__, *args), kwargs)
            raise

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            raise_assignment_error(self, name)


def as_pytree(fun: Any) -> Any:
    """`fun`; a special method of a Module, `model.__call__`, as a pytree like any other
    method. Python would call its descriptor at each `model(x)`, so it has none."""
    if type(fun) is not types.MethodType or not isinstance(fun.__self__, Module):
        return fun
    # In `__init__`, where a tree may not hold `self`.
    if ASSIGNABLE in raw_dict(fun.__self__):
        return fun
    return MethodDescriptor(fun.__func__).__get__(fun.__self__)


def _flatten_bound(bound: Any) -> tuple[tuple[Any], Any]:
    attributes = raw_dict(bound)
    return (attributes["__self__"],), attributes["__func__"]


show_function(BoundMethod)
jtu.register_pytree_with_keys(
    BoundMethod,
    lambda bound: (((jtu.GetAttrKey("__self__"), bound.__self__),), bound.__func__),
    lambda function, children: MethodDescriptor(function).__get__(*children),
    _flatten_bound,
)
