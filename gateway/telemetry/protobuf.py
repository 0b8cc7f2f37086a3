"""As much of protobuf's wire format as a span takes, straight from values: message objects cost many times more.

Field numbers and types are those of `opentelemetry/proto/common/v1/common.proto` and `trace/v1/trace.proto`.
"""

import struct
from collections.abc import Callable
from functools import lru_cache

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

double = struct.Struct("<d").pack
fixed32 = struct.Struct("<I").pack
fixed64 = struct.Struct("<Q").pack
KEPT = 4_096
_ONE_BYTE = tuple(bytes((n,)) for n in range(0x80))


def varint(n: int) -> bytes:
    """A number that is not negative."""
    if n < 0x80:
        return _ONE_BYTE[n]
    if n < 0x4000:
        return bytes((n & 0x7F | 0x80, n >> 7))
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def tag(field: int, wire_type: int) -> bytes:
    return varint(field << 3 | wire_type)


def block(field: int, data: bytes) -> bytes:
    """A string, bytes or a message."""
    return tag(field, BYTES) + varint(len(data)) + data


def text(field: int, value: str) -> bytes:
    return block(field, value.encode(errors="replace"))


def attribute(field: int, name: str, value: str | float) -> bytes:
    """A `KeyValue` as a field of a message, of the value's type (`bool` and `int` are floats to a checker)."""
    if isinstance(value, str):
        one = text(1, value)
    elif isinstance(value, bool):
        one = tag(2, VARINT) + varint(value)
    elif isinstance(value, int):
        one = tag(3, VARINT) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    else:
        one = tag(4, FIXED64) + double(value)
    return block(field, text(1, name) + block(2, one))


def whole_attribute(field: int, name: str) -> Callable[[int], bytes]:
    """What writes an attribute that is a number from 0 on. The same ones come again and again, so some are kept."""
    outer, key = tag(field, BYTES), text(1, name) + tag(2, BYTES)
    most = len(key) + 2  # with the value's length and type
    if most + 10 > 0x7F:
        raise ValueError(f"{name} is too long a name")

    @lru_cache(KEPT)
    def write(n: int) -> bytes:
        number = varint(n if n > 0 else 0)
        return b"%b%c%b%c\x18%b" % (outer, most + len(number), key, len(number) + 1, number)

    return write


def real_attribute(field: int, name: str) -> Callable[[float], bytes]:
    """What writes an attribute that is a float."""
    key = text(1, name) + tag(2, BYTES) + varint(9) + tag(4, FIXED64)
    head = tag(field, BYTES) + varint(len(key) + 8) + key
    return lambda x: head + double(x)


def text_attribute(field: int, name: str) -> Callable[[str], bytes]:
    """What writes an attribute that is a text, quickly if it is short."""
    outer, key = tag(field, BYTES), text(1, name) + tag(2, BYTES)

    def write(value: str) -> bytes:
        data = value.encode(errors="replace")
        size = len(data)
        if size + len(key) + 3 < 0x80:
            return b"%b%c%b%c\x0a%c%b" % (outer, size + len(key) + 3, key, size + 2, size, data)
        return attribute(field, name, value)

    return write
