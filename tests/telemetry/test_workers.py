"""Two workers count as one: whichever is asked, and whatever becomes of the other."""

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.process import Gateway, gateway, until

POOL = """
[[pool]]
model = "m"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 1.0
"""
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}

pytestmark = pytest.mark.timeout(90)


def scraped(one: Gateway) -> dict[tuple[str, str], float]:
    """Counters, histograms and `signalbox_workers`, by name and labels; on a new connection each time."""
    with urllib.request.urlopen(f"{one.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type in ("counter", "histogram") or sample.name == "signalbox_workers"
    }


def served(numbers: dict[tuple[str, str], float]) -> float:
    labels = str([("class", "standard"), ("model", "m"), ("reason", "ok")])
    return numbers.get(("signalbox_requests_total", labels), 0.0)


def starts(numbers: dict[tuple[str, str], float]) -> list[float]:
    return sorted(value for (name, _), value in numbers.items() if name == "signalbox_worker_starts_total")


def test_counts_of_all_workers_are_one_and_outlive_a_killed_one(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(POOL)
    with gateway(tmp_path, "--workers", "2", "--config", str(tmp_path / "c.toml")) as one:
        for nth in range(1, 31):
            assert one.ask("/v1/chat/completions", HELLO)["usage"]["completion_tokens"] == 5
            until(lambda nth=nth: served(scraped(one)) == nth, 10)  # type: ignore[misc]
        assert scraped(one)["signalbox_workers", "[]"] == 2
        before = scraped(one)
        next(child for child in one.process.children() if "gateway.workers" in child.cmdline()).kill()
        until(lambda: "it starts again" in one.log, 20, lambda: one.log)
        after = scraped(one)
        assert before.keys() <= after.keys()
        assert not [key for key, value in before.items() if key[0] != "signalbox_workers" and after[key] < value]
        last = scraped(one)
        for nth in range(31, 61):
            one.ask("/v1/chat/completions", HELLO)
            until(lambda nth=nth: served(scraped(one)) == nth, 10)  # type: ignore[misc]
            seen = scraped(one)
            assert not [key for key, value in last.items() if key[0] != "signalbox_workers" and seen[key] < value]
            last = seen
        until(
            lambda: starts(scraped(one)) == [1, 2] and scraped(one)["signalbox_workers", "[]"] == 2, 30, lambda: one.log
        )
