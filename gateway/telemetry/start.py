"""Puts telemetry together, as the configuration says."""

import asyncio

from gateway.config import Config, ConfigError
from gateway.telemetry import logs, otlp
from gateway.telemetry.access import AccessLog
from gateway.telemetry.context import Sampler
from gateway.telemetry.outbox import Outbox
from gateway.telemetry.spans import Spans
from gateway.telemetry.traces import Tracer
from gateway.telemetry.watcher import Watchers

LINES_PERIOD_S = 0.1
LINES_MOST_BYTES = 8 * 1024 * 1024
LINES_BATCH_BYTES = 64 * 1024


def check_telemetry(config: Config) -> None:
    """What the section asks for can be had here. Raises ConfigError."""
    try:
        otlp.check(config.telemetry)
    except ValueError as error:
        field, _, message = str(error).partition(": ")
        raise ConfigError(f"$.telemetry.{field}", message) from None


class Telemetry:
    """What runs beside the requests of one process. Made anywhere; `start` and `aclose` belong to the event loop.

    Raises ConfigError. `sampler` is None where nothing is traced.
    """

    def __init__(self, config: Config) -> None:
        check_telemetry(config)
        self._config = config
        self._outboxes: list[Outbox] = []
        self._sender: otlp.Sender | None = None
        self.sampler = Sampler(config.telemetry.trace_ratio) if config.telemetry.otlp_url else None

    def __repr__(self) -> str:
        return f"<Telemetry {self._outboxes}>"

    def start(self, watchers: Watchers) -> None:
        settings = self._config.telemetry
        if settings.access_log != "off":
            lines = Outbox("access log", logs.write, LINES_PERIOD_S, LINES_MOST_BYTES, LINES_BATCH_BYTES)
            self._outboxes.append(lines)
            watchers.add(AccessLog(settings.access_log, settings.log_prompts, lines))
        if (to := settings.collector) is not None:
            sender = otlp.Sender(otlp.wire(settings, to), otlp.resource(settings), settings.otlp_url)
            spans = Outbox("traces", sender, otlp.PERIOD_S, otlp.MOST_BYTES, otlp.BATCH_BYTES)
            self._outboxes.append(spans)
            self._sender = sender
            scheme = "https" if self._config.server.tls_cert_file else "http"
            watchers.add(Tracer(frozenset(settings.keep), settings.keep_per_s, Spans(scheme), spans))

    async def aclose(self) -> None:
        """Deliver what waits, for a short time."""
        await asyncio.gather(*(outbox.aclose() for outbox in self._outboxes))
        if self._sender is not None:
            self._sender.close()
