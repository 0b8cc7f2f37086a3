"""The server that is asked: where it is, how requests to it look, and what it says of itself."""

import ssl
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct, field

from backends.http1 import Origin, Pool, Timing, parse_url, tls_context
from backends.http1_errors import HttpError
from bench import prompts
from bench.prompts import Count, PromptError, Words
from policies.types import Objective

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CONNECTIONS = 60_000
SETUP_S = 60.0  # for one answer before the run


class TargetError(Exception):
    """The server can't be asked, or its answer makes no sense. Its text is one line for the operator."""


class Target(Struct, frozen=True, kw_only=True):
    """Whom to ask, and how. `keys` are API keys by tenant, "" for requests of no tenant.

    With `tell` the objectives go along as `x-slo-ttft-ms`, `x-slo-tpot-ms` and `x-deadline-ms`; `deadline_ms` above 0
    is one for all. `extra` are further fields of the body. `patience_s` is until the first byte and between two.
    """

    url: str
    model: str = ""
    endpoint: str = "chat"
    keys: dict[str, str] = field(default_factory=dict)
    tell: bool = False
    deadline_ms: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    retries: int = 0
    patience_s: float = 600.0
    ca_file: str = ""
    insecure: bool = False

    @property
    def origin(self) -> Origin:
        return parse_url(self.url)

    def pool(self) -> Pool:
        """Connections; for a running loop. Close it."""
        origin = self.origin
        timing = Timing(connect_s=30.0, first_byte_s=self.patience_s, idle_s=self.patience_s)
        return Pool(origin, timing, self._tls() if origin.scheme == "https" else None, CONNECTIONS)

    def head(self, path: str, size: int, key: str, more: str = "") -> bytes:
        """A request's head, with the size of its body."""
        origin = self.origin
        bearer = f"authorization: Bearer {key}\r\n" if key else ""
        return (
            f"{'POST' if size else 'GET'} {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n"
            f"content-type: application/json\r\ncontent-length: {size}\r\n{bearer}{more}\r\n"
        ).encode()

    def body(self, text: str, limit: int, *, exact: bool) -> bytes:
        """A streamed request for an answer of at most `limit` tokens, or exactly as many (`ignore_eos`, as vLLM, SGLang
        and others have it)."""
        fields: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        fields |= self._asks(text) | {"max_tokens": limit}
        if exact:
            fields |= {"ignore_eos": True}
        return msgspec.json.encode(fields | self.extra)

    def headers(self, klass: str, aim: Objective) -> str:
        """What goes with a request besides its key."""
        found = {"x-priority-class": klass}
        if self.tell:
            goals = {"x-slo-ttft-ms": aim.ttft_ms, "x-slo-tpot-ms": aim.tpot_ms, "x-deadline-ms": aim.total_ms}
            found |= {name: str(value) for name, value in goals.items() if value}
        if self.deadline_ms:
            found["x-deadline-ms"] = str(self.deadline_ms)
        return "".join(f"{name}: {value}\r\n" for name, value in found.items() if value)

    def _asks(self, text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]} if self.endpoint == "chat" else {"prompt": text}

    def _tls(self) -> ssl.SSLContext:
        try:
            return tls_context(self.ca_file, verify=not self.insecure)
        except OSError as error:
            raise TargetError(f"--ca-file: {self.ca_file} can't be loaded: {error}") from None

    # before the run

    @property
    def any_key(self) -> str:
        return next(iter(self.keys.values()), "")

    async def ask(self, pool: Pool, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON of one answer; None for what is no JSON. Raises TargetError."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            asked = await pool.ask(self.head(path, len(data), self.any_key), data, SETUP_S)
            try:
                answer = await asked.answered()
                parts = []
                while part := await answer.read():
                    parts.append(part)
            finally:
                asked.release()
        except HttpError as error:
            raise TargetError(f"{self.url}: {error}") from None
        try:
            return answer.status, msgspec.json.decode(b"".join(parts))
        except msgspec.MsgspecError:
            return answer.status, None

    async def models(self, pool: Pool) -> dict[str, int]:
        """The models it serves, each with its context in tokens (0: it does not say). Raises TargetError."""
        status, said = await self.ask(pool, "/v1/models")
        if status != 200 or not isinstance(said, dict) or not isinstance(said.get("data"), list):
            raise TargetError(f"{self.url}/v1/models answered {status}{_message(said)}")
        return {str(one["id"]): int(one.get("max_model_len") or 0) for one in said["data"] if "id" in one}

    async def tokenized(self, pool: Pool, text: str) -> int | None:
        """Tokens of a request with this text by `/v1/tokenize` or vLLM's `/tokenize`; None where neither is there."""
        for path in ("/v1/tokenize", "/tokenize"):
            status, said = await self.ask(pool, path, {"model": self.model, **self._asks(text)})
            if status == 200 and isinstance(said, dict) and isinstance(said.get("count"), int):
                return int(said["count"])
        return None

    async def used(self, pool: Pool, text: str) -> int:
        """The same by the `usage` of an answer of one token. Raises TargetError."""
        asks = {"model": self.model, **self._asks(text), "max_tokens": 1}
        status, said = await self.ask(pool, PATHS[self.endpoint], asks)
        usage = said.get("usage") if isinstance(said, dict) else None
        if status != 200 or not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            raise TargetError(f"{self.url}{PATHS[self.endpoint]} answered {status} without usage{_message(said)}")
        return int(usage["prompt_tokens"])


async def words_for(target: Target, pool: Pool, tokenizer: str = "") -> tuple[Words, str]:
    """Words for the target's model, and who counted them. Raises PromptError, TargetError."""
    count, by = _by_usage(target, pool), "usage"
    if tokenizer:
        alone, by = prompts.local(tokenizer), tokenizer
        count = _by_folder(alone, await target.used(pool, prompts.FIRST) - alone(prompts.FIRST))
    elif await target.tokenized(pool, prompts.FIRST) is not None:
        count, by = _by_tokenize(target, pool), "/v1/tokenize"
    return await prompts.calibrated(count), by


def _by_usage(target: Target, pool: Pool) -> Count:
    async def count(text: str) -> int:
        return await target.used(pool, text)

    return count


def _by_folder(alone: Callable[[str], int], template: int) -> Count:
    async def count(text: str) -> int:
        return alone(text) + template

    return count


def _by_tokenize(target: Target, pool: Pool) -> Count:
    async def count(text: str) -> int:
        found = await target.tokenized(pool, text)
        if found is None:
            raise PromptError(f"{target.url}: its tokenizer answered once and then no more")
        return found

    return count


def _message(said: Any) -> str:
    error = said.get("error") if isinstance(said, dict) else None
    text = error.get("message") if isinstance(error, dict) else None
    return f": {text}" if text else ""
