"""Tensors on Triton's wire: values to raw bytes by the datatype that the model declares, and back.

Only the generated messages of `tritonclient` are used: its asyncio client drops the id and the final flag of in-band
errors, and cannot ask for the final response.
"""

import struct
from collections.abc import Sequence

from msgspec import Struct
from tritonclient.grpc import service_pb2 as pb

Value = int | float | bool | str | bytes

_PACK = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_WHOLE = frozenset({"UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"})


class Declared(Struct, frozen=True):
    """One input or output of a model as its metadata declares it. -1 in `shape` is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def pack(datatype: str, values: Sequence[Value]) -> bytes:
    """The raw contents of a tensor, little-endian. Raises ValueError where a value does not fit the datatype."""
    if datatype == "BYTES":
        parts = []
        for value in values:
            data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
            parts += [len(data).to_bytes(4, "little"), data]
        return b"".join(parts)
    kind = _PACK.get(datatype)
    if kind is None:
        raise ValueError(f"no tensor of the type {datatype} can be written")
    if datatype in _WHOLE:
        values = [int(value) for value in values]
    try:
        return struct.pack(f"<{len(values)}{kind}", *values)
    except struct.error as error:
        raise ValueError(f"{datatype}: {error}") from None


def integers(datatype: str, raw: bytes) -> list[int]:
    """The whole numbers in a tensor. Raises ValueError for other types or a torn end."""
    kind = _PACK.get(datatype, "")
    if datatype not in _WHOLE or len(raw) % struct.calcsize(kind):
        raise ValueError(f"{len(raw)} bytes of {datatype} where whole numbers were expected")
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(kind)}{kind}", raw))


def numbers(datatype: str, raw: bytes) -> list[float]:
    """The numbers in a tensor, also where the model wrote them as text. Raises ValueError."""
    if datatype == "BYTES":
        return [float(text) for text in strings(datatype, raw)]
    kind = _PACK.get(datatype, "")
    if not kind or len(raw) % struct.calcsize(kind):
        raise ValueError(f"{len(raw)} bytes of {datatype} where numbers were expected")
    return [float(value) for value in struct.unpack(f"<{len(raw) // struct.calcsize(kind)}{kind}", raw)]


def strings(datatype: str, raw: bytes) -> list[bytes]:
    """The strings in a tensor of BYTES. Raises ValueError."""
    if datatype != "BYTES":
        raise ValueError(f"{datatype} where text was expected")
    found, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        at += 4 + size
        if at > len(raw):
            raise ValueError("a torn tensor of BYTES")
        found.append(raw[at - size : at])
    return found


class Outputs(dict[str, tuple[str, bytes]]):
    """What one response holds: per output its datatype and raw contents."""

    __slots__ = ()

    @classmethod
    def of(cls, response: pb.ModelInferResponse) -> "Outputs":
        """Raises ValueError where outputs and contents do not match."""
        contents = response.raw_output_contents
        if len(contents) != len(response.outputs):
            raise ValueError(f"{len(response.outputs)} outputs with {len(contents)} contents")
        return cls((one.name, (one.datatype, raw)) for one, raw in zip(response.outputs, contents, strict=True))

    def integers(self, name: str) -> list[int]:
        """The whole numbers of an output, none where it is not there."""
        found = self.get(name)
        return integers(*found) if found is not None else []

    def numbers(self, name: str) -> list[float]:
        """The numbers of an output, none where it is not there."""
        found = self.get(name)
        return numbers(*found) if found is not None else []

    def text(self, name: str) -> str | None:
        """The strings of an output, joined; None where it is not there. Broken UTF-8 becomes U+FFFD."""
        found = self.get(name)
        return b"".join(strings(*found)).decode("utf-8", "replace") if found is not None else None


class Form:
    """Writes the inputs of requests to one model; leaves out what the model does not have.

    `batched` models have a leading dimension of 1 in front of every shape.
    """

    def __init__(self, model: str, inputs: dict[str, Declared], batched: bool) -> None:
        self.model, self.inputs, self.batched = model, inputs, batched

    def request(self, request_id: str) -> pb.ModelInferRequest:
        """An empty request that asks for a response which only says that it was the last."""
        request = pb.ModelInferRequest(model_name=self.model, id=request_id)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        return request

    def put(self, request: pb.ModelInferRequest, name: str, *values: Value, rows: int = 0) -> None:
        """Add an input if the model has it; in `rows` rows of equal length if that is not 0."""
        declared = self.inputs.get(name)
        if declared is None:
            return
        shape = [rows, len(values) // rows] if rows else [len(values)]
        request.inputs.add(name=name, datatype=declared.datatype, shape=[1, *shape] if self.batched else shape)
        request.raw_input_contents.append(pack(declared.datatype, values))
