"""Opens, replaces and maps files; reads and writes all the bytes that were asked for.

A file is replaced atomically. Unbuffered files, pipes and sockets take or return less than
was asked: what they return says how much it was."""

import contextlib
import errno
import io
import mmap
import os
import pathlib
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from .._tree.nodes import describe_node

_WOULD_BLOCK: Final = (
    errno.EAGAIN,
    "the file is in non-blocking mode, and would have to wait: call "
    "`os.set_blocking(file.fileno(), True)` first",
)


def write_all(file: Any, data: Any) -> None:
    """Writes all bytes of the buffer `data`.

    **Raises:**

    `OSError` if the file does not take them, `BlockingIOError` if it would have to wait.
    """
    if not isinstance(data, bytes):
        data = memoryview(data)
        # NumPy's empty ones cannot be cast.
        data = data.cast("B") if data.nbytes else b""
    while data:
        count = file.write(data)
        if count is None and isinstance(file, io.RawIOBase):
            raise BlockingIOError(*_WOULD_BLOCK)
        if count is None:  # not every file says how much it wrote
            return
        # A coroutine has written nothing, and `True` is not a number of bytes.
        if type(count) is not int or not 0 < count <= len(data):
            text = f"`write` of the file returned {count!r} for {len(data)} bytes"
            raise OSError(errno.EIO, text)
        data = memoryview(data)[count:]


def read_some(file: Any, size: int) -> bytes:
    """At most `size` bytes. They are empty only at the end of the file.

    **Raises:**

    `BlockingIOError` if the file would have to wait, `OSError` if it returns too much.
    """
    data = file.read(size)
    if data is None:
        raise BlockingIOError(*_WOULD_BLOCK)
    if len(data) > size:
        text = f"`read` of the file returned {len(data)} bytes, not {size}"
        raise OSError(errno.EIO, text)
    return data


def read_up_to(file: Any, size: int) -> bytes:
    """The next `size` bytes; fewer only at the end of the file."""
    data = bytes(read_some(file, size))
    while len(data) < size and (more := read_some(file, size - len(data))):
        data += more
    return data


def whole(file: Any) -> Any:
    """The file, for a function of the user that ignores what `write` returns."""
    is_whole = isinstance(file, io.BufferedIOBase | io.TextIOBase | _Whole)
    return file if is_whole else _Whole(file)


class _Whole:
    """A file that writes all bytes that it is given, and reads all that it is asked for."""

    def __init__(self, file: Any):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        write_all(self._file, data)
        return memoryview(data).nbytes

    def read(self, size: int | None = -1) -> bytes:
        is_all = size is None or size < 0
        return self._file.read() if is_all else read_up_to(self._file, int(size or 0))


# What a file is that starts so, and what to do about it. Of a stream, 8 bytes are read.
_FOREIGN: Final = {
    rb"$": "is empty",
    rb"\x93NUMPY": "has `.npy` records, which `tree_deserialise_leaves` loads",
    rb"\x1f\x8b\x08": "is compressed: pass `gzip.open(path)`",
    rb"BZh": "is compressed: pass `bz2.open(path)`",
    rb"\xfd7zXZ": "is compressed: pass `lzma.open(path)`",
    rb"PK\x03\x04|\x80[\x02-\x05][^\0]": "is a zip archive or a pickle: if PyTorch saved "
    "it, give what `torch.load` returns to `load_state_dict`",
    rb'\s*\{.*"weight_map"': "is the index of a model in several files, which `load` and "
    "`load_state_dict` read by its path. It must end with `.index.json`",
    rb'\s*\{\s*["}]': "is a text in JSON, without weights",
    rb"version (https://git-lfs|$)": "is a pointer of Git LFS: `git lfs pull` gets it",
    rb"\s*<(!DOC|!doc|html)": "is a web page, not the file",
}


def foreign(start: bytes) -> str | None:
    """A predicate on a file that is of another kind than ours, by its first bytes."""
    texts = (t for kind, t in _FOREIGN.items() if re.match(kind, start, re.DOTALL))
    return next(texts, None)


# Windows refuses to rename, replace or delete a file that is mapped. There `save` could
# not replace the file that the model was loaded from.
_CAN_MAP: Final = sys.platform != "win32"
# From Python 3.13 on, the mapping need not keep the file open. A process can have a
# thousand open files, as many as a long run may load.
_MAPPING: Final[Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def is_path(x: Any) -> bool:
    return isinstance(x, str | bytes | os.PathLike)


def is_file(path_or_file: Any, method: str) -> bool:
    """Whether this is an open file with the method `read` or `write`, and not a path.

    **Raises:**

    `TypeError` if it is neither.
    """
    if is_path(path_or_file):
        return False
    if not hasattr(path_or_file, method):
        raise TypeError(
            "`path_or_file`, the first argument, must be a path, or a binary file with "
            f"a method `{method}`; got {describe_node(path_or_file)}."
        )
    return True


def with_suffix(path: Any, suffix: str) -> str:
    """`path`, of any path type, as a string, with `suffix` if it has none.

    The path of a pipe or a device stays as it is.

    **Raises:**

    `ValueError` if it does not name a file.
    """
    text = os.fsdecode(path)
    if "://" in text:
        raise ValueError(
            f"`path_or_file` must be a path on this machine; got the URL {text!r}. Open "
            "it, as by `with fsspec.open(url, mode) as file:`, and pass the open file."
        )
    path = pathlib.Path(text)
    if path.name in ("", ".."):
        raise ValueError(
            f"`path_or_file` must end with the name of a file; got {str(path)!r}."
        )
    return str(path) if path.suffix or _is_stream(path) else f"{path}{suffix}"


@contextlib.contextmanager
def replacing(path: str, durable: bool = False, size: int = 0) -> Iterator[Any]:
    """A context manager with a new file, which replaces `path` if no error occurs.

    At any time `path` is the old file or the new one. A process that is killed may
    leave a hidden `.name.XXXXXXXX.tmp` in the same folder. After a power failure, the
    content depends on the file system, unless `durable` is true: then all data are on
    the disk before the old file is replaced, which may take ten times as long.

    A pipe or a device is not replaced: the content of the new file is copied to it.
    """
    target = os.path.realpath(path)
    if _is_stream(target):
        with tempfile.NamedTemporaryFile() as file:
            yield file
            file.seek(0)
            with open(target, "wb") as stream:
                shutil.copyfileobj(file, stream)
        return
    folder, name = os.path.split(target)
    # In the same folder, since renaming is atomic only within one file system.
    # A part of a long name, as file systems limit a name to 255 bytes.
    temporary = os.path.join(folder, f".{name[:60]}.{os.urandom(4).hex()}.tmp")
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    try:
        # Within `try`, as an interrupt may come when the file is just made.
        with open(temporary, "xb", buffering=1 << 16) as file:
            if size and hasattr(os, "posix_fallocate"):
                with contextlib.suppress(OSError):  # not supported by all file systems
                    os.posix_fallocate(file.fileno(), 0, size)
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        # The user knows the file by `path`. If the disk is full, no file is named.
        if isinstance(error, OSError) and error.filename in (None, temporary):
            if error.errno:  # else the text would be lost
                error.filename = path
                del error.filename2  # `None` would be shown
        raise
    if not durable:
        return
    # The new name must be on the disk, too. Not every system can open a folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def opened(path_or_file: Any) -> Iterator[Any]:
    """A named file to read from.

    The rest of an open file, and the content of a pipe or device, are copied to one.
    """
    with contextlib.ExitStack() as stack:
        file = path_or_file
        if is_path(path_or_file):
            file = stack.enter_context(open(path_or_file, "rb"))
            if not _is_stream(path_or_file):
                yield file
                return
        # In a folder of its own, as Windows opens no `NamedTemporaryFile` a second time.
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        copy = stack.enter_context(open(os.path.join(folder, "copy"), "w+b"))
        while piece := read_some(file, 1 << 20):
            copy.write(piece)
        copy.seek(0)
        yield copy


def content_of(file: Any) -> np.ndarray:
    """The bytes of a file that is open for reading, mapped into memory if possible.

    Not by its path, where another file may be found by now. The mapping is private:
    writing to the memory does not change the file.
    """
    size = os.fstat(file.fileno()).st_size
    if size and _CAN_MAP:  # an empty file cannot be mapped
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY, **_MAPPING)
    else:
        position = file.tell()
        file.seek(0)
        content = bytearray(file.read())
        file.seek(position)
    return np.frombuffer(content, np.uint8)


def _is_stream(path: str | os.PathLike[str]) -> bool:
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
