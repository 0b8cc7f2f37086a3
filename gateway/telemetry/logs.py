"""Logs: one JSON object a line on standard error."""

import contextlib
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

_encode = msgspec.json.Encoder(enc_hook=str).encode


class JsonLines(logging.Formatter):
    """A record as JSON: time (UTC), level, logger, message, what came as `extra`, an exception's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return _encode(line).decode(errors="replace")


def write(lines: list[bytes]) -> bool:
    """Put lines that are made already among the others: where `configure` sent those, and nowhere before it did."""
    text = b"".join(lines).decode(errors="replace")
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.formatter, JsonLines):
            with handler.lock or contextlib.nullcontext():
                handler.stream.write(text)
                handler.flush()
    return True


def configure(level: int | str = logging.INFO, stream: TextIO | None = None) -> None:
    """Send this process's logs to `stream` (standard error). Call once, at start; a second call replaces the first."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
