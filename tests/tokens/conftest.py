"""One folder per family of tokenizers, made once."""

from pathlib import Path

import pytest

from backends import words
from backends.words import Words
from tests.support.tokenizers import FAMILIES, byte_level, save


@pytest.fixture(scope="session", params=FAMILIES)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Words:
    return words.load(str(save(FAMILIES[request.param](), tmp_path_factory.mktemp("words"))))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(folder: Path) -> Words:
    return words.load(str(folder))
