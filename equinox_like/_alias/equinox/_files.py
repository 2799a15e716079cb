"""Saving and loading the leaves of a tree, with the files of Equinox, byte for byte.

The library appends a record of names and checksums to a file that it opens itself, and
refuses one with more records than the template has leaves. But equimo reads the records on
its own, and refuses the one that was appended. jinns loads a part of what it saved. And
libraries share files with their users who have Equinox.
"""

import functools
import os
from typing import Any

import equinox_like
from equinox_like._io.atomic import opened, replacing, with_suffix


@functools.wraps(equinox_like.tree_serialise_leaves)
def tree_serialise_leaves(path_or_file: Any, *args: Any, **kwargs: Any) -> None:
    save = equinox_like.tree_serialise_leaves
    if not isinstance(path_or_file, str | bytes | os.PathLike):
        return save(path_or_file, *args, **kwargs)
    with replacing(with_suffix(path_or_file, ".eqx", "path_or_file")) as file:
        save(file, *args, **kwargs)


@functools.wraps(equinox_like.tree_deserialise_leaves)
def tree_deserialise_leaves(path_or_file: Any, *args: Any, **kwargs: Any) -> Any:
    load = equinox_like.tree_deserialise_leaves
    if not isinstance(path_or_file, str | bytes | os.PathLike):
        return load(path_or_file, *args, **kwargs)
    with opened(with_suffix(path_or_file, ".eqx", "path_or_file")) as file:
        return load(file, *args, **kwargs)
