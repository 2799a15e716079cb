"""Writing a file whole or not at all; and pipes and devices, which are not files."""

import contextlib
import errno
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import Any


def with_suffix(path: Any, suffix: str) -> str:
    """`path`, of any type that names a file, with `suffix` if it has none."""
    path = pathlib.Path(os.fsdecode(path))
    return str(path) if path.suffix else f"{path}{suffix}"


@contextlib.contextmanager
def replacing(path: str, durable: bool = False, size: int = 0) -> Iterator[Any]:
    """A new file that takes the place of `path` if nothing goes wrong.

    At any moment there is the old file or the new one under this name. A process that is
    killed may leave a hidden `.name.XXXXXXXX.tmp` beside it. What a power failure leaves is
    up to the file system, unless it is `durable`: then all is on the disk before the new
    file takes its place, which may take ten times as long.

    A pipe or a device is not replaced: what is in the new file is written to it.
    """
    target = os.path.realpath(path)
    if _is_stream(target):
        with _copied_to(target) as file:
            yield file
        return
    folder, name = os.path.split(target)
    # In the same folder, because only within one file system is renaming one step.
    temporary = os.path.join(folder, f".{name}.{os.urandom(4).hex()}.tmp")
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    try:
        file = open(temporary, "xb", buffering=1 << 16)
    except OSError as error:
        error.filename = path
        raise
    try:
        with file:
            if size and hasattr(os, "posix_fallocate"):
                with contextlib.suppress(OSError):  # not every file system can
                    os.posix_fallocate(file.fileno(), 0, size)
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if not durable:
        return
    # The new name must reach the disk, too. Not every system lets a folder be opened.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
    """A file to read from, with a name; of a pipe or a device a copy of what it holds."""
    with open(path, "rb") as file:
        if not _is_stream(path):
            yield file
            return
        with tempfile.NamedTemporaryFile() as copy:
            shutil.copyfileobj(file, copy)
            copy.seek(0)
            yield copy


@contextlib.contextmanager
def _copied_to(path: str) -> Iterator[Any]:
    with tempfile.NamedTemporaryFile() as file:
        yield file
        file.seek(0)
        with open(path, "wb") as target:
            shutil.copyfileobj(file, target)


def _is_stream(path: str) -> bool:
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
