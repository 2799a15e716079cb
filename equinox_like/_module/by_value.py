"""Module classes that cloudpickle sends to another process by value.

A class that the other process cannot import, such as one of a notebook, is made there
as an empty class, and then gets the attributes of the original one by one. So JAX knows
it before it has fields. It is complete once `_module_spec_` is set.
"""

import functools
from typing import Any

import jax.tree_util as jtu

from .._tree.cached import MISSING
from .._tree.registry import register_cached
from .._tree.structure import cached_types
from .construct import ModuleSpec
from .flatten import Functions, make_functions


def is_empty(namespace: dict[str, Any]) -> bool:
    """Whether a class may get its fields later. A class statement sets more names."""
    return namespace.keys() - {"__orig_bases__"} == {"__module__"}


def register_empty(cls: Any) -> None:
    """Makes `cls` a pytree node, with the fields that it has when first flattened."""

    @functools.cache
    def functions() -> Functions:
        return make_functions(cls, cls._module_spec_.dynamic, cls._module_spec_.static)

    jtu.register_pytree_with_keys(
        cls,
        lambda node: functions().flatten_with_keys(node),
        lambda aux, children: functions().unflatten(aux, children),
        lambda node: functions().flatten(node),
    )


def restore(cls: Any, old: ModuleSpec, new: ModuleSpec) -> None:
    """Completes a class that has the attributes of the original, except its spec."""
    for f in cls.__dataclass_fields__.values():
        for name in ("default", "default_factory"):
            # It is compared by identity, but `pickle` makes a copy.
            if type(getattr(f, name)) is type(MISSING):
                setattr(f, name, MISSING)
    own = cls.__dict__.get("__init__")
    if own is not None and own is old.init and new.init is None:
        # A base class was incomplete, so this one was not known to inherit `__init__`.
        type.__delattr__(cls, "__init__")
    if new.is_immutable and cls not in cached_types:
        flatten, unflatten, lazy_fields, _ = make_functions(
            cls, new.dynamic, new.static
        )
        register_cached(cls, flatten, unflatten, lazy_fields)
