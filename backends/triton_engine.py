"""A connected Triton server that runs one model of TensorRT-LLM."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from backends.ask import Ask
from backends.bundle import Bundle
from backends.openai_probe import Site
from backends.protocol import BackendBusy, BackendError, BackendLost, Gauge, Plan, Prompt, Refused, Stream
from backends.scribe import Scribe, ready_stream
from backends.triton_dialect import Speech
from backends.triton_faults import of_status, of_text
from backends.triton_link import Link, Metadata
from backends.triton_metrics import Page
from backends.triton_stream import STOP_S, Engine, Patience, Stops, TritonStream

log = logging.getLogger(__name__)

READY_S = 3.0
"""How long the server may take to say whether a model is loaded."""

CANARY_S = 10.0
"""How long a one-token request may take before it counts as a sign that the engine is dead."""

ID_CHARS = 64


class Canary:
    """Asks the engine for one token when nothing was heard from it for `every_s` seconds; 0 never does.

    A Python model whose process died is ready for ever by Triton's account, and its streams end never.
    """

    def __init__(self, link: Link, make: Callable[[str], Any], every_s: float) -> None:
        self._link, self._make, self._every_s = link, make, every_s
        self._task: asyncio.Task[None] | None = None
        self.heard_at = asyncio.get_running_loop().time()
        self.trouble: Exception | None = None

    def look(self) -> None:
        """Start one where it is time, and raise what the last one found."""
        at = asyncio.get_running_loop().time()
        if self.trouble is not None:
            raise self.trouble
        if self._every_s and self._task is None and at - self.heard_at >= self._every_s:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def ask(self) -> None:
        """Returns once the engine has answered. Raises BackendLost where it does not, BackendError where it fails."""
        call: Any = None
        answered = False
        try:
            async with asyncio.timeout(CANARY_S):
                call = self._link.stream(self._make(f"canary-{secrets.token_hex(8)}"))
                while (message := await call.read()) is not grpc.aio.EOF:
                    if message.error_message:
                        raise of_text(message.error_message)
                    answered = True
        except TimeoutError:
            raise BackendLost(f"the engine did not answer a one-token request within {CANARY_S:.0f} s") from None
        except grpc.RpcError as error:
            raise of_status(error) from error
        finally:
            if call is not None and not call.done():
                call.cancel()
        if not answered:
            raise BackendLost("the canary's stream ended without an answer")
        self.heard_at = asyncio.get_running_loop().time()

    async def aclose(self) -> None:
        """Forget the one that is on its way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _run(self) -> None:
        began_at = asyncio.get_running_loop().time()
        try:
            await self.ask()
        except BackendBusy:
            self.heard_at = asyncio.get_running_loop().time()  # full is alive
        except (BackendLost, BackendError, Refused) as error:
            if self.heard_at < began_at:  # else it only had no time for the canary
                self.trouble = BackendLost(f"the canary found: {error}")
        finally:
            self._task = None


class TritonEngine:
    """One engine behind Triton. One event loop; requests share one channel, each with a stream of its own."""

    def __init__(
        self, name: str, bundle: Bundle, link: Link, scribe: Scribe, speech: Speech, patience: Patience
    ) -> None:
        self.name, self.bundle = name, bundle
        self._link, self._scribe, self._speech = link, scribe, speech
        self._streams: set[TritonStream] = set()
        layout = speech.layout
        self._stops = Stops(link, speech.stop if layout.stops else None, behind=layout.entry is not layout.engine)
        self.canary = Canary(link, speech.canary, 0.0)
        self.metrics: Site | None = None
        self._muted = False  # the metrics page failed, and that was said
        self._fingerprint = f"{bundle.engine}-{bundle.engine_version}" if bundle.engine_version else bundle.engine
        self._shared = Engine(patience, self._stops, self._heard, self._streams.discard)

    def __repr__(self) -> str:
        layout = self._speech.layout
        return (
            f"<TritonEngine {self.name}: {layout.entry.name} as {layout.dialect.value}, {len(self._streams)} running>"
        )

    def watch(self, canary_s: float, metrics: Site | None) -> None:
        """What a gauge looks at: the engine after so long a silence, and the metrics page."""
        self.canary = Canary(self._link, self._speech.canary, canary_s)
        self.metrics = metrics

    async def plan(self, prompt: Prompt) -> Plan:
        return await self._scribe.plan(prompt)

    async def open(self, plan: Plan) -> Stream:
        ask = plan.work
        if plan.maker != self.name or not isinstance(ask, Ask):
            raise TypeError(f"{self.name} did not make this plan, or it was closed")
        if ask.ready is not None:
            return ready_stream(ask)
        request_id = f"{plan.prompt.request_id[:ID_CHARS] or self.name}.{secrets.token_hex(8)}"
        try:
            request = self._speech.request(ask, request_id)
        except ValueError as error:
            raise Refused(400, "invalid_request", f"a value that the model's inputs can't hold: {error}") from error
        answer = self._scribe.answer(plan, request_id, self._fingerprint)
        call = self._link.stream(request, _plain(plan.prompt.headers + plan.prompt.trace))
        stream = TritonStream(request_id, call, answer, self._speech.listener(ask, answer), self._shared)
        self._streams.add(stream)
        return stream

    async def gauge(self) -> Gauge:
        self.canary.look()
        name = self._speech.layout.entry.name
        if not await self._link.model_ready(name, READY_S):
            raise BackendLost(f"the Triton model {name!r} is not loaded any more")
        return (await self._page()).gauge() if self.metrics is not None else Gauge()

    async def aclose(self) -> None:
        streams = list(self._streams)
        stopping = [task for stream in streams if (task := stream.abandon("the backend was closed")) is not None]
        if stopping:
            await asyncio.wait(stopping, timeout=STOP_S)
        await self.canary.aclose()
        await self._stops.aclose()
        await self._link.aclose()
        if self.metrics is not None:
            self.metrics.pool.close()

    def _heard(self) -> None:
        self.canary.heard_at = asyncio.get_running_loop().time()

    async def _page(self) -> Page:
        """The metrics, empty where they can't be read: that is told once, and no reason to call the engine lost."""
        assert self.metrics is not None
        layout = self._speech.layout
        try:
            page = await self.metrics.get("" if self.metrics.pool.origin.prefix else "/metrics")
            text = page.body if page.status == 200 else b""
            trouble = "" if page.status == 200 else f"it answers {page.status}"
        except (BackendLost, BackendError, BackendBusy) as error:
            text, trouble = b"", str(error)
        if trouble and not self._muted:
            log.warning("the metrics page of %s can't be read (%s): its load is our own count", self.name, trouble)
        self._muted = bool(trouble)
        return Page(text, layout.engine.name, layout.entry.name)


def _plain(pairs: Metadata) -> Metadata:
    """Those that gRPC can carry."""
    return tuple(pair for pair in pairs if pair[1].isascii() and pair[1].isprintable())
