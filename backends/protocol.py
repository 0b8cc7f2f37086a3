"""How the gateway speaks to an engine: three verbs and an end, and a stream that is an explicit pair.

A stream has an owner who must end it with `aclose`; an async generator would have a garbage collector instead.
"""

import enum
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct

from backends.bundle import Bundle


class Kind(enum.StrEnum):
    """Which API a request speaks. The path it came in by; also what a bundle lists as served."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    TOKENIZE = "tokenize"


PATHS: dict[Kind, str] = {
    Kind.CHAT: "/v1/chat/completions",
    Kind.COMPLETION: "/v1/completions",
    Kind.RESPONSES: "/v1/responses",
    Kind.MESSAGES: "/v1/messages",
    Kind.EMBEDDINGS: "/v1/embeddings",
    Kind.TOKENIZE: "/v1/tokenize",
}


class Prompt(Struct, kw_only=True):
    """One request as an engine is asked for it. `body` is JSON as the client sent it, checked to be an object.

    `want_usage` is whether the client asked for a usage frame; a backend asks its engine for one in any case and hides
    it again. `max_tokens` is the client's output limit, 0 if it set none; `tpot_ms` the time per output token that it
    wants at most, 0 for any. `headers` go on to a remote engine
    (`x-request-id`), names in lower case. `trace` is the W3C trace context that the engine's own spans belong to
    (`traceparent`, perhaps `tracestate`): an adapter passes it in whatever way its engine reads it (HTTP headers, gRPC
    metadata, vLLM's trace headers); empty where there is none.
    """

    kind: Kind
    model: str
    body: bytes
    stream: bool = False
    want_usage: bool = False
    has_stream_options: bool = False
    max_tokens: int = 0
    tpot_ms: int = 0
    request_id: str = ""
    rank: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    trace: tuple[tuple[str, str], ...] = ()


class Plan(Struct, kw_only=True):
    """A checked request that the engine has not heard of. Its owner ends it with `close` if it is never opened.

    `prompt_tokens` is exact where the backend has the tokenizer, else estimated. `output_limit` is the most output
    tokens over all choices, 0 where nothing bounds it. `work` belongs to the backend that made the plan.
    """

    prompt: Prompt
    maker: str
    prompt_tokens: int
    exact: bool = False
    output_limit: int = 0
    work: Any = None

    def close(self) -> None:
        """Let go of what planning holds. Synchronous, idempotent, harmless after `open`."""
        work, self.work = self.work, None
        if work is not None and hasattr(work, "close"):
            work.close()


class Usage(Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Chunk(Struct, gc=False):
    """A piece of the answer, ready for the client: whole SSE events when streaming, else a part of the JSON body.

    `tokens` counts the output events in it: 0 for frames that carry none (the role, usage, the end). `data` may be
    empty where only the progress is news (the first token of an unstreamed answer). `usage` comes at most once, at the
    end. `last` promises that nothing follows, so that the end needs no write of its own; leaving it out is fine.
    """

    data: bytes
    tokens: int = 0
    usage: Usage | None = None
    last: bool = False


class Gauge(Struct, frozen=True, kw_only=True):
    """How the engine is doing. None is "it does not say", never "nothing".

    `steps` are model steps since the last gauge, each (prefill_tokens, running, kv_tokens, seconds).
    """

    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    preemptions: int | None = None
    steps: tuple[tuple[int, int, int, float], ...] = ()


class Refused(Exception):
    """The request is at fault, the engine is fine: a 4xx. Trips no breaker and moves to no other backend.

    `code` is a word of `policies.reasons`. `body` is the engine's own answer where it gave one: sent on as it is.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, body: bytes | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param, self.body = status, code, message, param, body


class BackendBusy(Exception):
    """The engine has no room just now (its 429, or 503 with Retry-After). Another may; no failure for a breaker."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BackendError(Exception):
    """The engine is there and failed at this request: a 5xx, an error in the stream, or nonsense on the wire."""


class BackendLost(Exception):
    """The engine is not there: not reachable, closed the connection, too late, or dead."""


class Stream(Protocol):
    """One running generation. Not for use by two tasks at once, but `aclose` may come from any.

    Once `next` has returned None, or a chunk with `last`, the stream holds nothing and `aclose` may be left out.
    """

    async def next(self) -> Chunk | None:
        """The next piece, or None at the end.

        Raises BackendLost or BackendError; on the first call also Refused and BackendBusy.
        """
        ...

    async def aclose(self) -> None:
        """Abort if unfinished, so that the engine stops. Idempotent; never raises; bounded in time."""
        ...


class Backend(Protocol):
    """One engine."""

    name: str
    bundle: Bundle

    async def plan(self, prompt: Prompt) -> Plan:
        """Check, template, count tokens. The engine hears nothing. Raises Refused, BackendLost."""
        ...

    async def open(self, plan: Plan) -> Stream:
        """Start the generation of a plan that this backend made; needs a lease.

        Raises Refused, BackendBusy, BackendError, BackendLost.
        """
        ...

    async def gauge(self) -> Gauge:
        """How it is doing; cheap; called about once a second. Raises BackendLost when the engine is dead or hangs."""
        ...

    async def aclose(self) -> None:
        """Give everything back. Running streams end with BackendLost. Idempotent; never raises."""
        ...


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the shared queue may hand to one backend. 0 means: what the engine says, else the default in the comment."""

    max_running: Annotated[int, Meta(ge=0)] = 0  # 64
    prefill_tokens_per_s: Annotated[int, Meta(ge=0)] = 0  # 8,000
    kv_tokens: Annotated[int, Meta(ge=0)] = 0  # max_running * 2,048
    chunk_tokens: Annotated[int, Meta(ge=0)] = 0  # 2,048: one prefill step
