"""The bytes and decisions of tracing, held against OpenTelemetry's own classes."""

import itertools
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, url_attributes
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from backends.protocol import Usage
from gateway.telemetry import spans
from gateway.telemetry.context import MOST_STATE_BYTES, Sampler
from gateway.telemetry.protobuf import (
    attribute,
    block,
    real_attribute,
    tag,
    text_attribute,
    varint,
    whole_attribute,
)
from gateway.telemetry.traces import Budget, late
from tests.support.collector import plain

VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CONVENTIONS = (gen_ai_attributes, http_attributes, url_attributes, error_attributes)


def decoded(data: bytes) -> object:
    """The value of the one attribute in the bytes of a span."""
    (value,) = plain(Span.FromString(data).attributes).values()
    return value


@given(st.integers(0, 2**63 - 1))
def test_numbers_are_what_protobuf_reads(n: int) -> None:
    assert decoded(whole_attribute(9, "some.name")(n)) == n
    assert decoded(attribute(9, "some.name", n)) == n
    assert Span.FromString(tag(10, 0) + varint(n & 0xFFFF_FFFF)).dropped_attributes_count == n & 0xFFFF_FFFF


@given(st.text(max_size=300))
def test_texts_are_what_protobuf_reads(text: str) -> None:
    sound = text.encode(errors="replace").decode()
    assert decoded(text_attribute(9, "some.name")(text)) == sound
    assert decoded(attribute(9, "some.name", text)) == sound


@given(st.floats(allow_nan=False), st.booleans(), st.integers(-(2**63), -1))
def test_other_values_are_what_protobuf_reads(x: float, flag: bool, below: int) -> None:
    assert decoded(real_attribute(9, "some.name")(x)) == x
    assert decoded(attribute(9, "some.name", x)) == x
    assert decoded(attribute(9, "some.name", flag)) is flag
    assert decoded(attribute(9, "some.name", below)) == below


def test_a_block_of_any_length() -> None:
    for size in (0, 1, 127, 128, 16_383, 16_384, 3_000_000):
        (found,) = ScopeSpans.FromString(block(2, block(5, b"x" * size))).spans
        assert len(found.name) == size


def test_a_name_that_would_need_a_longer_length_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        whole_attribute(9, "n" * 120)


def test_names_are_those_of_the_semantic_conventions() -> None:
    """Every attribute that is not ours is one of theirs, and none has another name by now."""
    written = set(re.findall(r'"((?:gen_ai|http|url|error)\.[a-z_.]+)"', Path(spans.__file__).read_text()))
    theirs = {
        value: (module, name)
        for module in CONVENTIONS
        for name, value in vars(module).items()
        if isinstance(value, str) and name.isupper()
    }
    assert len(written) > 12
    assert written <= theirs.keys()
    assert not [name for name in written if re.search("Replaced by|Removed", said_of(*theirs[name]))]
    operations = {one.value for one in gen_ai_attributes.GenAiOperationNameValues}
    assert set(spans.OPERATIONS.values()) - {"tokenize"} <= operations


def said_of(module: ModuleType, name: str) -> str:
    """What stands under a constant."""
    return Path(str(module.__file__)).read_text().split(f"\n{name}: Final")[1].split(": Final")[0]


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_the_decision_is_that_of_the_sdks_sampler(ratio: float) -> None:
    ours, theirs = Sampler(ratio), ParentBased(TraceIdRatioBased(ratio))
    propagator = TraceContextTextMapPropagator()
    kept = 0
    for nth in range(2_000):
        context = ours.begin({})
        again = theirs.should_sample(None, int(context.trace_id, 16), "name")
        assert context.sampled is (again.decision is Decision.RECORD_AND_SAMPLE)
        kept += context.sampled
        parent = f"00-{context.trace_id}-{context.span_id}-{nth % 4:02x}"
        with_parent = propagator.extract({"traceparent": parent})
        again = theirs.should_sample(with_parent, int(context.trace_id, 16), "name")
        assert ours.begin({b"traceparent": parent.encode()}).sampled is (again.decision is Decision.RECORD_AND_SAMPLE)
    assert abs(kept - ratio * 2_000) < 200


@given(st.one_of(st.binary(max_size=80), st.from_regex(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")))
def test_a_trace_context_is_read_as_the_api_reads_it(header: bytes) -> None:
    ours = Sampler(0.0).begin({b"traceparent": header.strip()})
    carried = {"traceparent": header.strip().decode("latin-1")}
    theirs = trace.get_current_span(TraceContextTextMapPropagator().extract(carried)).get_span_context()
    assert bool(ours.parent_id) is theirs.is_valid
    if theirs.is_valid:
        assert (int(ours.trace_id, 16), int(ours.parent_id, 16)) == (theirs.trace_id, theirs.span_id)
        assert ours.sampled is theirs.trace_flags.sampled


def test_what_goes_on_is_our_span_in_the_same_trace() -> None:
    ours = Sampler(0.0).begin({b"traceparent": VALID.encode(), b"tracestate": b"a=1,b=2"})
    assert ours.headers() == (
        ("traceparent", f"00-0af7651916cd43dd8448eb211c80319c-{ours.span_id}-01"),
        ("tracestate", "a=1,b=2"),
    )
    assert ours.span_id != ours.parent_id == "b7ad6b7169203331"


@pytest.mark.parametrize("state", [b"\xff=1", b"a=1\r\nx: y", b"a=" + b"1" * MOST_STATE_BYTES, b""])
def test_a_state_that_cannot_go_on_is_dropped(state: bytes) -> None:
    assert len(Sampler(0.0).begin({b"traceparent": VALID.encode(), b"tracestate": state}).headers()) == 1


def test_a_state_without_a_parent_means_nothing() -> None:
    assert len(Sampler(1.0).begin({b"tracestate": b"a=1"}).headers()) == 1


def test_ids_are_never_the_same() -> None:
    made = [Sampler(1.0).begin({}) for _ in range(1_000)]
    assert len({one.trace_id for one in made}) == len({one.span_id for one in made}) == 1_000
    assert all(len(one.trace_id) == 32 and len(one.span_id) == 16 for one in made)


def test_a_budget_lets_so_many_a_second_through() -> None:
    budget = Budget(5.0)
    took = [budget.take(100.0 + nth / 1000) for nth in itertools.chain(range(10), range(1_000, 1_100))]
    assert sum(took[:10]) == 5
    assert 5 <= sum(took[10:]) <= 6
    assert not Budget(0.0).take(1.0)


def answered(**changes: float) -> Any:
    """An exchange that got its first token after 1 s and its eleventh and last after 2 s."""
    due = {"first_by": 0.0, "end_by": 0.0, "tpot_ms": 0} | changes
    usage = Usage(5, 11)
    return SimpleNamespace(job=SimpleNamespace(**due), started_at=1.0, ended_at=2.0, usage_so_far=lambda: usage)


@pytest.mark.parametrize(
    ("due", "missed"),
    [
        ({}, False),
        ({"first_by": 1.0}, False),
        ({"first_by": 0.999}, True),
        ({"end_by": 2.0}, False),
        ({"end_by": 1.999}, True),
        ({"tpot_ms": 100}, False),
        ({"tpot_ms": 99}, True),
    ],
)
def test_slow_is_what_missed_an_objective(due: dict[str, float], missed: bool) -> None:
    assert late(answered(**due)) is missed


def test_who_asked_for_nothing_was_not_late() -> None:
    assert not late(SimpleNamespace(job=None))  # type: ignore[arg-type]
