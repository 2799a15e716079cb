"""Saving and loading the leaves of a tree as Equinox does: a file has their records alone.

The library appends a record of names and checksums to a file that it opens itself, and
refuses one with more records than the template has leaves. But equimo reads the records on
its own, and refuses the one that was appended. jinns loads a part of what it saved. And
libraries share files with their users who have Equinox.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox_like
from equinox_like._io.files import is_path, opened, replacing, with_suffix


def _opening(function: Callable[..., Any], context: Any) -> Callable[..., Any]:
    """`function`, which gets the file that `context` opens in place of a path."""

    @functools.wraps(function)
    def on_file(path_or_file: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_path(path_or_file):
            return function(path_or_file, *args, **kwargs)
        with context(with_suffix(path_or_file, ".eqx")) as file:
            return function(file, *args, **kwargs)

    return on_file


tree_serialise_leaves = _opening(equinox_like.tree_serialise_leaves, replacing)
tree_deserialise_leaves = _opening(equinox_like.tree_deserialise_leaves, opened)
