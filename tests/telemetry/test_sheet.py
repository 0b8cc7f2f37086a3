"""The memory that processes count in together."""

import math
import multiprocessing
import os

import msgspec
import pytest

from gateway.telemetry.metrics_sheet import SIZE, STALE_S, Board, Sheet, new_file
from gateway.telemetry.metrics_table import BY_NAME, FAMILIES, Family, Kind, exposed

REQUESTS, UP, TURNS = (BY_NAME[name] for name in ("signalbox_requests", "signalbox_store_up", "signalbox_turn_seconds"))


def found(board: Board, at: float = 0.0) -> list[tuple[str, tuple[str, ...], list[float]]]:
    return [tuple(row) for row in board.rows(at)]  # type: ignore[misc]


def test_a_series_is_made_once_and_read_as_it_was_written() -> None:
    board = Board()
    for _ in range(3):
        board.own.series(REQUESTS, "m", "standard", "ok")[0] += 1
    board.own.series(REQUESTS, "m", 'a "class"\n', "ok")[0] += 5
    histogram = board.own.series(TURNS)
    histogram[0] += 2
    histogram[-1] += 0.5
    assert found(board) == [
        ("signalbox_requests", ("m", "standard", "ok"), [3.0]),
        ("signalbox_requests", ("m", 'a "class"\n', "ok"), [5.0]),
        ("signalbox_turn_seconds", (), [2.0, *[0.0] * len(TURNS.buckets), 0.5]),
    ]


def test_labels_that_a_family_does_not_have_are_an_error() -> None:
    with pytest.raises(ValueError, match="signalbox_requests has the labels"):
        Sheet().series(REQUESTS, "m")


def test_who_takes_a_place_over_goes_on_counting_but_says_anew_how_it_is() -> None:
    fd = new_file()
    first = Sheet(fd)
    first.series(REQUESTS, "m", "c", "ok")[0] += 7
    first.series(UP)[0] = 1
    first.beat(100.0)
    board = Board((fd,), 0)
    board.own.beat(101.0)
    assert found(board, 101.0) == [("signalbox_requests", ("m", "c", "ok"), [7.0])]
    board.own.series(REQUESTS, "m", "c", "ok")[0] += 1
    board.own.series(UP)[0] = 0
    assert found(board, 101.0) == [
        ("signalbox_requests", ("m", "c", "ok"), [8.0]),
        ("signalbox_store_up", (), [0.0]),
    ]


def test_the_gauges_of_the_dead_are_not_told_but_their_counts_are() -> None:
    board = Board()
    board.own.series(REQUESTS, "m", "c", "ok")[0] += 1
    board.own.series(UP)[0] = 1
    board.own.beat(50.0)
    assert [row[0] for row in found(board, 50.0 + STALE_S / 2)] == ["signalbox_requests", "signalbox_store_up"]
    assert board.alive(50.0 + STALE_S / 2) == 1
    assert [row[0] for row in found(board, 50.0 + STALE_S)] == ["signalbox_requests"]
    assert board.alive(50.0 + STALE_S) == 0


def _count(fd: int, times: int) -> None:
    cells = Sheet(fd).series(REQUESTS, "m", "c", "ok")
    for _ in range(times):
        cells[0] += 1
    os._exit(9)  # without any clean-up


def test_another_process_reads_what_a_killed_one_had_counted() -> None:
    fds = (new_file(), new_file())
    context = multiprocessing.get_context("fork")
    for fd in fds:
        process = context.Process(target=_count, args=(fd, 1000))
        process.start()
        process.join(10)
        assert process.exitcode == 9
    assert found(Board(fds, 1)) == [("signalbox_requests", ("m", "c", "ok"), [1000.0])] * 2


def test_a_full_sheet_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    sheet = Sheet(size=4096)
    for nth in range(100):
        sheet.series(REQUESTS, f"model-{nth}", "c", "ok")[0] += 1
    told = [*sheet.rows()]
    assert 0 < len(told) < 100
    assert all(row.values == [1.0] for row in told)
    assert sheet.unrecorded == 100 - len(told)
    assert len(caplog.records) == 1


def test_what_another_version_counts_is_passed_over() -> None:
    fd = new_file()
    other = Sheet(fd)
    other.series(Family("signalbox_of_the_future", "What is to come."))[0] = 1
    other.series(msgspec.structs.replace(TURNS, buckets=(1.0, 2.0)))[0] = 5
    other.series(REQUESTS, "m", "c", "ok")[0] = 3
    board = Board((fd,), 0)
    board.own.series(TURNS)[0] += 2
    assert found(board) == [
        ("signalbox_requests", ("m", "c", "ok"), [3.0]),
        ("signalbox_turn_seconds", (), [2.0, *[0.0] * (len(TURNS.buckets) + 1)]),
    ]


def test_memory_that_is_not_used_is_not_taken() -> None:
    fd = new_file()
    sheet = Sheet(fd)
    sheet.series(REQUESTS, "m", "c", "ok")[0] += 1
    assert os.fstat(fd).st_size == SIZE
    assert os.fstat(fd).st_blocks * 512 < SIZE / 8
    os.close(fd)


def test_where_there_is_no_memory_without_a_name_a_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fd = new_file()
    Sheet(fd).series(REQUESTS, "m", "c", "ok")[0] += 4
    assert found(Board((fd,), 0)) == [("signalbox_requests", ("m", "c", "ok"), [4.0])]


def test_the_table_keeps_to_the_conventions_of_names() -> None:
    assert len(BY_NAME) == len(FAMILIES)
    assert len(exposed()) == sum({Kind.HISTOGRAM: 3}.get(family.kind, 1) for family in FAMILIES)
    for family in FAMILIES:
        assert family.name.startswith(("signalbox_", "gen_ai_"))
        assert not family.name.endswith(("_total", "_ms", "_milliseconds", "_count", "_sum", "_bucket"))
        assert family.help.endswith(".") or "; " in family.help
        assert bool(family.buckets) is (family.kind is Kind.HISTOGRAM)
        assert list(family.buckets) == sorted(set(family.buckets))
        assert all(math.isfinite(bound) for bound in family.buckets)
