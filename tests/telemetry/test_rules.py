"""Rules, alerts and dashboards ask only for what there is, and the alerts come when they should."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.telemetry.metrics_table import exposed
from policies.lifecycle import State
from policies.reasons import Reason
from tests.telemetry.promql import Selector, selectors

ROOT = Path(__file__).parent.parent.parent
PROMETHEUS, DASHBOARDS = ROOT / "docker" / "prometheus", ROOT / "docker" / "grafana" / "dashboards"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: it comes with Debian's prometheus")
EVERYWHERE = {"job", "instance", "le"}
WORDS = {"reason": {*Reason, "ok"}, "state": {*State, "closed", "open", "half_open"}}
"""What a label can be, where that is a closed list."""


def rules(file: str) -> list[dict[str, Any]]:
    read = yaml.safe_load((PROMETHEUS / file).read_text())
    return [rule for group in read["groups"] for rule in group["rules"]]


def boards() -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(DASHBOARDS.glob("*.json"))}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def expressions() -> dict[str, str]:
    """Every expression, by where it stands."""
    found = {f"{file} {rule.get('record') or rule['alert']}": rule["expr"] for file in FILES for rule in rules(file)}
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel.get("targets", []):
                found[f"{name} {panel['title']} {target['refId']} {panel['id']}"] = target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
                assert asked is not None
                found[f"{name} ${variable['name']}"] = f"sum by ({asked[2]}) ({asked[1]})"
    return found


FILES = ("rules.yml", "alerts.yml")
RECORDED = {rule["record"] for rule in rules("rules.yml")}
EXPRESSIONS = expressions()


def wrong(asked: Selector) -> str:
    """What is wrong with one selector; empty if nothing."""
    if asked.name in RECORDED or asked.name == "up":
        labels = {"model", "class", "reason", "state", "backend", *EVERYWHERE}
    elif (family := exposed().get(asked.name)) is not None:
        labels = {*family.labels, *EVERYWHERE}
    else:
        return f"there is no {asked.name}"
    for label, _, value in asked.matchers:
        if label not in labels:
            return f"{asked.name} has no label {label}"
        if label in WORDS and not value.startswith("$") and (odd := set(value.split("|")) - WORDS[label]):
            return f"{label} is never {odd}"
    return ""


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_it_asks_for_what_there_is(where: str) -> None:
    asked = list(selectors(EXPRESSIONS[where]))
    assert asked
    assert [fault for one in asked if (fault := wrong(one))] == []


@pytest.mark.parametrize(
    "expression",
    [
        "rate(signalbox_request_total[5m])",
        'signalbox_requests_total{reson="ok"}',
        'signalbox_requests_total{reason=~"ok|done"}',
        "signalbox_turn_seconds",
        "model:signalbox_nothing:rate5m",
    ],
)
def test_it_would_notice(expression: str) -> None:
    assert any(map(wrong, selectors(expression)))


def test_selectors_are_read_as_they_are_meant() -> None:
    text = 'sum by (a, le) (rate(x_bucket{a=~"b|c", d!="e"}[5m])) / on (a) group_left max(y) > 0 and z{a="sum"}'
    assert list(selectors(text)) == [
        Selector("x_bucket", [("a", "=~", "b|c"), ("d", "!=", "e")]),
        Selector("y", []),
        Selector("z", [("a", "=", "sum")]),
    ]


def test_dashboards_are_whole() -> None:
    assert boards().keys() == {"service", "engines"}
    assert len({board["uid"] for board in boards().values()}) == 2
    for board in boards().values():
        ids = [panel["id"] for panel in panels(board)]
        assert len(ids) == len(set(ids))
        taken: set[tuple[int, int]] = set()
        for panel in panels(board):
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken, f"{panel['title']} lies over another panel"
            assert at["x"] + at["w"] <= 24
            taken |= cells


@needs_promtool
def test_every_expression_is_one(tmp_path: Path) -> None:
    """Also those of the dashboards, with Grafana's variables filled in."""
    filled = [text.replace("$__rate_interval", "5m").replace("$", "") for text in EXPRESSIONS.values()]
    group = {"name": "all", "rules": [{"record": f"r:{n}", "expr": text} for n, text in enumerate(filled)]}
    (tmp_path / "all.yml").write_text(yaml.safe_dump({"groups": [group]}))
    promtool("check", "rules", str(tmp_path / "all.yml"))
    promtool("check", "rules", *FILES)
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_alerts_come_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "alerts_test.yml")
    tested = {test["name"] for test in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]}
    assert tested == {rule["alert"] for rule in rules("alerts.yml")}


@needs_promtool
@pytest.mark.parametrize(("is_now", "was"), [("== 1", "== 0"), ("for: 9h", "for: 30s")])
def test_their_tests_would_notice(tmp_path: Path, is_now: str, was: str) -> None:
    shutil.copytree(PROMETHEUS, tmp_path / "p")
    text = (tmp_path / "p" / "alerts.yml").read_text()
    (tmp_path / "p" / "alerts.yml").write_text(text.replace(was, is_now, 1))
    command = [str(PROMTOOL), "test", "rules", "alerts_test.yml"]
    assert subprocess.run(command, cwd=tmp_path / "p", capture_output=True, check=False).returncode == 1


def test_every_alert_says_whom_it_concerns() -> None:
    for rule in rules("alerts.yml"):
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert "{{" in rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in (ROOT / "docs" / "telemetry.md").read_text(), "what to do is not written down"


def promtool(*arguments: str) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
