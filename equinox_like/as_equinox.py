"""Runs libraries that were written for Equinox with this library.

After `import equinox_like.as_equinox`, `import equinox` and the imports of its submodules
resolve to `equinox_like`, in every library that is imported later:

    import equinox_like.as_equinox
    import diffrax

`python -m equinox_like.as_equinox script.py` runs a script that way, and with
`-m module` in place of the script a module. `importlib.metadata` then reports the
version of Equinox that this library is compatible with.

Importing this module puts a folder with a package `equinox` first on `sys.path`, and last
on `sys.meta_path` what explains that a private module of Equinox is missing. Nothing else
is changed. A pickle that was made with Equinox needs these modules, and cannot be loaded:
save the model by `equinox.tree_serialise_leaves` there, and load that file by
`tree_deserialise_leaves`.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path

_FOLDER = str(Path(__file__).parent / "_alias")


def for_child_processes() -> None:
    """Has `import equinox` resolve to `equinox_like` in processes that are started later.

    By the environment variable `PYTHONPATH`, which they inherit.

    !!! example

        ```text
        from equinox_like import as_equinox

        as_equinox.for_child_processes()
        ```
    """
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_FOLDER, *paths]))


def _install() -> None:
    known = sys.modules.get("equinox")
    origin = getattr(known, "__file__", None) or ""
    if known is not None and not origin.startswith(_FOLDER):
        raise ImportError(
            "Equinox itself has been imported already, from "
            f"{origin or 'an unknown place'}. Import `equinox_like.as_equinox` before "
            "anything that imports `equinox`."
        )
    if _FOLDER not in sys.path:
        sys.path.insert(0, _FOLDER)
        importlib.invalidate_caches()
    importlib.import_module("equinox")


def _main(arguments: list[str]) -> None:
    if not arguments or arguments == ["-m"]:
        sys.exit("usage: python -m equinox_like.as_equinox (script.py | -m module) ...")
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


_install()
if __name__ == "__main__":
    _main(sys.argv[1:])
