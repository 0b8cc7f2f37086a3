"""`signalbox explain`: the numbers of each test, the verdicts, and that the queue's script says the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from tests.support.store import own_server, server, shared_server

__all__ = ["own_server", "server", "shared_server"]

TOML = """
[[tenant]]
name = "alice"
weight = 2.0
key_env = "ALICE"

[[tenant]]
name = "bob"
key_env = "BOB"
class = "standard"
requests_per_min = 10
tokens_per_min = 20_000
tokens_in_flight = 4_000
max_queued = 3
models = ["m"]

[store]
max_queued = 100

[[pool]]
model = "m"
aliases = ["other"]
[[pool.backend]]
kind = "simulated"
name = "one"
limits = { max_running = 8, prefill_tokens_per_s = 1000, kv_tokens = 20_000, chunk_tokens = 500 }
"""
TIMES = "15,81,95,0.11"


@pytest.fixture
def configured(tmp_path: Path) -> list[str]:
    file = tmp_path / "config.toml"
    file.write_text(TOML)
    return ["--config", str(file)]


def asked(capsys: pytest.CaptureFixture[str], configured: list[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = main(["explain", *configured, "--json", *map(str, words)])
    return code, json.loads(capsys.readouterr().out)


def line(answer: dict[str, Any], test: str) -> dict[str, Any]:
    (found,) = (each for each in answer["tests"] if each["test"] == test)
    return dict(found)


def test_an_idle_pool_starts_it_at_once(capsys: pytest.CaptureFixture[str], configured: list[str]) -> None:
    code, answer = asked(capsys, configured, "--prompt-tokens", 400, "--tenant", "alice", "--class", "interactive")
    assert (code, answer["verdict"], answer["reason"]) == (0, "starts", None)
    assert line(answer, "first")["predicted"] == pytest.approx(1.15 * 400 / 1000)
    assert line(answer, "first")["limit"] == 5.0


def test_key_and_charge_are_those_of_its_ticket(capsys: pytest.CaptureFixture[str], configured: list[str]) -> None:
    size = ("--prompt-tokens", 400, "--cached-tokens", 100, "--max-tokens", 99)
    _, answer = asked(capsys, configured, *size, "--tenant", "alice", "--class", "interactive")
    order = answer["order"]
    assert (order["key_ms"], order["prefill_price"], order["output_price"]) == (5_000 + 300, 500, 1000)
    assert order["charge"] == 500 * 300 + 1000 * 100
    assert answer["request"]["output_high"] == 100


def test_what_is_ahead_counts_with_safety(capsys: pytest.CaptureFixture[str], configured: list[str]) -> None:
    load = ("--outstanding", 600, "--waiting-ahead", 5, "--ahead-tokens", 2000)
    code, answer = asked(capsys, configured, "--prompt-tokens", 400, "--ttft-ms", 4000, *load)
    assert (code, answer["verdict"]) == (0, "waits")
    assert line(answer, "first")["predicted"] == pytest.approx(1.15 * (600 + 2000 + 400) / 1000)
    code, answer = asked(capsys, configured, "--prompt-tokens", 400, "--ttft-ms", 3000, *load)
    assert (code, answer["reason"], answer["status"]) == (1, "deadline_unreachable", 429)
    assert answer["retry_after_s"] == pytest.approx(0.45)


def test_a_class_that_sheds(capsys: pytest.CaptureFixture[str], configured: list[str]) -> None:
    waits = ("--prompt-tokens", 400, "--class", "interactive", "--waiting-ahead", 1)
    code, answer = asked(capsys, configured, *waits, "--shed-percent", 30)
    assert (code, answer["verdict"], line(answer, "shed")["terms"]) == (0, "waits", {"late_after_s": 4.75})
    code, answer = asked(capsys, configured, *waits, "--shed-percent", 60)
    assert (code, answer["reason"], answer["status"]) == (1, "overloaded", 429)
    starts = asked(capsys, configured, "--prompt-tokens", 400, "--shed-percent", 60)[1]
    assert starts["verdict"] == "starts"  # who starts does not wait


def test_not_even_idle(capsys: pytest.CaptureFixture[str], configured: list[str]) -> None:
    code, answer = asked(capsys, configured, "--prompt-tokens", 4000, "--ttft-ms", 4000)
    assert (code, answer["reason"], answer["status"]) == (1, "deadline_impossible", 422)
    pace = ("--prompt-tokens", 100, "--tpot-ms", 10)
    assert asked(capsys, configured, *pace)[0] == 0  # no pace is known
    code, answer = asked(capsys, configured, *pace, "--step-times", TIMES)
    assert (code, answer["reason"]) == (1, "deadline_impossible")
    assert not line(answer, "idle_pace")["ok"]


def test_quotas_and_bounds(capsys: pytest.CaptureFixture[str], configured: list[str]) -> None:
    bob = ("--tenant", "bob", "--prompt-tokens", 500, "--max-tokens", 99)
    code, answer = asked(capsys, configured, *bob, "--used-tokens", 19_401)
    assert (code, answer["reason"], answer["status"], answer["retry_after_s"]) == (1, "rate_limited", 429, 65.0)
    assert asked(capsys, configured, *bob, "--used-tokens", 19_400)[0] == 0
    assert asked(capsys, configured, *bob, "--used-requests", 10)[1]["reason"] == "rate_limited"
    for full in (("--queued", 100), ("--tenant-queued", 3)):
        code, answer = asked(capsys, configured, *bob, "--waiting-ahead", 1, *full)
        assert (code, answer["reason"]) == (1, "queue_full")
        assert asked(capsys, configured, *bob, *full)[1]["verdict"] == "starts"  # who starts needs no place
    assert asked(capsys, configured, *bob, "--tenant-in-flight", 3_400)[1]["verdict"] == "starts"
    assert asked(capsys, configured, *bob, "--tenant-in-flight", 3_401)[1]["verdict"] == "waits"


@pytest.mark.parametrize(
    ("load", "test"),
    [
        (("--running", 8), "room"),
        (("--outstanding", 601), "window"),
        (("--running", 7, "--running-prompt-tokens", 2600), "kv"),
        (("--running", 1, "--tightest-tpot-ms", 15, "--step-times", TIMES), "pace"),
    ],
)
def test_what_only_lets_it_wait(
    capsys: pytest.CaptureFixture[str], configured: list[str], load: tuple[object, ...], test: str
) -> None:
    code, answer = asked(capsys, configured, "--prompt-tokens", 400, "--max-tokens", 99, *load)
    assert (code, answer["verdict"]) == (0, "waits")
    assert [each["test"] for each in answer["tests"] if not each["ok"]] == [test]


def test_a_body_says_model_limit_and_class(
    capsys: pytest.CaptureFixture[str], configured: list[str], tmp_path: Path
) -> None:
    body = {"model": "other", "max_tokens": 7, "service_tier": "priority", "messages": [{"content": "x" * 3000}]}
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    _, answer = asked(capsys, configured, "--file", file)
    request = answer["request"]
    assert (request["model"], request["service"], request["output_high"]) == ("m", "interactive", 8)
    assert request["prompt_tokens"] == round(file.stat().st_size / 4)
    _, answer = asked(capsys, configured, "--file", file, "--tenant", "bob", "--max-tokens", 9)
    assert (answer["request"]["service"], answer["request"]["output_high"]) == ("standard", 10)


def test_it_prints_tests_and_verdict(capsys: pytest.CaptureFixture[str], configured: list[str]) -> None:
    assert main(["explain", *configured, "--prompt-tokens", "4000", "--ttft-ms", "4000"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^idle_first +one +4\.6 +> +4 s +FAILS +deadline_impossible ", text, re.MULTILINE)
    assert text.endswith("verdict  refused: deadline_impossible (422)\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--tenant", "zed"), "--tenant: there is no tenant 'zed'"),
        (("--model", "zed"), "--model: there is no model 'zed'"),
        (("--class", "zed"), "--class: "),
        (("--cached-tokens", "401"), "--cached-tokens: "),
    ],
)
def test_what_cannot_be_meant_names_its_option(
    capsys: pytest.CaptureFixture[str], configured: list[str], words: tuple[str, ...], says: str
) -> None:
    assert main(["explain", *configured, "--prompt-tokens", "400", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--prompt-tokens", "0"), ("--prompt-tokens", "9", "--step-times", "1,2"), ()])
def test_bad_numbers_are_usage_errors(configured: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["explain", *configured, *words])
    assert caught.value.code == 2


def test_a_missing_or_wrong_file_is_named(
    capsys: pytest.CaptureFixture[str], configured: list[str], tmp_path: Path
) -> None:
    assert main(["explain", *configured, "--file", str(tmp_path / "none")]) == 2
    (tmp_path / "bad").write_text("{")
    assert main(["explain", *configured, "--file", str(tmp_path / "bad")]) == 2
    assert capsys.readouterr().err.count("--file: ") == 2
