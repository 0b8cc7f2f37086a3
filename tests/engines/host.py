"""A process that holds an engine, to be killed: `python -m tests.engines.host MODEL` prints what it is, and stays."""

import asyncio
import json
import sys

from backends.protocol import Kind, Prompt
from backends.vllm import Vllm

EMBEDDING = json.dumps({"model": "tiny", "input": ["Hello", "world and more"]}).encode()


async def main(model: str) -> None:
    args = {"max-model-len": 512, "enforce-eager": True, "dtype": "bfloat16", "runner": "pooling", "convert": "embed"}
    backend = await Vllm(name="host", model=model, args=args).connect("tiny")
    plan = await backend.plan(Prompt(kind=Kind.EMBEDDINGS, model="tiny", body=EMBEDDING))
    stream = await backend.open(plan)
    chunk = await stream.next()
    assert chunk is not None
    told = {
        "kinds": sorted(backend.bundle.kinds),
        "engines": backend.process_ids,  # type: ignore[attr-defined]
        "planned": plan.prompt_tokens,
        "used": chunk.usage.prompt_tokens if chunk.usage else 0,
        "answer": json.loads(chunk.data),
        "more": await stream.next() is not None,
    }
    print(json.dumps(told), flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
