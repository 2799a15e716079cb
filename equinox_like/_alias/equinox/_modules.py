"""The modules of the alias `equinox`: the public ones, and those private ones of Equinox
from which published code imports.

A private module has what is public in any of them, and the names in `_names.py`.
"""

import dis
import functools
import sys
import types
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
_PRIVATE = """
    _custom_types _doc_utils _filters _misc _module _module._module _tree _vmap_pmap
    internal._loop internal._loop.bounded internal._loop.checkpointed internal._omega
    nn._attention nn._dropout nn._linear nn._misc nn._stateful
""".split()


def install() -> None:
    """Makes the modules, and gives `equinox` the public names."""
    sys.meta_path.append(_Missing)
    for name in (*_PUBLIC, *map("equinox.{}".format, _PRIVATE)):
        module = sys.modules.get(name)
        if module is None:
            module = module_from_spec(ModuleSpec(name, None, is_package=True))
            parent, _, last = name.rpartition(".")
            setattr(sys.modules[parent], last, module)
            sys.modules[name] = module
        _fill(module)


def _fill(module: types.ModuleType) -> None:
    library = _PUBLIC.get(module.__name__)
    module.__getattr__ = functools.partial(_read, module.__name__)
    if library is not None:
        names = [name for name in dir(library) if not name.startswith("_")]
        vars(module).update(__all__=names, __dir__=names.copy, __doc__=library.__doc__)


def _read(module: str, name: str) -> Any:
    """An attribute of a module."""
    if module in _PUBLIC and not name.startswith("_"):
        return getattr(_PUBLIC[module], name)
    home = _PUBLIC.get(_home_of(name), _names)
    if module not in _PUBLIC and not name.startswith("__") and hasattr(home, name):
        return getattr(home, name)
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
