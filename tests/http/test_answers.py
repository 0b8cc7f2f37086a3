"""What an answer holds: usage, choices, stop strings, the other APIs, comments through a silence."""

import asyncio
from typing import Any

from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.upstream import Upstream
from tests.support.wire import chat_body, events, request, wire


async def stream(site: Site, **fields: Any) -> list[Any]:
    async with site.chat(stream=True, **fields) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        return events(await answer.read())


async def whole(site: Site, path: str = "/v1/chat/completions", **fields: Any) -> tuple[int, Any]:
    async with site.client.post(site.url + path, json={"model": "demo", **fields}) as answer:
        return answer.status, await answer.json()


async def test_a_stream_says_the_same_as_a_body() -> None:
    async with running() as site:
        said = await stream(site, max_tokens=8, seed=3)
        assert said[-1] == "[DONE]"
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in said[:-1])
        _, body = await whole(site, messages=[{"role": "user", "content": "Hello there"}], max_tokens=8, seed=3)
        assert text == body["choices"][0]["message"]["content"]
        assert said[-2]["choices"][0]["finish_reason"] == body["choices"][0]["finish_reason"] == "length"
        await zero(site)


async def test_usage_comes_where_it_was_asked_for_and_nowhere_else() -> None:
    async with running() as site:
        with_usage = await stream(site, max_tokens=5, stream_options={"include_usage": True})
        *frames, last, done = with_usage
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 5
        assert all(frame["usage"] is None for frame in frames)
        for options in (None, {"include_usage": False}, {}):
            assert all(
                "usage" not in frame for frame in (await stream(site, max_tokens=5, stream_options=options))[:-1]
            )


async def test_several_choices_and_stop_strings() -> None:
    async with running() as site:
        frames = (await stream(site, max_tokens=6, n=3))[:-1]
        assert {frame["choices"][0]["index"] for frame in frames} == {0, 1, 2}
        message = [{"role": "user", "content": "Hello there"}]
        _, body = await whole(site, messages=message, max_tokens=30, min_tokens=30, seed=1)
        text = body["choices"][0]["message"]["content"]
        stop = text.split()[5]
        status, cut = await whole(site, messages=message, max_tokens=30, seed=1, stop=[stop])
        assert status == 200
        assert cut["choices"][0]["message"]["content"] == text[: text.index(stop)]
        assert cut["choices"][0]["finish_reason"] == "stop"


async def test_the_other_apis_of_a_backend() -> None:
    async with running() as site:
        status, body = await whole(site, "/v1/completions", prompt="Once", max_tokens=3)
        assert (status, body["usage"]["completion_tokens"]) == (200, 3)
        status, body = await whole(site, "/v1/embeddings", input=["one", "two"], dimensions=8)
        assert status == 200
        assert [len(row["embedding"]) for row in body["data"]] == [8, 8]
        status, body = await whole(site, "/v1/tokenize", prompt="a few words")
        assert (status, body["count"]) == (200, len(body["tokens"]))
        status, body = await whole(site, "/v1/embeddings", input="one", stream=True)
        assert (status, body["error"]["param"]) == (400, "stream")
        await zero(site)


async def test_an_api_that_no_backend_has_is_unsupported_in_its_own_shape() -> None:
    async with running() as site:
        status, body = await whole(site, "/v1/responses", input="hello")
        assert (status, body["error"]["code"]) == (400, "unsupported_feature")
        status, body = await whole(site, "/v1/messages", messages=[], max_tokens=1)
        assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")


async def test_a_field_that_no_backend_honours_is_named() -> None:
    async with running() as site:
        message = [{"role": "user", "content": "Hi"}]
        unsupported: dict[str, Any] = {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "logprobs": True,
            "response_format": {"type": "json_object"},
            "logit_bias": {"1": 1},
            "guided_regex": "a+",
        }
        for field, value in unsupported.items():
            status, body = await whole(site, messages=message, **{field: value})
            assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_feature", field)
        status, body = await whole(site, messages=message, temperature=9)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_request", "temperature")
        status, body = await whole(site, messages=[{"role": "user", "content": "word " * 9_000}])
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        await zero(site)


KEEP_ALIVE = """
[[class]]
name = "standard"
rank = 1
keep_alive_s = 0.05

[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
limits = { max_running = 1 }
"""


async def test_comments_bridge_a_silence_and_end_with_the_answer() -> None:
    async with running(KEEP_ALIVE) as site, asyncio.TaskGroup() as group:
        group.create_task(_hold(site, tokens=20))
        await site.until(lambda: len(site.trunk.queue.book.held) == 1)
        async with wire(site) as line:
            await line.send(request(chat_body(stream=True, max_tokens=2, min_tokens=2)))
            head = await line.head()
            assert (head.status, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            parts = [part async for part in line.parts()]
        comments = [part for part in parts if part == b": keep-alive\n\n"]
        assert len(comments) >= 2
        assert parts[: len(comments)] == comments
        assert events(b"".join(parts))[-1] == "[DONE]"


async def test_a_refusal_after_a_comment_is_the_last_event() -> None:
    async with running(KEEP_ALIVE) as site, asyncio.TaskGroup() as group:
        holder = group.create_task(_hold(site, tokens=2_000))
        await site.until(lambda: len(site.trunk.queue.book.held) == 1)
        async with wire(site) as line:
            await line.send(request(chat_body(stream=True), "x-slo-ttft-ms: 200"))
            body = (await line.answer()).body
        assert body.startswith(b": keep-alive\n\n")
        (last,) = events(body)
        assert last["error"]["code"] == "expired"
        assert last["usage"]["completion_tokens"] == 0
        holder.cancel()


async def test_what_goes_on_to_a_remote_engine() -> None:
    async with Upstream("theirs") as upstream:
        config = '[[pool]]\nmodel = "demo"\n[[pool.backend]]\nkind = "openai"\nname = "up"\nmodel = "theirs"\n'
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {"x-request-id": "r-1", "traceparent": trace, "tracestate": "a=b", "authorization": "Bearer secret"}
        async with running(f'{config}url = "{upstream.url}"\n') as site:
            async with site.chat(headers={**headers, "x-other": "no"}, max_tokens=2, temperature=0.25) as answer:
                assert answer.status == 200
            await zero(site)
        (seen,) = upstream.generations
        assert {name: seen.headers[name] for name in ("x-request-id", "traceparent", "tracestate")} == {
            name: headers[name] for name in ("x-request-id", "traceparent", "tracestate")
        }
        assert not {"authorization", "x-other"} & seen.headers.keys()
        assert (seen.json()["model"], seen.json()["temperature"]) == ("theirs", 0.25)


async def _hold(site: Site, tokens: int) -> None:
    async with site.chat(max_tokens=tokens, min_tokens=tokens) as answer:
        assert answer.status == 200
        await answer.read()
