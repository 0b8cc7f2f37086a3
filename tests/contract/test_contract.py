"""Every backend keeps the contract of `backends.protocol`."""

import pytest

from tests.contract.makers import MAKERS, Maker
from tests.contract.suite import CASES, Case, play


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.name)
def test_contract(maker: Maker, one: Case) -> None:
    maker.run(play(maker.make, one))
