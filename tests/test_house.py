"""The house keeps its own rules: made documents are current, pins cover what is asked for, files stay small."""

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import lifecycle_diagram, metrics_table, size_limit

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
APACHE_2_0 = "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"


def canonical(requirement: str) -> str:
    """The name in a requirement, as registries compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~! ;]", requirement, maxsplit=1)[0]).lower()


def test_the_life_cycle_in_the_documents_is_the_tables() -> None:
    page = lifecycle_diagram.PAGE.read_text(encoding="utf-8")
    assert lifecycle_diagram.drawn(page) == page, "run: python scripts/lifecycle_diagram.py"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="not both there"):
        lifecycle_diagram.drawn("# Architecture\n" + lifecycle_diagram.BEGIN)


def test_the_size_limit_finds_what_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_limit, "ROOT", tmp_path)
    file = tmp_path / "long.py"
    file.write_text("def f():\n" + "    pass\n" * 40 + "def g():\n" + "    pass\n" * 39 + "x = 1\n" * 400)
    assert list(size_limit.too_long(file)) == [
        "long.py: 481 lines, 400 allowed",
        "long.py:1: f has 41 lines, 40 allowed",
    ]


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", pin) for pin in pins)
    project = PROJECT["project"]
    asked = {canonical(one) for one in project["dependencies"] + project["optional-dependencies"]["dev"]}
    assert asked <= {canonical(pin) for pin in pins}


def test_every_package_is_shipped() -> None:
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for top in ("gateway", "backends", "policies", "bench")
        for file in (ROOT / top).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_the_licence_is_the_plain_one() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_0


@pytest.mark.parametrize("module", ["policies.types", "policies.lifecycle", "backends.protocol"])
def test_what_lies_below_the_trunk_imports_without_it(module: str) -> None:
    code = f"import {module}, sys; sys.exit(any(m.partition('.')[0] in ('gateway', 'litestar') for m in sys.modules))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_documents_link_to_what_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_metric_is_documented() -> None:
    page = metrics_table.PAGE.read_text(encoding="utf-8")
    assert metrics_table.written(page) == page, "run: python scripts/metrics_table.py"


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    missing = [name for name in _settings() if f"`{name}`" not in page]
    assert not missing


def _settings() -> set[str]:
    import msgspec

    from gateway.config import Config, PoolConfig, TenantConfig
    from policies.types import ServiceClass

    sections = [type(getattr(Config(), name)) for name in ("server", "store", "metrics", "telemetry")]
    structs = (Config, *sections, ServiceClass, TenantConfig, PoolConfig, *_engines())
    return {field.encode_name for struct in structs for field in msgspec.structs.fields(struct)}


def _engines() -> tuple[type, ...]:
    import typing

    from gateway.config import Engine

    return typing.get_args(Engine)


def test_every_failure_in_the_table_has_its_tests() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = page.partition("## When something fails")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests" / "faults").glob("test_*.py"))
    named = {row.split("|")[1].strip(): re.findall(r"`(test_\w+)`", row.split("|")[-2]) for row in rows}
    assert len(named) > 15
    assert [row for row, tests in named.items() if not tests] == []
    assert [one for tests in named.values() for one in tests if f"def {one}(" not in code] == []
