"""The modules of the alias `equinox`, made from a table of their names.

They are the public ones, and those private ones of Equinox from which published code
imports. A name in the table is public in one of the others, or is in `_names.py`.
"""

import dis
import functools
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

import equinox_like
from equinox_like import debug, internal, nn

from . import _names

_PUBLIC = {
    "equinox": equinox_like,
    "equinox.nn": nn,
    "equinox.internal": internal,
    "equinox.debug": debug,
}
_PRIVATE = {
    "_custom_types": "sentinel",
    "_doc_utils": "doc_remove_args doc_repr",
    "_filters": "combine filter is_array is_array_like is_inexact_array partition"
    " is_inexact_array_like",
    "_misc": "currently_jitting default_floating_dtype left_broadcast_to",
    "_module": "AbstractClassVar AbstractVar Module Partial Static StrictConfig field"
    " module_update_wrapper static_field",
    "_module._module": "Module _ModuleMeta _currently_initialising _has_dataclass_init"
    " is_abstract_module module_update_wrapper",
    "_tree": "tree_at tree_check tree_equal tree_flatten_one_level",
    "_vmap_pmap": "filter_pmap filter_vmap if_array",
    "internal._loop": "MaybeBuffer buffer_at_set scan while_loop",
    "internal._loop.bounded": "bounded_while_loop",
    "internal._loop.checkpointed": "checkpointed_while_loop",
    "internal._omega": "_Metaω ω",
    "nn._attention": "MultiheadAttention dot_product_attention"
    " dot_product_attention_weights",
    "nn._dropout": "Dropout",
    "nn._linear": "Identity Linear",
    "nn._misc": "default_init",
    "nn._stateful": "State StateIndex delete_init_state make_with_state",
}


def install() -> None:
    """Makes the modules, and gives `equinox` the public names."""
    sys.meta_path.append(_Missing)
    for name, library in _PUBLIC.items():
        names = [x for x in dir(library) if not x.startswith("_")]
        _make(
            name, {"__all__": names, "__dir__": names.copy, "__doc__": library.__doc__}
        )
    for name, names in _PRIVATE.items():
        homes = {x: _PUBLIC.get(_home_of(x), _names) for x in names.split()}
        _make(f"equinox.{name}", {x: getattr(home, x) for x, home in homes.items()})


def _make(name: str, attributes: dict[str, Any]) -> None:
    if name not in sys.modules:
        made = module_from_spec(ModuleSpec(name, None, is_package=True))
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, made)
        sys.modules[name] = made
    read = functools.partial(_read, name)
    vars(sys.modules[name]).update(attributes, __getattr__=read)


def _read(module: str, name: str) -> Any:
    """An attribute that is not in the dictionary of a module."""
    if module in _PUBLIC and not name.startswith("_"):
        return getattr(_PUBLIC[module], name)
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}: {_advice(name)}"
    )


def _home_of(name: str) -> str:
    """The public module that has a name."""
    return next(
        (k for k, x in _PUBLIC.items() if name[0] != "_" and hasattr(x, name)), ""
    )


def _advice(*names: str) -> str:
    public = [f"`from {home} import {x}`" for x in names if (home := _home_of(x))]
    return (
        "`equinox` is `equinox_like` here, which has the public names of Equinox. Write "
        f"{', '.join(public or map('`from {} import ...`'.format, _PUBLIC))}."
    )


class _Missing:
    """The last finder of modules: for what is not in the alias."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("equinox."):
            text = f"No module named {name!r}: {_advice_to_importer()}"
            raise ModuleNotFoundError(text, name=name)


def _advice_to_importer() -> str:
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename.startswith("<frozen importlib._boot"):
        frame = frame.f_back
    before = [
        x for x in dis.get_instructions(frame.f_code) if x.offset <= frame.f_lasti
    ]
    if before[-1].opname == "IMPORT_NAME":
        names = before[-2].argval  # of `from ... import`
        return _advice(*names if isinstance(names, tuple) else ())
    if frame.f_globals.get("__name__", "").startswith("importlib"):
        return _advice()
    # `pickle`, whose code in C has no frame.
    return (
        "a pickle made with Equinox names its private modules, which `equinox_like` lacks. "
        "Save the model by `equinox.tree_serialise_leaves` where Equinox is installed, and "
        "load that file by `tree_deserialise_leaves` into a model built alike."
    )
