"""Traces of requests: when they came and how many tokens they had. Any CSV or JSON-lines file, plain or gzipped.

A column is known by its name, whatever the case: `arrival_s`, `arrival_ms`, `at_s`, `timestamp` and so on for when;
`input_tokens`, `prompt_tokens`, `input_length`, `ContextTokens` and so on for how long the prompt is, and likewise for
the answer; `tenant`, `class`, and `hash_ids` (Mooncake's: equal ids are equal blocks of the prompt) where there are
any.
A file without arrivals is a trace of lengths. The records that `signalbox bench --records` writes are a trace too.
"""

import csv
import datetime
import functools
import gzip
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

DATA = Path(__file__).with_name("data")
SHIPPED = {
    "azure-chat": "azure2023_conv.csv.gz",
    "azure-code": "azure2023_code.csv.gz",
    "sharegpt": "sharegpt_8k_lengths.csv.gz",
    "bwb": "bwb_lengths.csv.gz",
    "mooncake": "mooncake_conversation.csv.gz",
}
"""Traces by name; `bench/data/README.md` says where they are from."""

FIT = 0.6  # of a trace's rows are for tuning, the rest for reporting
BLOCK_TOKENS = 512  # what one of Mooncake's hash ids stands for
LENGTHS_ONLY = -1.0
GRID_S = 1.0  # arrivals that lie on a grid at least this wide are spread over it
GRID_ROWS = 3  # rows by distinct arrivals, from which on they lie on one

Part = Literal["all", "fit", "report"]

_ARRIVAL = ("came_s", "arrival_s", "arrival_ms", "at_s", "arrival", "arrived_at", "timestamp", "time")
_INPUT = (
    "asked_prompt_tokens", "input_tokens", "prompt_tokens", "input_length", "contexttokens", "request_tokens",
    "num_prefill_tokens",
)  # fmt: skip
_OUTPUT = (
    "asked_output_tokens", "output_tokens", "completion_tokens", "output_length", "generatedtokens", "response_tokens",
    "num_decode_tokens",
)  # fmt: skip


class TraceError(Exception):
    """A trace can't be read. Its text names the file, and the line and column where there are such."""


class Row(NamedTuple):
    """One request. `arrival_s` counts from the first row, LENGTHS_ONLY where the trace has none."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    tenant: str = ""
    klass: str = ""
    blocks: tuple[int, ...] = ()


class Trace(Struct, frozen=True, kw_only=True):
    """Rows in the order of their arrival. `grid_s` above 0: they lie on a grid so wide, and `spread` takes them off."""

    name: str
    rows: tuple[Row, ...]
    grid_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        return self.rows[0].arrival_s != LENGTHS_ONLY

    @property
    def span_s(self) -> float:
        """From the first arrival to where the one after the last would be; 0 for lengths only."""
        if not self.timed or len(self.rows) < 2:
            return 0.0
        last = self.rows[-1].arrival_s - self.rows[0].arrival_s + self.grid_s
        return last * len(self.rows) / (len(self.rows) - 1)

    @property
    def rate(self) -> float:
        """Mean requests/s on its own clock; 0 for lengths only."""
        return len(self.rows) / self.span_s if self.span_s else 0.0

    def part(self, which: Part) -> "Trace":
        """The first 60 % to tune on, or the last 40 % to report on: by time, never at random."""
        if which == "all":
            return self
        cut = int(FIT * len(self.rows))
        rows = self.rows[:cut] if which == "fit" else self.rows[cut:]
        if not rows:
            raise TraceError(f"{self.name}: {len(self.rows)} rows are too few for its part {which!r}")
        return replace(self, rows=rows)

    def within(self, context_tokens: int) -> "Trace":
        """Prompts cut so that prompt and answer fit a model's context; answers have half of it at most."""
        most = max(1, context_tokens // 2)

        def cut(row: Row) -> Row:
            output = min(row.output_tokens, most)
            return row._replace(output_tokens=output, input_tokens=min(row.input_tokens, context_tokens - output))

        rows = tuple(cut(row) for row in self.rows)
        changed = sum(new != old for new, old in zip(rows, self.rows, strict=True))
        if not changed:
            return self
        note = f"{changed} of {len(rows)} requests were cut to fit {context_tokens} tokens"
        return replace(self, rows=rows, notes=(*self.notes, note))

    def spread(self, rng: random.Random) -> tuple[Row, ...]:
        """The rows with arrivals that lie on a grid spread over it, evenly at random."""
        if not self.grid_s:
            return self.rows
        rows = [row._replace(arrival_s=row.arrival_s + rng.random() * self.grid_s) for row in self.rows]
        return tuple(sorted(rows, key=lambda row: row.arrival_s))


def read(name: str) -> Trace:
    """A trace by its name in SHIPPED or its file. Raises TraceError."""
    return _read(name, DATA / SHIPPED[name] if name in SHIPPED else Path(name))


@functools.cache
def _read(name: str, file: Path) -> Trace:
    plain = file.name.removesuffix(".gz")
    try:
        with (
            gzip.open(file, "rt", encoding="utf-8", newline="")
            if file.name != plain
            else file.open(encoding="utf-8", newline="") as text
        ):
            lines = _csv(text) if plain.endswith((".csv", ".tsv")) else _json_lines(text, file)
            rows = [_row(file, number, line) for number, line in lines]
    except FileNotFoundError:
        known = ", ".join(SHIPPED)
        raise TraceError(f"there is no trace {name!r}: a CSV or JSON-lines file, or one of {known}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{file}: can't be read: {error}") from None
    kept = [row for row in rows if row.input_tokens > 0]
    if not kept:
        raise TraceError(f"{file}: no request in it has a prompt")
    dropped = (f"{len(rows) - len(kept)} requests without a prompt were left out",) if len(kept) < len(rows) else ()
    if len({row.arrival_s == LENGTHS_ONLY for row in kept}) > 1:
        raise TraceError(f"{file}: some rows have an arrival and some have none")
    kept.sort(key=lambda row: row.arrival_s)
    begin = max(0.0, kept[0].arrival_s) if kept[0].arrival_s != LENGTHS_ONLY else 0.0
    rows = [row._replace(arrival_s=row.arrival_s - begin) for row in kept] if begin else kept
    grid = _grid([row.arrival_s for row in rows])
    said = (f"arrivals lie on a grid of {grid:g} s and are spread over it",) if grid else ()
    return Trace(name=name, rows=tuple(rows), grid_s=grid, notes=(*dropped, *said))


def _csv(text: IO[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    sample = text.readline()
    text.seek(0)
    lines = csv.DictReader(text, delimiter="\t" if "\t" in sample else ",")
    for line in lines:
        yield lines.line_num, {_plain(name): value for name, value in line.items() if name and value not in (None, "")}


def _json_lines(text: IO[str], file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise TraceError(f"{file}:{number}: not a JSON object: {error}") from None
        yield number, {_plain(name): value for name, value in fields.items() if value is not None}


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


def _row(file: Path, number: int, line: Mapping[str, Any]) -> Row:
    where = f"{file}:{number}"
    arrival = next((name for name in _ARRIVAL if name in line), None)
    at_s = LENGTHS_ONLY if arrival is None else _seconds(where, arrival, line)
    blocks = line.get("hash_ids", ())
    if not isinstance(blocks, (list, tuple)) or not all(isinstance(one, int) for one in blocks):
        raise TraceError(f"{where}: hash_ids must be a list of whole numbers")
    tenant, klass = (str(line.get(name, "")) for name in ("tenant", "class"))
    output = max(1, _tokens(where, _OUTPUT, line))
    return Row(at_s, _tokens(where, _INPUT, line), output, tenant, klass, tuple(blocks))


def _tokens(where: str, names: Sequence[str], line: Mapping[str, Any]) -> int:
    name = next((name for name in names if name in line), None)
    if name is None:
        raise TraceError(f"{where}: there is no {names[1]} (nor {', '.join(names[2:])})")
    try:
        tokens = int(float(line[name]))
    except (TypeError, ValueError, OverflowError):
        raise TraceError(f"{where}: {name} must be a number of tokens, not {line[name]!r}") from None
    if not 0 <= tokens < 1 << 31:
        raise TraceError(f"{where}: {name} must be a number of tokens, not {line[name]!r}")
    return tokens


def _seconds(where: str, name: str, line: Mapping[str, Any]) -> float:
    """Mooncake's `timestamp` is in milliseconds, BurstGPT's in seconds; Azure's is a date."""
    value = line[name]
    try:
        at = float(value)
    except (TypeError, ValueError):
        try:
            return datetime.datetime.fromisoformat(str(value)).replace(tzinfo=datetime.UTC).timestamp()
        except ValueError:
            raise TraceError(f"{where}: {name} must be a number or a date, not {value!r}") from None
    if not 0 <= at < 1e15:
        raise TraceError(f"{where}: {name} must be 0 or more, not {value!r}")
    in_ms = name == "arrival_ms" or (name == "timestamp" and "input_length" in line)
    return at / 1000 if in_ms else at


def _grid(times: Sequence[float]) -> float:
    """The width of the grid that arrivals lie on, 0 where they lie on none."""
    distinct = sorted(set(times))
    if len(distinct) < 3 or len(times) < GRID_ROWS * len(distinct):
        return 0.0
    width = min(after - before for before, after in itertools.pairwise(distinct))
    return round(width, 2) if width >= GRID_S else 0.0
