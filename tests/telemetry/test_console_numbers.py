"""What the console's numbers are made of: the slate, the rolls, the window."""

import math
import multiprocessing
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry import live
from gateway.telemetry.live import MOST_LINES, MOST_ROWS, Line, Live, Roll
from gateway.telemetry.metrics_sheet import Board, new_file
from gateway.telemetry.metrics_table import BY_NAME, PER_TOKEN_S, Kind
from gateway.telemetry.slate import ROOM, SLOT, STALE_S, Slate
from gateway.telemetry.snapshot import FAMILIES, MOST_TENANTS, Names, Snapshot, snapshot
from gateway.telemetry.window import Numbers, Window, quantile
from policies.lifecycle import State
from tests.support.watched import watched

NAMES = Names("1", ["standard"], {"m": ["one"]})


def numbers(**series: dict[tuple[str, ...], list[float]]) -> Numbers:
    return Numbers(dict(series))


# the slate


def test_what_one_writes_the_others_read_until_it_is_old() -> None:
    fd = new_file(SLOT * 3)
    slates = [Slate(fd, place, 3) for place in range(3)]
    assert slates[0].read(100.0) == []
    slates[1].write(b"one", 100.0)
    slates[2].write(b"two" * 1000, 101.0)
    assert slates[0].read(102.0) == [b"one", b"two" * 1000]
    assert slates[0].read(100.0 + STALE_S + 0.5) == [b"two" * 1000]
    slates[1].write(b"", 106.0)
    assert slates[0].read(106.0) == [b"", b"two" * 1000]


def test_it_is_known_to_all_that_somebody_watches_one() -> None:
    fd = new_file(SLOT * 2)
    first, second = Slate(fd, 0, 2), Slate(fd, 1, 2)
    assert not first.watched(1.0)
    second.watch(10.0)
    assert (first.watched(9.9), first.watched(10.0)) == (True, False)
    Slate(fd, 1, 2)  # the next process in its place has no viewers yet
    assert not first.watched(9.0)


def test_a_text_that_has_no_room_is_an_error() -> None:
    slate = Slate()
    slate.write(b"x" * ROOM, 1.0)
    with pytest.raises(ValueError, match="do not go into"):
        slate.write(b"x" * (ROOM + 1), 2.0)
    assert slate.read(1.0) == [b"x" * ROOM]


def test_half_a_text_is_never_read() -> None:
    fd = new_file(SLOT)
    writer, reader = Slate(fd), Slate(fd)
    texts = [bytes([65 + nth]) * (1 + 9_000 * nth) for nth in range(7)]

    def write() -> None:
        for _ in range(200):
            for text in texts:
                writer.write(text, 1.0)
                time.sleep(0.0001)

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    seen: set[bytes] = set()
    while process.is_alive():
        seen.update(reader.read(1.0))
    process.join()
    seen.update(reader.read(1.0))
    assert process.exitcode == 0
    assert {texts[-1]} <= seen <= set(texts)


def test_a_board_has_the_slate_of_its_place() -> None:
    board = Board((new_file(), new_file()), 1, new_file(SLOT * 2))
    board.slate.write(b"here", 1.0)
    assert board.slate.read(1.0) == [b"here"]


# rolls


async def test_a_roll_is_cut_to_what_goes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched() as one:
        there = one.site.trunk
        members = there.ticker.members()
        crowd = SimpleNamespace(members=lambda: members * 60)
        trunk: Any = SimpleNamespace(ticker=crowd, pools=there.pools, by_rank=there.by_rank)
        roll = live.decode(live.roll(trunk, 1.0))
        assert len(roll.rows) == MOST_ROWS
        assert roll.lines == [Line(0, 1, "bob", 180)]
        monkeypatch.setattr(members[0].exchange, "request_id", "x" * (ROOM // 10))
        assert 0 < len(live.decode(live.roll(trunk, 1.0)).rows) < MOST_ROWS
        monkeypatch.setattr(members[0].exchange, "request_id", "x" * ROOM)
        assert live.decode(live.roll(trunk, 1.0)) == Roll([], [])


def test_lines_beyond_the_longest_are_added_up() -> None:
    class Waiting:
        state = State.QUEUED

        def __init__(self, tenant: str) -> None:
            named = SimpleNamespace
            self.job = named(pool=named(model="m"), service=named(name="standard"), tenant=named(name=tenant))

    places: Any = SimpleNamespace(pools={"m": 0}, services={"standard": 0})
    many: Any = [Waiting("most")] * 5 + [Waiting(f"t{nth}") for nth in range(MOST_LINES + 9)]
    lines = live._lines(many, places)
    assert lines[0] == Line(0, 0, "most", 5)
    assert lines[-1] == Line(0, 0, "", 10)
    assert sum(line.waiting for line in lines) == len(many)


# the window


@given(
    st.lists(st.integers(0, 50), min_size=len(PER_TOKEN_S) + 1, max_size=len(PER_TOKEN_S) + 1).filter(any),
    st.floats(0.01, 1.0),
)
def test_a_quantile_lies_in_the_bucket_of_its_rank(counts: list[int], part: float) -> None:
    found = quantile(PER_TOKEN_S, [float(count) for count in counts], part)
    values = [bound for bound, count in zip((*PER_TOKEN_S, math.inf), counts, strict=True) for _ in range(count)]
    bound = values[max(0, math.ceil(part * len(values)) - 1)]
    lower = {high: low for low, high in pairwise((0.0, *PER_TOKEN_S))}
    if math.isinf(bound):
        assert found == PER_TOKEN_S[-1]
    else:
        assert lower[bound] <= found <= bound * (1 + 1e-9) or math.isclose(found, lower[bound])


def test_a_window_begins_where_it_still_reaches() -> None:
    window, key = Window(10.0), ("m", "standard", "ok")
    first = window.add(100.0, numbers(signalbox_requests={key: [5.0]}))
    assert (first.rate("signalbox_requests"), first.rates("signalbox_requests", -1)) == (None, {})
    later = window.add(104.0, numbers(signalbox_requests={key: [13.0], ("m", "standard", "expired"): [2.0]}))
    assert later.rates("signalbox_requests", -1) == {"ok": 2.0, "expired": 0.5}
    assert window.add(111.0, numbers(signalbox_requests={key: [27.0]})).rate("signalbox_requests") == (27 - 15) / 7
    assert window.add(300.0, numbers()).first is None


# the whole


def test_every_metric_it_reads_is_one() -> None:
    assert BY_NAME.keys() >= FAMILIES


def test_what_is_not_known_is_not_made_up() -> None:
    seen = snapshot(NAMES, Window(10.0).add(1.0, numbers()), [], 1.0, 0.0)
    (backend,), (service,) = seen.pools[0].backends, seen.pools[0].services
    assert (backend.open, backend.leases, backend.kv, backend.engine_running) == (None,) * 4
    assert (service.waiting, service.ttft, seen.gateways, seen.rates.ok) == (None,) * 4
    assert (seen.store_up, seen.workers, seen.requests) == (False, 0.0, [])


def test_rolls_of_all_processes_are_one_list_oldest_first() -> None:
    def row(name: str, at: float) -> Live:
        return Live(name, "t", 0, 0, -1, State.QUEUED, True, 1, 0, 0, ("validate", "queue"), (at, at + 0.5))

    unread = Live("", "", -1, -1, -1, State.RECEIVED, False, 0, 0, 0, ("validate",), (3.0,))
    rolls = [Roll([row("b", 2.0), unread], [Line(0, 0, "t", 2)]), Roll([row("a", 1.0)], [Line(0, 0, "t", 1)])]
    seen = snapshot(NAMES, Window(10.0).add(4.0, numbers()), rolls, 4.0, 0.0)
    assert [(one.id, one.model, one.total_ms) for one in seen.requests] == [
        ("a", "m", 3000.0), ("b", "m", 2000.0), ("", "", 1000.0),
    ]  # fmt: skip
    assert [(phase.name, phase.ms) for phase in seen.requests[0].phases] == [("validate", 500.0), ("queue", 2500.0)]
    assert [(one.name, one.waiting) for one in seen.tenants] == [("t", {"standard": 3})]


def test_of_many_tenants_those_that_wait_come_first() -> None:
    requests: dict[tuple[str, ...], list[float]] = {(f"t{nth}", "done"): [1.0] for nth in range(100)}
    rolls = [Roll([], [Line(0, 0, "t99", 7), Line(0, 0, "", 2)])]
    seen = snapshot(NAMES, Window(10.0).add(1.0, numbers(signalbox_tenant_requests=requests)), rolls, 1.0, 0.0)
    assert [one.name for one in seen.tenants[:2]] == ["t99", "other"]
    assert len(seen.tenants) == MOST_TENANTS
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Snapshot) == seen


def test_counters_it_adds_up_have_one_cell() -> None:
    for name in ("signalbox_requests", "signalbox_tenant_requests", "signalbox_tenant_tokens"):
        assert BY_NAME[name].kind is Kind.COUNTER
