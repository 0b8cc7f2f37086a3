"""An engine with in-flight batching and no model behind it, on an event loop and a thread of its own.

A step gives every running request one token. Waiting requests enter when a slot and enough KV blocks are free. A prompt
that holds `@{...}@` scripts its own answer; see `Script`.
"""

import asyncio
import json
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass, field

import metrics as gauges
import text as words
import triton_python_backend_utils as pb


@dataclass
class Script:
    """What a prompt may ask for: the text to say, and after how many tokens to fail, fall silent or die."""

    say: str | None = None
    fail_after: int | None = None
    stall_after: int | None = None
    crash_after: int | None = None
    prefill_ms: float = 0.0

    @classmethod
    def of(cls, prompt: str) -> "Script":
        found = re.search(r"@(\{.*\})@", prompt, re.DOTALL)
        return cls(**json.loads(found[1])) if found else cls()


@dataclass(eq=False)
class Job:
    """One sequence. `on_tokens(ids, final, reason, error)` runs on the engine's loop."""

    prompt: list
    limit: int
    on_tokens: object
    user_id: str = ""
    cancelled: object = None
    end_id: int = words.EOS
    stop_ids: list = field(default_factory=list)
    seed: int = 0
    guide: str = ""
    script: Script = field(default_factory=Script)
    ids: list = field(default_factory=list)
    out: list = field(default_factory=list)
    blocks: int = 0
    reused: int = 0
    abort: bool = False
    done: bool = False

    def __post_init__(self):
        self.script = Script.of(words.decode(self.prompt))
        say = self.guide or self.script.say
        self.ids = words.encode(say) if say is not None and say != "" else []
        if not self.ids and self.script.say is None:
            self.ids = words.babble(self.seed or sum(self.prompt) % 9973, self.limit)


def setting(config, name, kind, default):
    value = config.get("parameters", {}).get(name, {}).get("string_value", "")
    return kind(value) if value != "" else default


class Engine:
    def __init__(self, config, version):
        self.name = config["name"]
        self.slots = setting(config, "standin_slots", int, 16)
        self.step_s = setting(config, "standin_token_ms", float, 10.0) / 1e3
        self.prefill_s = setting(config, "standin_prefill_us", float, 20.0) / 1e6
        self.kv_blocks = setting(config, "standin_kv_blocks", int, 512)
        self.per_block = setting(config, "standin_tokens_per_block", int, 64)
        self.most_waiting = setting(config, "standin_max_queue_size", int, 0)
        self.cancel_s = setting(config, "cancellation_check_period_ms", int, 100) / 1e3
        self.waiting, self.running = [], []
        self.used = 0
        self.seen = {}
        self.ended = Counter()
        self.metrics = gauges.Metrics(self, version, setting(config, "standin_metrics", str, "true") == "true")
        self.loop = asyncio.new_event_loop()
        self.wake = asyncio.Event()
        self.tasks = []
        ready = threading.Event()
        self.thread = threading.Thread(target=self._main, args=(ready,), daemon=True)
        self.thread.start()
        ready.wait()

    def submit(self, job):
        self.loop.call_soon_threadsafe(self._admit, job)

    def stop(self, user_id):
        """All requests of this id end at the next step."""

        def mark():
            for job in self.waiting + self.running:
                if job.user_id == user_id:
                    job.abort = True
            self.wake.set()

        self.loop.call_soon_threadsafe(mark)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)

    def _main(self, ready):
        asyncio.set_event_loop(self.loop)
        self.tasks = [self.loop.create_task(self._steps()), self.loop.create_task(self._cancellations())]
        self.loop.call_soon(ready.set)
        self.loop.run_forever()

    def _admit(self, job):
        if self.most_waiting and len(self.waiting) >= self.most_waiting:
            self._end(job, "error", error="Maximum queue size exceeded")
            return
        self.waiting.append(job)
        self.metrics.update(self)
        self.wake.set()

    def _schedule(self):
        """Let in what fits. The seconds that its prefill takes."""
        cost_s = 0.0
        while self.waiting and len(self.running) < self.slots:
            job = self.waiting[0]
            job.blocks = -(-(len(job.prompt) + job.limit) // self.per_block)
            if job.blocks > self.kv_blocks:
                self.waiting.pop(0)
                self._end(job, "error", error="Prompt length plus output length exceeds the KV cache")
                continue
            if self.used + job.blocks > self.kv_blocks:
                break
            self.running.append(self.waiting.pop(0))
            self.used += job.blocks
            for at in range(len(job.prompt) // self.per_block):
                block = tuple(job.prompt[: (at + 1) * self.per_block])
                job.reused += block in self.seen
                self.seen[block] = True
            fresh = len(job.prompt) - job.reused * self.per_block
            cost_s += fresh * self.prefill_s + job.script.prefill_ms / 1e3
        return cost_s

    def _end(self, job, reason, ids=(), error=None):
        if job.done:
            return
        job.done = True
        if job in self.running:
            self.running.remove(job)
            self.used -= job.blocks
        self.ended[reason] += 1
        self.metrics.update(self)
        job.on_tokens(list(ids), True, reason, error)

    def _decode(self, job):
        at, script = len(job.out), job.script
        if job.abort:
            self._end(job, "cancelled")
        elif script.fail_after is not None and at >= script.fail_after:
            self._end(job, "error", error="stand-in: injected failure")
        elif script.crash_after is not None and at >= script.crash_after:
            os._exit(3)
        elif script.stall_after is None or at < script.stall_after:
            self._token(job, job.ids[at] if at < len(job.ids) else job.end_id)

    def _token(self, job, token):
        if token == job.end_id or token < 0:
            self._end(job, "stop")
            return
        job.out.append(token)
        if any(job.out[-len(stop) :] == stop for stop in job.stop_ids):
            self._end(job, "stop", [token])
        elif len(job.out) >= job.limit:
            self._end(job, "length", [token])
        else:
            job.on_tokens([token], False, None, None)

    async def _steps(self):
        while True:
            if not (self.running or self.waiting):
                self.wake.clear()
                await self.wake.wait()
            for job in [job for job in self.waiting if job.abort]:
                self.waiting.remove(job)
                self._end(job, "cancelled")
            cost_s = self._schedule()
            self.metrics.update(self)
            await asyncio.sleep(self.step_s + cost_s)
            for job in list(self.running):
                self._decode(job)

    async def _cancellations(self):
        """What the real backend does: ask now and then whether anybody still wants the answer."""
        while True:
            await asyncio.sleep(self.cancel_s)
            for job in self.waiting + self.running:
                job.abort = job.abort or bool(job.cancelled and job.cancelled())


def scalar(request, name, default=None):
    tensor = pb.get_input_tensor_by_name(request, name)
    if tensor is None:
        return default
    value = tensor.as_numpy().reshape(-1)[0]
    return value.decode() if isinstance(value, bytes) else value.item()
