"""check_sizes(): what a compressed batch claims to unpack to, before anything is allocated.

Arrow stores the unpacked size of every buffer in front of it and allocates that much on trust: one
changed byte asks for terabytes. The places of the buffers stand in the message's flatbuffer, which
Arrow has verified when it hands out a message, but does not show.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from rollout.errors import ShardDamaged

# zstd's densest block: 4 bytes that repeat one byte 131,072 times; lz4 reaches 255
_MOST_PER_BYTE = 32768

# fields of the tables Message and RecordBatch in Arrow's Message.fbs
_HEADER = 2
_BUFFERS, _COMPRESSION = 2, 3


def check_sizes(message: Any, where: str) -> None:
    """Raise `ShardDamaged` if a buffer of the record batch `message` cannot unpack to its size."""
    body = memoryview(message.body)
    for offset, length in _compressed_buffers(bytes(message.metadata)):
        if length < 8 or not 0 <= offset <= len(body) - length:
            continue  # empty, or out of range, which Arrow itself refuses
        (size,) = struct.unpack_from("<q", body, offset)
        if size > _MOST_PER_BYTE * length:
            raise ShardDamaged(
                f"{where}: a buffer of {length} bytes claims to unpack to {size}, which is "
                "impossible; the file was changed after it was written: restore it from where it "
                "was copied"
            )


def _compressed_buffers(metadata: bytes) -> Iterator[tuple[int, int]]:
    """Offset in the body and length of every buffer; none for a batch that is not compressed."""
    (message,) = struct.unpack_from("<I", metadata)
    header = _target(metadata, _field(metadata, message, _HEADER))
    buffers = _field(metadata, header, _BUFFERS)
    if not buffers or not _field(metadata, header, _COMPRESSION):
        return
    vector = _target(metadata, buffers)
    (count,) = struct.unpack_from("<I", metadata, vector)
    yield from struct.iter_unpack("<qq", metadata[vector + 4 : vector + 4 + 16 * count])


def _field(metadata: bytes, table: int, index: int) -> int:
    """Where the field of a table stands; 0 if it is absent."""
    (back,) = struct.unpack_from("<i", metadata, table)
    (size,) = struct.unpack_from("<H", metadata, table - back)
    if 4 + 2 * index >= size:
        return 0
    (forward,) = struct.unpack_from("<H", metadata, table - back + 4 + 2 * index)
    return table + forward if forward else 0


def _target(metadata: bytes, position: int) -> int:
    """What the relative offset at `position` points to."""
    (forward,) = struct.unpack_from("<I", metadata, position)
    return position + int(forward)
