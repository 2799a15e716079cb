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
from collections.abc import Hashable
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax.tree_util as jtu

from .._tree.equal import tree_equal
from .._tree.format import tree_pformat
from .._tree.render import render
from .construct import (
    HOLD_NO_ARRAY,
    KNOWING_NOTHING_OF_INIT,
    ModuleSpec,
    construct,
    convert_annotations,
    generate_init,
    has_custom_init,
    look_at_statics,
    make_spec,
    refuse_assignment,
    warn_of_unused_post_init,
)
from .field import field
from .flatten import (
    IRREGULAR,
    OPEN,
    OPEN_NAMED,
    REGULAR,
    STATE,
    WRAPPER_ATTRIBUTES,
    Node,
    register,
)

_T = TypeVar("_T")
_new = object.__new__
_set = object.__setattr__
_call_type = type.__call__


def spec_of(cls: type) -> ModuleSpec | None:
    """The spec of a Module class; `None` for any other class."""
    return cls.__dict__.get("_module_spec_")


class _Frozen(Node):
    """What makes an instance immutable. It has no metaclass, which refers to it."""

    _module_spec_: ClassVar[ModuleSpec]
    _module_fields_: ClassVar[frozenset[str]]

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            self._module_state_ is OPEN
            and name in self._module_fields_
            and type(value) is not BoundMethod
        ):
            _set(self, name, value)
        else:
            self._set_with_care(name, value)

    def _set_with_care(self, name: str, value: Any) -> None:
        is_open = self._module_state_ is OPEN or self._module_state_ is OPEN_NAMED
        is_wrapper_attribute = name in WRAPPER_ATTRIBUTES
        if not is_open or not (name in self._module_fields_ or is_wrapper_attribute):
            refuse_assignment(self, name)
        if isinstance(value, BoundMethod) and value.__self__ is self:
            raise ValueError(
                f"Cannot assign methods: `self.{name} = self.{value.__name__}` would make "
                f"{type(self).__qualname__} contain itself. Define a method `{name}` that "
                "calls the other one."
            )
        if is_wrapper_attribute:
            _set(self, STATE, OPEN_NAMED)
        _set(self, name, value)

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

    def __init__(self, function: types.FunctionType):
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
        attributes = bound.__dict__
        attributes.update(self.attributes)
        attributes["__self__"] = instance
        return bound

    # As the structure of a bound method, only the function counts.
    def __eq__(self, other: object) -> bool:
        return type(other) is MethodDescriptor and self.function is other.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self):
        return MethodDescriptor, (self.function,)


def _as_method(name: str, value: Any) -> Any:
    is_dunder = name.startswith("__") and name.endswith("__")
    if isinstance(value, types.FunctionType) and not is_dunder:
        return MethodDescriptor(value)
    return value


@dataclass_transform(field_specifiers=(dataclasses.field, field))
class ModuleMeta(abc.ABCMeta):
    """Makes each subclass of `Module` a dataclass and a pytree node."""

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        **kwargs: Any,
    ):
        namespace = {key: _as_method(key, x) for key, x in namespace.items()}
        cls: Any = super().__new__(mcs, name, bases, namespace, **kwargs)
        slots = set(namespace.get("__slots__", ())) & set(cls.__annotations__)
        if slots:
            raise TypeError(
                f"`__slots__` of {cls.__qualname__} names the fields {sorted(slots)}. "
                "Fields of a Module live in its `__dict__`: remove `__slots__`."
            )
        dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
        custom_init = has_custom_init(cls, spec_of)
        plain_setattr = cls.__setattr__ is _Frozen.__setattr__
        spec = make_spec(cls, custom_init, plain_setattr)
        if custom_init:
            warn_of_unused_post_init(cls)
        else:
            cls.__init__ = generate_init(cls, plain_setattr)
        if spec.converters and "__init__" in cls.__dict__:
            convert_annotations(cls.__init__, spec)
        _set_spec(cls, spec)
        if not namespace.get("_registers_itself_", False):
            register(cls, spec.dynamic, spec.static)
        return cls

    def __call__(cls: type[_T], /, *args: Any, **kwargs: Any) -> _T:
        if cls._init_is_all_:  # pyright: ignore[reportAttributeAccessIssue]
            # Passing on no keywords at all saves 5 % of a construction.
            if kwargs:
                return _call_type(cls, *args, **kwargs)
            return _call_type(cls, *args)
        spec: ModuleSpec = cls._module_spec_  # pyright: ignore[reportAttributeAccessIssue]
        if spec.init_is_all:
            self = _call_type(cls, *args, **kwargs)
            if not HOLD_NO_ARRAY.issuperset(map(type, spec.read_static(self))):
                look_at_statics(self, spec)
            return self
        return construct(cls, spec, args, kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        # Without it, `inspect` would tell the signature of `__call__` above.
        signature = inspect.signature(cls.__init__)  # pyright: ignore[reportAttributeAccessIssue]
        parameters = list(signature.parameters.values())[1:]
        return signature.replace(parameters=parameters)

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, _as_method(name, value))
        spec = spec_of(cls)
        if name == "__init__" and spec is not None:
            # Nothing is known of it: it may assign attributes, and forget some.
            _set_spec(cls, dataclasses.replace(spec, **KNOWING_NOTHING_OF_INIT))


def _set_spec(cls: Any, spec: ModuleSpec) -> None:
    cls._module_spec_ = spec
    cls._module_fields_ = frozenset(f.name for f in spec.fields)
    cls._init_is_all_ = spec.init_is_all and not spec.static
    # Where construction is left to Python, instances have the state of their class.
    cls._module_state_ = REGULAR if spec.init_is_all else IRREGULAR


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
    to anything that is no field, and on any assignment after construction.

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

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_assignment(self, name)


def _flatten_bound(bound: BoundMethod):
    attributes = bound.__dict__
    return (attributes["__self__"],), MethodDescriptor(attributes["__func__"])


def _flatten_bound_with_keys(bound: BoundMethod):
    (instance,), descriptor = _flatten_bound(bound)
    return ((jtu.GetAttrKey("__self__"), instance),), descriptor


def _unflatten_bound(descriptor: MethodDescriptor, children: Any) -> BoundMethod:
    return descriptor.__get__(children[0])


jtu.register_pytree_with_keys(
    BoundMethod, _flatten_bound_with_keys, _unflatten_bound, _flatten_bound
)
