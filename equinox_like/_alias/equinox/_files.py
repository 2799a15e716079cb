"""`tree_serialise_leaves` with the files of Equinox, byte for byte.

The library appends a record of names and checksums to a file that it opens itself. equimo
reads the records on its own, and refuses a file with more of them than leaves. Files that a
library writes are also for its users who have Equinox.
"""

import functools
import os
from typing import Any

import equinox_like
from equinox_like._io.atomic import replacing, with_suffix


@functools.wraps(equinox_like.tree_serialise_leaves)
def tree_serialise_leaves(path_or_file: Any, *args: Any, **kwargs: Any) -> None:
    save = equinox_like.tree_serialise_leaves
    if not isinstance(path_or_file, str | bytes | os.PathLike):
        return save(path_or_file, *args, **kwargs)
    with replacing(with_suffix(path_or_file, ".eqx", "path_or_file")) as file:
        save(file, *args, **kwargs)
