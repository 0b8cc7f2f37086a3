"""Traces of any form are read alike, and a seed makes the same arrivals of them at every load."""

import gzip
import itertools
import math
import random
import statistics
from pathlib import Path

import pytest

from bench import traces
from bench.arrivals import Source, own_rate, planned, trace_of
from bench.traces import LENGTHS_ONLY, Row, TraceError
from policies.types import Objective

FORMS = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,374,44\n"
    "2023-11-16 18:15:48.0,396,109\n",
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens\n5,m,374,44\n6.5,m,396,109\n",
    "plain.tsv": "arrival_ms\tinput_tokens\toutput_tokens\n0\t374\t44\n1500\t396\t109\n",
    "mooncake.jsonl": '{"timestamp":0,"input_length":374,"output_length":44}\n'
    '{"timestamp":1500,"input_length":396,"output_length":109}\n',
    "records.jsonl": '{"number":1,"at_s":2.5,"prompt_tokens":396,"output_tokens":109}\n'
    '{"number":0,"at_s":1.0,"prompt_tokens":374,"output_tokens":44}\n',
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_the_same_trace(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(FORMS[name])
    assert traces.read(str(file)).rows == (Row(0.0, 374, 44), Row(1.5, 396, 109))
    packed = tmp_path / f"packed-{name}.gz"
    packed.write_bytes(gzip.compress(FORMS[name].encode()))
    assert traces.read(str(packed)).rows == traces.read(str(file)).rows


def test_tenants_classes_and_blocks_come_along(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(
        '{"arrival_s":0,"input_tokens":9,"output_tokens":0,"tenant":"a","class":"batch","hash_ids":[3,4]}\n'
    )
    assert traces.read(str(file)).rows == (Row(0.0, 9, 1, "a", "batch", (3, 4)),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arrival_s,output_tokens\n1,2\n", r":2: there is no input_tokens"),
        ("input_tokens,output_tokens\nmany,2\n", r":2: input_tokens must be a number of tokens, not 'many'"),
        ("input_tokens,output_tokens\n1,-2\n", r":2: output_tokens must be a number of tokens, not '-2'"),
        ("input_tokens,output_tokens\n1,nan\n", r":2: output_tokens must be a number"),
        ("arrival_s,input_tokens,output_tokens\nsoon,1,2\n", r":2: arrival_s must be a number or a date"),
        ("arrival_s,input_tokens,output_tokens\n1,1,2\n,1,2\n", "some rows have an arrival and some have none"),
        ("input_tokens,output_tokens\n0,2\n", "no request in it has a prompt"),
        ("", "no request in it has a prompt"),
    ],
)
def test_what_is_no_trace_is_named(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(TraceError, match=says):
        traces.read(str(file))


def test_a_file_that_is_not_there_names_what_is() -> None:
    with pytest.raises(TraceError, match=r"there is no trace 'azure': a CSV .* azure-chat"):
        traces.read("azure")


def test_shipped_traces_are_what_their_page_says() -> None:
    chat = traces.read("azure-chat")
    assert len(chat.rows) == 19_366
    assert chat.rate == pytest.approx(5.53, rel=0.01)
    assert statistics.fmean(row.input_tokens for row in chat.rows) == pytest.approx(1155, rel=0.01)
    assert len(chat.part("fit").rows) + len(chat.part("report").rows) == len(chat.rows)
    assert traces.read("sharegpt").rows[0].arrival_s == LENGTHS_ONLY
    assert traces.read("mooncake").grid_s == pytest.approx(3.0, abs=0.01)


def test_arrivals_on_a_grid_are_spread_over_it() -> None:
    trace = traces.read("mooncake")
    rows = trace.spread(random.Random(1))
    assert len({row.arrival_s for row in rows}) == len(rows)
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)


def test_prompts_are_cut_to_the_context_and_it_is_said() -> None:
    cut = traces.read("azure-chat").within(2048)
    assert max(row.input_tokens + row.output_tokens for row in cut.rows) <= 2048
    assert "were cut to fit 2048 tokens" in cut.notes[-1]


def chat(**more: object) -> Source:
    return Source(name="chat", trace="azure-chat", **more)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_requests_at_every_load() -> None:
    slow, fast = (planned([chat()], rate, 200, 7) for rate in (1.0, 4.0))
    assert [one[2:] for one in slow] == [one[2:] for one in fast]
    assert [one.at_s for one in slow] == pytest.approx([4 * one.at_s for one in fast])
    assert planned([chat()], 1.0, 200, 8) != slow


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    found = planned([chat(cv=cv)], 5.0, 20_000, 1)
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(found)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.08)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_own_clocks_keep_the_traces_own_order_and_bursts() -> None:
    source = Source(name="code", trace="azure-code", cv=0)
    found = planned([source], own_rate([source]), 8_819, 3)
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(found)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(13.2, rel=0.1)
    assert len(found) == pytest.approx(8_819, abs=2)


def test_lengths_without_a_clock_need_a_variation() -> None:
    with pytest.raises(TraceError, match="lengths only: give --cv"):
        trace_of(Source(name="s", trace="sharegpt", cv=0))


def test_shares_of_sources_tenants_classes_and_leavers() -> None:
    one = chat(share=3.0, tenants={"a": 1, "b": 3}, classes={"x": 1.0}, leave=0.2, objective=Objective(1000, 50))
    two = Source(name="code", trace="azure-code")
    found = planned([one, two], 10.0, 8_000, 1)
    mine = [each for each in found if each.source == "chat"]
    assert len(mine) / len(found) == pytest.approx(0.75, abs=0.03)
    assert sum(each.tenant == "b" for each in mine) / len(mine) == pytest.approx(0.75, abs=0.03)
    assert {each.klass for each in mine} == {"x"}
    leavers = [each for each in found if each.leave_s < math.inf]
    assert len(leavers) / len(mine) == pytest.approx(0.2, abs=0.03)
    assert {each.source for each in leavers} == {"chat"}
    assert all(each.leave_s <= 1 + each.output_tokens * 0.05 / 2 for each in leavers)
    assert [each.number for each in found] == list(range(len(found)))


def test_two_sources_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        planned([chat(), chat()], 1.0, 10, 1)
