"""One streamed request, from its first byte to its record."""

import asyncio
import time
import uuid
from typing import Any

import msgspec
from msgspec import Raw, Struct

from backends import sse
from backends.http1 import Pool
from backends.http1_errors import HttpError
from backends.http1_wire import Answer
from bench.arrivals import Planned
from bench.goodput import NOT_YET, Outcome, Record
from bench.target import PATHS, Target
from policies.types import Objective

REFUSALS = frozenset({422, 429, 503, 504, 529})
READ_BYTES = 65_536  # of a refusal

_NOTHING = (b"", b"null", b"[]", b'""')


class Delta(Struct):
    """Whatever a token may come as; empty where none has come."""

    content: Raw = Raw()
    reasoning_content: Raw = Raw()
    reasoning: Raw = Raw()
    tool_calls: Raw = Raw()

    def __bool__(self) -> bool:
        some = (self.content, self.reasoning_content, self.reasoning, self.tool_calls)
        return any(bytes(one) not in _NOTHING for one in some)


class Choice(Struct):
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Details(Struct):
    cached_tokens: int | None = 0


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Event(Struct):
    """What is read of one event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Raw = Raw()


class Fault(Struct, frozen=True):
    """What is read of an error."""

    code: Any = None
    type: str | None = None


class Refusal(Struct):
    error: Fault = Fault()


_event = msgspec.json.Decoder(Event).decode
_refusal = msgspec.json.Decoder(Refusal).decode
_fault = msgspec.json.Decoder(Fault).decode


class Asking:
    """Sends planned requests over one pool. `begin_s` is the run's begin on `time.perf_counter`."""

    def __init__(self, target: Target, pool: Pool, aims: dict[str, Objective], begin_s: float) -> None:
        self._target, self._pool, self._aims, self._begin_s = target, pool, aims, begin_s
        self._path = PATHS[target.endpoint]
        self._name = uuid.uuid4().hex

    def now_s(self) -> float:
        return time.perf_counter() - self._begin_s

    async def run(self, planned: Planned, body: bytes) -> Record:
        """Ask, and again when told so. Never raises but for a cancelled task."""
        now = self.now_s()
        record = Record(
            planned.number, planned.source, now, now, planned.tenant, planned.klass,
            planned.input_tokens, planned.output_tokens, planned.input_tokens, lag_s=now - planned.at_s,
        )  # fmt: skip
        try:
            async with asyncio.timeout(None if planned.leave_s == float("inf") else planned.leave_s):
                await self._until_answered(record, body)
        except TimeoutError:
            record.outcome, record.reason = Outcome.LEFT, ""
        except HttpError as error:
            record.outcome, record.reason = Outcome.FAILED, type(error).__name__
        except (msgspec.MsgspecError, ValueError):
            record.outcome, record.reason = Outcome.FAILED, "nonsense"
        if record.end_s == NOT_YET:
            record.end_s = self.now_s()
        return record

    async def _until_answered(self, record: Record, body: bytes) -> None:
        target = self._target
        more = target.headers(record.klass, self._aims[record.source])
        if target.retries:  # as the OpenAI SDK does: one key for all attempts
            more += f"idempotency-key: {self._name}-{record.number}\r\n"
        head = target.head(self._path, len(body), target.keys.get(record.tenant, target.any_key), more)
        while True:
            wait_s = await self._attempt(record, head, body)
            if record.outcome is not Outcome.REFUSED or wait_s is None or record.attempts > target.retries:
                return
            await asyncio.sleep(wait_s)
            record.attempts += 1
            record.at_s, record.end_s, record.reason = self.now_s(), NOT_YET, ""

    async def _attempt(self, record: Record, head: bytes, body: bytes) -> float | None:
        """Ask once. Returns in how many seconds to come again, None for not at all."""
        asked = await self._pool.ask(head, body)
        try:
            answer = await asked.answered()
            record.status = answer.status
            if answer.status == 200:
                await self._stream(record, answer)
                return None
            return await self._refused(record, answer)
        finally:
            asked.release()

    async def _stream(self, record: Record, answer: Answer) -> None:
        framer, ended, chunks = sse.Framer(), False, 0
        while data := await answer.read():
            now = self.now_s()
            for event in sse.each(framer.feed(data)):
                payload = sse.payload(event)
                if payload == b"[DONE]":
                    ended = True
                elif payload:
                    said = _event(payload)
                    chunks += self._heard(record, said, now)
                    ended = ended or any(choice.finish_reason for choice in said.choices)
        record.end_s = self.now_s()
        if not record.counted:
            record.output_tokens = chunks
        if record.reason:
            record.outcome = Outcome.FAILED
        elif not ended or not record.started:
            record.outcome, record.reason = Outcome.FAILED, "cut_off" if record.started else "empty"
        else:
            record.outcome = Outcome.DONE

    def _heard(self, record: Record, said: Event, now: float) -> int:
        """Take in one event; 1 if it has a token."""
        if bytes(said.error) not in _NOTHING:
            record.reason = _code(_fault(said.error), "stream_error")
        if said.usage is not None:
            details = said.usage.prompt_tokens_details
            record.prompt_tokens, record.output_tokens = said.usage.prompt_tokens, said.usage.completion_tokens
            record.cached_tokens = (details.cached_tokens or 0) if details else 0
            record.counted = True
        if not any(choice.delta or choice.text for choice in said.choices):
            if any(choice.finish_reason for choice in said.choices):
                record.last_s = now  # the last token may have no text of its own
                if not record.started:
                    record.first_s = now
            return 0
        if record.started:
            record.stall_s = max(record.stall_s, now - record.last_s)
        else:
            record.first_s = now
        record.last_s = now
        return 1

    async def _refused(self, record: Record, answer: Answer) -> float | None:
        parts: list[bytes] = []
        while (part := await answer.read()) and sum(map(len, parts)) < READ_BYTES:
            parts.append(part)
        record.end_s = self.now_s()
        refused = answer.status in REFUSALS
        record.outcome = Outcome.REFUSED if refused else Outcome.FAILED
        if refused and record.refused_s == NOT_YET:
            record.refused_s = record.end_s
        try:
            fault = _refusal(b"".join(parts)).error
        except msgspec.MsgspecError:
            fault = Fault()
        said = answer.headers.get(b"x-signalbox-reason", b"").decode("latin-1")
        record.reason = said or _code(fault, f"http_{answer.status}")
        return told_wait_s(answer.headers)


def told_wait_s(headers: dict[bytes, bytes]) -> float | None:
    """In how many seconds a client is told to come again; None where it is not, or told not to."""
    if headers.get(b"x-should-retry") == b"false":
        return None
    for name, unit in ((b"retry-after-ms", 1000.0), (b"retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) / unit)
        except (KeyError, ValueError):
            continue
    return None


def _code(fault: Fault, otherwise: str) -> str:
    code = fault.code if isinstance(fault.code, str) else None
    return code or fault.type or otherwise
