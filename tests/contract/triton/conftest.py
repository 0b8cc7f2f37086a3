"""A tokenizer whose ids are those of the stand-in engines."""

from pathlib import Path

import pytest

from tests.engines.triton_models.standin import text
from tests.support.tokenizers import pieces, save

CONTEXT_TOKENS = 2_048


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standin")
    return save(pieces(text.PIECES), folder, model_max_length=CONTEXT_TOKENS)
