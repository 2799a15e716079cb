"""Writing to and reading from files that take or return less than was asked.

Unbuffered files, pipes and sockets do so. What they return says how much it was.
"""

import errno
import io
from typing import Any, Final

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
