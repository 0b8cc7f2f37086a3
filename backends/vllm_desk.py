"""Plans: takes a request through vLLM's serving objects as far as the seam, and its whole answer out of them."""

import asyncio
from types import SimpleNamespace
from typing import Any

from pydantic import TypeAdapter
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeRequest
from vllm.v1.engine.async_llm import AsyncLLM

from backends.protocol import Kind, Prompt, Refused
from backends.vllm_faults import of_answer, while_planning
from backends.vllm_seam import Call, Primed, current

SERVING: dict[Kind, tuple[TypeAdapter[Any], str, str]] = {
    Kind.CHAT: (TypeAdapter(ChatCompletionRequest), "openai_serving_chat", "create_chat_completion"),
    Kind.COMPLETION: (TypeAdapter(CompletionRequest), "openai_serving_completion", "create_completion"),
    Kind.RESPONSES: (TypeAdapter(ResponsesRequest), "openai_serving_responses", "create_responses"),
    Kind.MESSAGES: (TypeAdapter(AnthropicMessagesRequest), "anthropic_serving_messages", "create_messages"),
    Kind.EMBEDDINGS: (TypeAdapter(EmbeddingRequest), "serving_embedding", "__call__"),
    Kind.TOKENIZE: (TypeAdapter(TokenizeRequest), "serving_tokenization", "create_tokenize"),
}
"""Per API: how its bodies are read, and the serving object and method that vLLM's own routes call."""


class Headers(dict[str, str]):
    """Case-insensitive reads, which is all that vLLM does with request headers."""

    def __init__(self, items: tuple[tuple[str, str], ...]) -> None:
        super().__init__((name.lower(), value) for name, value in items)

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key.lower(), default)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(str(key).lower())

    def __getitem__(self, key: str) -> str:
        return super().__getitem__(key.lower())


class Desk:
    """vLLM's serving objects of one engine. `served` are the names it answers to; adapters not counted."""

    def __init__(self, llm: AsyncLLM, state: SimpleNamespace, served: list[str], traced: bool) -> None:
        self._llm, self._state, self._served, self._traced = llm, state, served, traced

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(kind.value for kind, (_, holder, _) in SERVING.items() if self.serving(kind, holder))

    def serving(self, kind: Kind, holder: str = "") -> Any:
        """vLLM's object for an API, or None."""
        return getattr(self._state, holder or SERVING[kind][1], None)

    async def plan(self, prompt: Prompt) -> Call:
        """Parse, check and render. The engine hears nothing. Raises Refused, BackendBusy, BackendLost."""
        reader, holder, method = SERVING[prompt.kind]
        serving = self.serving(prompt.kind, holder)
        if serving is None:
            raise Refused(
                400, "unsupported_feature", f"{prompt.model} does not serve the {prompt.kind.value} API", "model"
            )
        try:
            request = reader.validate_json(prompt.body)
        except Exception as exc:  # noqa: BLE001 - validators of vLLM raise anything, and all of it has an answer
            raise while_planning(prompt.kind, exc) from None
        if prompt.model in self._served:
            request.model = prompt.model  # the client may have used an alias of the pool
        call = Call(self._llm, prompt.kind, request)
        task = self._task(call, getattr(serving, method)(request, self._raw(prompt)))
        try:
            await call.planned
            if task.done():
                await self._settle(call, task)
        except BaseException:
            call.close()
            raise
        return call

    def _task(self, call: Call, work: Any) -> "asyncio.Task[Any]":
        token = current.set(call)
        try:
            task = asyncio.get_running_loop().create_task(work)
        finally:
            current.reset(token)
        task.add_done_callback(lambda _: call.seen())
        call.result = task
        return task

    async def _settle(self, call: Call, task: "asyncio.Task[Any]") -> None:
        """What the serving method gave without waiting for the engine: a refusal, a generator, or a whole answer."""
        try:
            result = task.result()
        except Exception as exc:
            raise while_planning(call.kind, exc) from exc
        if isinstance(result, ErrorResponse):
            raise of_answer(call.kind, result)
        call.result = result
        if not call.works and hasattr(result, "__aiter__"):
            await self._prime(call, result)

    async def _prime(self, call: Call, source: Any) -> None:
        call.planned = asyncio.get_running_loop().create_future()
        call.lazy = True
        call.result = Primed(call, source)
        await call.planned

    def _raw(self, prompt: Prompt) -> SimpleNamespace:
        headers = prompt.headers + prompt.trace if self._traced else prompt.headers
        if prompt.request_id:
            headers += (("x-request-id", prompt.request_id),)
        return SimpleNamespace(headers=Headers(headers), state=SimpleNamespace())


def body(kind: Kind, answer: Any) -> bytes:
    """The JSON that vLLM's own routes would send for a whole answer. Raises the fault where it is an error."""
    if isinstance(answer, ErrorResponse):
        raise of_answer(kind, answer)
    if kind is Kind.EMBEDDINGS:
        return bytes(answer.body)
    if kind is Kind.MESSAGES:
        return bytes(answer.model_dump_json(exclude_none=True).encode())
    return bytes(answer.model_dump_json(by_alias=kind is Kind.RESPONSES).encode())


def event(item: Any) -> str:
    """The server-sent event of what a serving generator yields: text as it is, or an object of the Responses API."""
    if isinstance(item, str):
        return item
    return f"event: {getattr(item, 'type', 'unknown')}\ndata: {item.model_dump_json(by_alias=True)}\n\n"
