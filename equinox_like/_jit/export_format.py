"""The bytes of an exported function: a header in JSON, and the program of `jax.export`.

Both have a checksum. The header comes after a magic number, its size and its checksum.
"""

import json
import zlib
from typing import Any, Final

_MAGIC: Final = b"\x93EXPORT\x01"
_SIZE: Final = 8
NOT_OURS: Final = "These bytes are not an exported function, or are truncated"


def write(header: dict[str, Any], program: bytes) -> bytes:
    header = header | {"length": len(program), "checksum": zlib.crc32(program)}
    text = json.dumps(header).encode()
    size = len(text).to_bytes(_SIZE, "little")
    check = zlib.crc32(text).to_bytes(4, "little")
    return _MAGIC + size + check + text + program


def read(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the program; raises if the bytes are truncated or corrupted."""
    start = len(_MAGIC) + _SIZE + 4
    size = int.from_bytes(data[len(_MAGIC) : start - 4], "little")
    text, program = data[start : start + size], data[start + size :]
    if not data.startswith(_MAGIC) or len(text) != size:
        raise ValueError(f"{NOT_OURS}.")
    if zlib.crc32(text) != int.from_bytes(data[start - 4 : start], "little"):
        raise ValueError(f"{NOT_OURS}: the checksum of the header does not match.")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{NOT_OURS}: {e}") from e
    if not isinstance(header, dict) or len(program) != header.get("length"):
        raise ValueError(f"{NOT_OURS}: the length of the program does not match.")
    if zlib.crc32(program) != header.get("checksum"):
        raise ValueError(f"{NOT_OURS}: the checksum of the program does not match.")
    return header, program
