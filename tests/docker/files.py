"""The files under docker/, read."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"


def compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return read


def stages() -> dict[str, list[tuple[str, str]]]:
    """The Dockerfile's stages by name: instructions and their arguments, after those of the stage they come from."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    here: list[tuple[str, str]] = []
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            source, _, name = rest.partition(" AS ")
            here = found[name] = list(found.get(source, [("FROM", source)]))
        else:
            here.append((word, rest.strip()))
    return found


def last(stage: list[tuple[str, str]], word: str) -> str:
    """The argument that holds of an instruction which replaces the one before."""
    return next(rest for each, rest in reversed(stage) if each == word)


def argv(stage: list[tuple[str, str]], word: str) -> list[str]:
    """The words of an instruction in exec form."""
    words: list[str] = json.loads(last(stage, word).partition("[")[2].join(("[", "")))
    return words
