"""W3C trace context: what comes with a request, what goes on to its engine, and whether it is sampled."""

import random
import re
from collections.abc import Mapping

from msgspec import Struct

_SAMPLED, _RANDOM = 1, 2
_LOW = (1 << 64) - 1
MOST_STATE_BYTES = 2_048

_PARENT = re.compile(
    rb"(?!ff)(?P<version>[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<span>(?!0{16})[0-9a-f]{16})"
    rb"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


class Context(Struct, frozen=True, gc=False):
    """A request's place in a trace. Ids are lower-case hex; `span_id` is that of the gateway's server span."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    flags: int = 0
    state: str = ""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """For the engine, whose spans belong under ours."""
        parent = ("traceparent", f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}")
        return (parent, ("tracestate", self.state)) if self.state else (parent,)


def log_fields(request_id: str, context: Context | None) -> dict[str, str]:
    """What a log line about a request says besides, as its `extra`."""
    fields = {"request_id": request_id}
    if context is not None:
        fields["trace_id"] = context.trace_id
    return fields


class Sampler:
    """Decides as OpenTelemetry's `ParentBased(TraceIdRatioBased(ratio))`: the caller's decision, else by the id."""

    def __init__(self, ratio: float) -> None:
        self._bound = round(ratio * (1 << 64))

    def begin(self, headers: Mapping[bytes, bytes]) -> Context:
        """From the request's headers, names in lower case. A context that cannot be read is as good as none."""
        parent = headers.get(b"traceparent")
        found = _PARENT.fullmatch(parent.strip()) if parent is not None else None
        if found is None or (found["version"] == b"00" and found["more"]):
            bits = random.getrandbits(192)
            ids = f"{bits:048x}"
            flags = _RANDOM | ((bits >> 64) & _LOW < self._bound)
            return Context(ids[:32], ids[32:], "", flags)
        return Context(
            found["trace"].decode(),
            f"{random.getrandbits(64):016x}",
            found["span"].decode(),
            int(found["flags"], 16) & (_SAMPLED | _RANDOM),
            _state(headers.get(b"tracestate")),
        )


def _state(given: bytes | None) -> str:
    if given is None or len(given) > MOST_STATE_BYTES or not given.isascii():
        return ""
    text = given.decode().strip()
    return text if text.isprintable() else ""
