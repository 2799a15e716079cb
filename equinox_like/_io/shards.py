"""Tensors in one safetensors file, or in several with an index that says which has which.

Hugging Face's libraries write and read such an index, `model.safetensors.index.json`,
beside files such as `model-00001-of-00002.safetensors`. A new index names new files only,
and comes last: at any time it has the whole old tree or the whole new one.
"""

import contextlib
import errno
import json
import os
import re
from contextlib import nullcontext
from typing import Any, Final

import numpy as np

from .files import foreign, is_path, replacing, write_all
from .format import File, Named, alignment, header

SUFFIX: Final = ".safetensors"
INDEX: Final = ".index.json"


def write(
    place: Any, texts: dict[str, str], tensors: list[Named], durable: bool
) -> None:
    """Writes tensors to a path or an open file."""
    # With the largest alignment first, each tensor is aligned.
    tensors = sorted(tensors, key=lambda item: -alignment(item[2].nbytes))
    head = header(texts, tensors)
    size = len(head) + _size(tensors)
    is_open = not is_path(place)
    with nullcontext(place) if is_open else replacing(place, durable, size) as file:
        write_all(file, head)
        for _, _, data in tensors:
            write_all(file, data)


def write_shards(
    path: str, texts: dict[str, str], tensors: list[Named], durable: bool, limit: int
) -> None:
    """Writes tensors to files with at most `limit` bytes of data each, and an index.

    A tensor that is larger has a file of its own. What an earlier call wrote for the index
    is deleted at the end.
    """
    single = path.removesuffix(INDEX)
    index, stem = single + INDEX, single.removesuffix(SUFFIX)
    if os.path.exists(single):
        text = "programs would load this file, not the index beside it: remove it first"
        raise FileExistsError(errno.EEXIST, text, single)
    parts = _parts(tensors, limit)
    shards = _free_paths(stem, len(parts))
    old = _own_shards(index, stem)
    table: dict[str, str] = {}
    try:
        for shard, part in zip(shards, parts, strict=True):
            write(shard, texts, part, durable)
            table |= dict.fromkeys([name for name, *_ in part], os.path.basename(shard))
        about = {"total_size": _size(tensors), **texts}
        text = json.dumps({"metadata": about, "weight_map": table}, indent=2)
        with replacing(index, durable) as file:
            file.write(text.encode())
    finally:  # the index is the new one, or after an error the old one
        for shard in old.union(shards) - _own_shards(index, stem):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(shard)


def _size(tensors: list[Named]) -> int:
    return sum(data.nbytes for _, _, data in tensors)


def _parts(tensors: list[Named], limit: int) -> list[list[Named]]:
    parts: list[list[Named]] = [[]]
    size = 0
    for tensor in tensors:
        size += tensor[2].nbytes
        if parts[-1] and size > limit:
            parts.append([])
            size = tensor[2].nbytes
        parts[-1].append(tensor)
    return parts


def _free_paths(stem: str, count: int) -> list[str]:
    """Paths of new files; with the usual names, unless one of these is taken."""
    ends = [f"-{i:05}-of-{count:05}{SUFFIX}" for i in range(1, count + 1)]
    if any(os.path.lexists(stem + end) for end in ends):
        stem += f"-{os.urandom(4).hex()}"
    return [stem + end for end in ends]


def _own_shards(index: str, stem: str) -> set[str]:
    """The files of an index, if there is one, that are named as `_free_paths` does it."""
    try:
        paths = _read_index(index)[0].values()
    except (FileNotFoundError, RuntimeError):
        return set()
    return {x for x in paths if x.startswith(f"{stem}-") and x.endswith(SUFFIX)}


def _read_index(index: str) -> tuple[dict[str, str], dict[str, Any]]:
    """From the name of each tensor to the path of its file; and the metadata.

    **Raises:**

    `RuntimeError` if this is another file, or names one that is not in its folder.
    """
    with open(index, "rb") as file:
        content = file.read()
    try:
        fields = json.loads(content)
        table, about = fields["weight_map"].items(), fields.get("metadata") or {}
        are_beside = all(re.fullmatch(r"(?!\.+$)[^/\\:\0]+", name) for _, name in table)
        texts = {key: x for key, x in about.items() if isinstance(x, str)}
    except Exception as error:  # what is damaged may raise any error
        what = "has no complete table `weight_map` of names of files"
        if b"weight_map" not in content:
            what = foreign(content) or what
        text = f"{index} is not an index of safetensors files. It {what}."
        raise RuntimeError(text) from error
    if not are_beside:
        raise RuntimeError(f"{index} names files that are not in its folder.")
    folder = os.path.dirname(index)
    return {tensor: os.path.join(folder, name) for tensor, name in table}, texts


def open_file(path_or_file: Any) -> File:
    """A safetensors file; or an index, also one that is in place of a single file."""
    if is_path(path_or_file):
        index = path_or_file.removesuffix(INDEX) + INDEX
        is_single = index != path_or_file and os.path.exists(path_or_file)
        if index == path_or_file or (not is_single and os.path.exists(index)):
            return Shards(index)
    return File(path_or_file)


class Shards(File):
    """The files of an index as one."""

    def __init__(self, index: str):
        self.path = index
        table, self.metadata = _read_index(index)
        files = {path: File(path) for path in sorted(set(table.values()))}
        found = {(name, path) for path in files for name in files[path].tensors}
        for name, path in sorted(found ^ table.items()):
            text = "has" if (name, path) in found else "does not have"
            text = f"{path} {text} {name!r}, contrary to {index}: "
            raise RuntimeError(text + "these files do not belong together.")
        self._holders = {name: files[path] for name, path in table.items()}
        self.tensors = {
            name: file.tensors[name] for name, file in self._holders.items()
        }

    def _bytes(self, name: str) -> np.ndarray:
        return self._holders[name]._bytes(name)
