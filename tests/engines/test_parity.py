"""The 29 cases: what the in-process engine answers is what vLLM's own server answers, field by field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from backends.protocol import Kind
from tests.engines.asking import (
    CHAT,
    MESSAGES,
    SCHEMA,
    TEXT,
    USAGE,
    answer,
    joined,
    prompt,
    read,
    server_answer,
    shaped,
)

if TYPE_CHECKING:
    from backends.vllm_engine import InProcess
    from tests.engines.conftest import Server

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
NAMED = CHAT | {"max_tokens": 64, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}
STREAM = {"stream": True}
LONG = CHAT | {"messages": [{"role": "user", "content": "word " * 4000}]}
RESPONSE = {"model": "tiny", "temperature": 0, "max_output_tokens": 16, "input": "Hello"}
MESSAGE = {"model": "tiny", "temperature": 0, "max_tokens": 16, "messages": MESSAGES}
LOGPROBS = CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 4}
SEEDED = CHAT | {"n": 2, "seed": 7, "temperature": 0.9}


SAME: dict[str, tuple[Kind, dict[str, Any]]] = {
    "chat": (Kind.CHAT, CHAT),
    "chat stream": (Kind.CHAT, CHAT | STREAM | {"stream_options": USAGE}),
    "n=2": (Kind.CHAT, SEEDED),
    "n=2 stream": (Kind.CHAT, SEEDED | STREAM),
    "logprobs": (Kind.CHAT, LOGPROBS),
    "logprobs stream": (Kind.CHAT, LOGPROBS | STREAM),
    "json schema": (Kind.CHAT, CHAT | {"max_tokens": 64} | shaped(SCHEMA)),
    "named tool": (Kind.CHAT, NAMED),
    "named tool stream": (Kind.CHAT, NAMED | STREAM),
    "required tool stream": (Kind.CHAT, NAMED | STREAM | {"tool_choice": "required"}),
    "auto tool": (Kind.CHAT, CHAT | {"tools": [TOOL]}),
    "stop": (Kind.CHAT, CHAT | {"stop": ["e", "a"]}),
    "stop stream": (Kind.CHAT, CHAT | STREAM | {"stop": ["e", "a"], "include_stop_str_in_output": True}),
    "completion": (Kind.COMPLETION, TEXT | {"logprobs": 1, "echo": True}),
    "completion stream": (Kind.COMPLETION, TEXT | STREAM | {"stream_options": USAGE}),
    "completion of two prompts": (Kind.COMPLETION, TEXT | {"prompt": ["def main():", "class A:"]}),
    "responses": (Kind.RESPONSES, RESPONSE),
    "responses stream": (Kind.RESPONSES, RESPONSE | STREAM),
    "messages": (Kind.MESSAGES, MESSAGE),
    "messages stream": (Kind.MESSAGES, MESSAGE | STREAM),
    "too long": (Kind.CHAT, LONG),
    "too long stream": (Kind.CHAT, LONG | STREAM),
    "max_tokens too big": (Kind.CHAT, CHAT | {"max_tokens": 99999}),
    "unknown model": (Kind.CHAT, CHAT | {"model": "nope"}),
    "bad temperature": (Kind.CHAT, CHAT | {"temperature": -1}),
    "bad type": (Kind.CHAT, CHAT | {"max_tokens": "many"}),
    "bad schema": (Kind.CHAT, CHAT | shaped({"type": "nonsense"})),
}

BETTER: dict[str, dict[str, Any]] = {
    "bad schema stream": CHAT | STREAM | shaped({"type": "nonsense"}),
    "bad regex stream": CHAT | STREAM | {"structured_outputs": {"regex": "(("}},
}
"""vLLM's server says 200 and then streams an error; here it is an honest 400."""


async def test_there_are_29_cases() -> None:
    assert len(SAME) + len(BETTER) == 29


@pytest.mark.parametrize("case", SAME)
async def test_same_answer_as_vllms_server(case: str, starting: Server, engine: InProcess, server: Server) -> None:
    kind, body = SAME[case]
    status, ours, plan, usage = await answer(engine, kind, body)
    theirs_status, theirs = await server_answer(server, kind, body)
    assert status == theirs_status
    if body.get("stream") and status == 200:
        ours, theirs = joined(ours), joined(theirs)
    assert ours == theirs
    if plan is not None and usage is not None:
        assert plan.exact
        assert plan.prompt_tokens == usage.prompt_tokens
        assert usage.completion_tokens <= plan.output_limit


@pytest.mark.parametrize("case", BETTER)
async def test_better_answer_than_vllms_server(case: str, engine: InProcess, server: Server) -> None:
    status, ours, _, _ = await answer(engine, Kind.CHAT, BETTER[case])
    theirs_status, theirs = await server_answer(server, Kind.CHAT, BETTER[case])
    assert (status, theirs_status) == (400, 200)
    assert theirs == [ours, "[DONE]"]


async def test_tokenize_is_the_servers(engine: InProcess, server: Server) -> None:
    for body in ({"model": "tiny", "prompt": "def main():"}, {"model": "tiny", "messages": MESSAGES}):
        status, ours, _, _ = await answer(engine, Kind.TOKENIZE, body)
        assert (status, ours) == await server_answer(server, Kind.TOKENIZE, body)


async def test_alias_of_the_pool_is_answered_under_its_model_name(engine: InProcess) -> None:
    body = CHAT | {"model": "an-alias"}
    asked = prompt(Kind.CHAT, body)
    asked.model = "tiny"
    chunks = await read(await engine.open(await engine.plan(asked)))
    assert json.loads(chunks[-1].data)["model"] == "tiny"
