"""`Module`: a frozen dataclass that is a pytree, and whose methods are pytrees too.

The metaclass makes each subclass a dataclass, chooses its `__init__`, and registers it
with JAX; it also stands around each construction. Nothing here is asked when an attribute
is read: methods become pytrees through a descriptor on the class.
"""

import abc
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, dataclass_transform

import jax
import jax.tree_util as jtu

from .._tree.cached import MISSING, Attribute, Cached, raw_dict, set_raw_dict
from .._tree.equal import tree_equal
from .._tree.format import tree_pformat
from .._tree.registry import FLAT
from .._tree.render import render
from .abstract import own_declarations
from .construct import construct, refuse_assignment
from .field import field
from .flatten import AUX, OPEN, WRAPPER_ATTRIBUTES, Node, register
from .spec import (
    KNOWING_NOTHING_OF_INIT,
    ModuleSpec,
    convert_annotations,
    generate_init,
    has_custom_init,
    make_spec,
    warn_of_unused_post_init,
)
from .values import JITTED

_new = object.__new__
_set = object.__setattr__


def spec_of(cls: type) -> ModuleSpec | None:
    """The spec of a Module class; `None` for any other class."""
    return cls.__dict__.get("_module_spec_")


class _Frozen(Node):
    """What makes an instance immutable. It has no metaclass, which refers to it."""

    _module_spec_: ClassVar[ModuleSpec]
    _module_fields_: ClassVar[frozenset[str]]
    # What can be assigned under construction: fields, and the names of a wrapped function.
    _open_names_: ClassVar[frozenset[str]]
    # Whether it is intended that a field holds a callable with arrays of its own.
    _wraps_callables_: ClassVar[bool] = False

    def __setattr__(self, name: str, value: Any) -> None:
        # `Cls[int](...)` sets `__orig_class__` on what it has made; it is not in the tree.
        if name in self._is_open_ or name == "__orig_class__":
            _set(self, name, value)
        else:
            refuse_assignment(self, name)

    def __delattr__(self, name: str) -> None:
        refuse_assignment(self, name)

    def __getstate__(self) -> dict[str, Any]:
        # Only what is part of the tree: a cached property is computed again.
        names = self._module_fields_.union(WRAPPER_ATTRIBUTES)
        return {name: x for name, x in self.__dict__.items() if name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class MethodDescriptor:
    """Stands for a function in a class body; read from an instance, it binds a pytree."""

    def __init__(self, function: Any):
        functools.update_wrapper(self, function)  # pyright: ignore[reportArgumentType]
        self.function = function
        self.attributes = {
            "__module__": function.__module__,
            "__name__": function.__name__,
            "__qualname__": function.__qualname__,
            "__doc__": function.__doc__,
            "__func__": function,
        }

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.function
        bound: Any = _new(BoundMethod)
        attributes = self.attributes.copy()
        attributes["__self__"] = instance
        set_raw_dict(bound, attributes)
        return bound

    def __reduce__(self):
        return MethodDescriptor, (self.function,)


class _Forwarder:
    """Stands for the method of a base class that is not a Module, and binds it alike."""

    def __init__(self, definer: type, name: str):
        self.definer = definer
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # Looked up each time, as the class may be changed.
        return _as_method("", self.definer.__dict__[self.name]).__get__(instance, owner)


_METHODS = types.FunctionType, type(functools.lru_cache(lambda: None)), JITTED


def _as_method(name: str, value: Any) -> Any:
    if isinstance(value, _METHODS) and not _is_dunder(name):
        return MethodDescriptor(value)
    return value


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _forward_methods(cls: type) -> None:
    """Lets `cls` bind the methods that it has from classes which are no Modules."""
    foreign = [base for base in cls.__mro__[:-1] if not issubclass(base, Node)]
    names = {
        name
        for base in foreign
        for name, value in base.__dict__.items()
        if isinstance(value, _METHODS) and not _is_dunder(name)
    }
    for name in names:
        found = [base for base in cls.__mro__ if name in base.__dict__]
        first = found[0].__dict__[name]
        # What Python would find if no base class forwarded anything.
        definer = next(b for b in found if type(b.__dict__[name]) is not _Forwarder)
        value = definer.__dict__[name]
        if definer in foreign and isinstance(value, _METHODS):
            if type(first) is not _Forwarder or first.definer is not definer:
                setattr(cls, name, _Forwarder(definer, name))
        elif type(first) is _Forwarder:
            setattr(cls, name, value)


@dataclass_transform(field_specifiers=(dataclasses.field, field))
class ModuleMeta(abc.ABCMeta):
    """Makes each subclass of `Module` a dataclass and a pytree node."""

    # For type checkers, calling a class is calling its `__init__`.
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
        **kwargs: Any,
    ):
        namespace = {key: _as_method(key, x) for key, x in namespace.items()}
        # A base class that is not a Module may come first, with a plain `__dict__`.
        namespace.setdefault("__dict__", vars(Cached)["__dict__"])
        cls: Any = super().__new__(mcs, name, bases, namespace, **kwargs)
        _make_dataclass(cls)
        _put_attributes(cls)
        _forward_methods(cls)
        custom_init = has_custom_init(cls, spec_of)
        plain_setattr = cls.__setattr__ is _Frozen.__setattr__
        spec = make_spec(
            cls,
            is_abstract=is_abstract or getattr(strict, "force_abstract", False),
            custom_init=custom_init,
            plain_setattr=plain_setattr,
        )
        if custom_init:
            warn_of_unused_post_init(cls)
        else:
            cls.__init__ = generate_init(cls, plain_setattr)
        if spec.converters and "__init__" in cls.__dict__:
            convert_annotations(cls.__init__, spec)
        if "__doc__" not in namespace:
            shown = str(inspect.signature(cls)).removesuffix(" -> None")
            cls.__doc__ = cls.__name__ + shown
        _set_spec(cls, spec)
        if not namespace.get("_registers_itself_", False):
            is_frozen = plain_setattr and cls.__delattr__ is _Frozen.__delattr__
            register(cls, spec.dynamic, spec.static, is_frozen)
        return cls

    @property
    def __signature__(cls) -> inspect.Signature:
        # Without it, `inspect` would tell the signature of a metaclass's `__call__`.
        signature = inspect.signature(cls.__init__)  # pyright: ignore[reportAttributeAccessIssue]
        parameters = list(signature.parameters.values())[1:]
        return signature.replace(parameters=parameters)

    @property
    def __abstractvars__(cls) -> frozenset[str]:
        return cls._module_spec_.open_variables  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def __abstractclassvars__(cls) -> frozenset[str]:
        return cls._module_spec_.open_class_variables  # pyright: ignore[reportAttributeAccessIssue]

    def __setattr__(cls, name: str, value: Any) -> None:
        spec = spec_of(cls)
        if type(cls.__dict__.get(name)) is Attribute and not hasattr(
            type(value), "__set__"
        ):
            value = Attribute(cls, name, value)
        super().__setattr__(name, _as_method(name, value))
        if name == "__init__" and spec is not None:
            # Nothing is known of it: it may assign attributes, and forget some.
            _set_spec(cls, dataclasses.replace(spec, **KNOWING_NOTHING_OF_INIT))

    def __delattr__(cls, name: str) -> None:
        found = cls.__dict__.get(name)
        if type(found) is Attribute and found.default is not MISSING:
            type.__setattr__(cls, name, Attribute(cls, name))
        else:
            super().__delattr__(name)

    def register(cls, subclass: type) -> NoReturn:
        raise ValueError(
            f"Cannot register {subclass!r} as a virtual subclass of {cls.__qualname__}: a "
            "Module is what derives from it. Make it a base class."
        )


_RESERVED = frozenset({FLAT, AUX, OPEN})


def _make_dataclass(cls: Any) -> None:
    annotations = inspect.get_annotations(cls)
    slots = set(cls.__dict__.get("__slots__", ())) & set(annotations)
    if slots:
        raise TypeError(
            f"`__slots__` of {cls.__qualname__} names the fields {sorted(slots)}. "
            "Fields of a Module live in its `__dict__`: remove `__slots__`."
        )
    reserved = sorted(_RESERVED.intersection(annotations))
    if reserved:
        raise TypeError(
            f"Field '{reserved[0]}' of {cls.__qualname__} has a name under which a Module "
            "remembers how it is flattened: give it another one."
        )
    # Without one, `dataclasses` would write a docstring from a signature that is not ours.
    cls.__doc__ = cls.__doc__ or " "
    make = dataclasses.dataclass(init=False, repr=False, eq=False)
    abstract = own_declarations(cls, annotations)
    if abstract:
        # They are no fields, and `dataclasses` must not see them.
        cls.__annotations__ = {
            n: a for n, a in annotations.items() if n not in abstract
        }
        make(cls)
        cls.__annotations__ = annotations
    else:
        make(cls)


def _put_attributes(cls: Any) -> None:
    """Lets lazy instances find the values of the fields that `cls` declares."""
    for name in inspect.get_annotations(cls):
        declared = cls.__dataclass_fields__.get(name)
        if declared is None or declared._field_type is not dataclasses._FIELD:  # pyright: ignore
            continue
        default = cls.__dict__.get(name, MISSING)
        # A property overrides the field; a name of a wrapped function is set as it is.
        if not hasattr(type(default), "__set__") and not _is_dunder(name):
            type.__setattr__(cls, name, Attribute(cls, name, default))


def _set_spec(cls: Any, spec: ModuleSpec) -> None:
    cls._module_spec_ = spec
    cls._module_fields_ = frozenset(spec.names)
    cls._open_names_ = cls._module_fields_.union(WRAPPER_ATTRIBUTES)


class _OfCallables:
    """An attribute of those instances alone that can be called."""

    def __init__(self, read: Callable[[Any], Any]):
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        # Without `__set__`: what wraps a function has the name of that in its dictionary.
        if instance is not None and callable(instance):
            return self.read(owner)
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self.name!r}"
        )


class Module(_Frozen, Hashable, metaclass=ModuleMeta):
    """Base class of models: a frozen dataclass that is also a JAX pytree.

    Annotate the fields in the class body, as for a dataclass. Instances can be passed
    through any function of JAX that takes pytrees; their leaves are the values of the
    fields, but those declared `field(static=True)`, which are part of the structure.

    An `__init__` is generated, or yours is used. During construction, declared fields can
    be assigned; after it the instance is frozen, and a changed copy is made by
    [`equinox_like.tree_at`][] or `dataclasses.replace`. If there is a method
    `__check_init__(self)`, it runs after each construction, and so do those of all base
    classes.

    A method read from an instance is a pytree whose leaves are those of the instance, so
    it can be passed to `jax.jit` and the like, too.

    **Raises:**

    `TypeError` if a field was not set. `dataclasses.FrozenInstanceError` on assignment
    to anything that is not a field, and on any assignment after construction.

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

    # Told of instances that can be called, since JAX asks each function that it transforms
    # for them. It prints the whole model, and shows none of it, if there are none.
    __name__ = _OfCallables(lambda cls: cls.__name__)  # pyright: ignore[reportAssignmentType]
    __code__ = _OfCallables(lambda cls: inspect.unwrap(cls.__call__).__code__)

    def __eq__(self, other: object) -> Any:
        return type(self) is type(other) and tree_equal(self, other)

    def __hash__(self) -> int:
        return hash(
            tuple((f.name, getattr(self, f.name)) for f in self._module_spec_.fields)
        )

    def __repr__(self) -> str:
        return tree_pformat(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return render(self, path, subtree_renderer)


class BoundMethod(Module):
    """A method of an instance: the function is structure, the instance is its subtree."""

    __func__: Any = field(static=True)
    __self__: Any

    _registers_itself_: ClassVar[bool] = True

    @property
    def __wrapped__(self) -> types.MethodType:
        return types.MethodType(self.__func__, self.__self__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By its name where that leads to it, since what wraps a function may not pickle.
        name = self.__func__.__name__
        if getattr(type(self.__self__), name, None) is self.__func__:
            return getattr, (self.__self__, name)
        return super().__reduce_ex__(protocol)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.__func__(self.__self__, *args, **kwargs)
        except Exception as e:
            _leave_out_this_frame(e)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_assignment(self, name)


def _leave_out_this_frame(error: Exception) -> None:
    """To be called in an `except` clause that then says `raise` alone."""
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return
    entry = error.__traceback__
    if entry is not None and entry.tb_next is not None:
        error.__traceback__ = entry.tb_next


def _flatten_bound(bound: BoundMethod):
    attributes = raw_dict(bound)
    return (attributes["__self__"],), attributes["__func__"]


def _flatten_bound_with_keys(bound: BoundMethod):
    (instance,), function = _flatten_bound(bound)
    return ((jtu.GetAttrKey("__self__"), instance),), function


def _unflatten_bound(function: Any, children: Any) -> BoundMethod:
    return MethodDescriptor(function).__get__(children[0])


jtu.register_pytree_with_keys(
    BoundMethod, _flatten_bound_with_keys, _unflatten_bound, _flatten_bound
)
