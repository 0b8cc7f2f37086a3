"""Failover is bounded: by attempts, by backends, and as a share of the requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.retry import RetryBudget, RetryBudgets, RetryRule

SMALL = RetryRule(burst=3)


def taken(budget: RetryBudget, at: float, tries: int) -> int:
    return sum(budget.allows(at, attempts=1, candidates=9) for _ in range(tries))


@pytest.mark.parametrize(
    ("attempts", "candidates", "allowed"),
    [(1, 1, False), (1, 2, True), (2, 2, False), (2, 3, True), (3, 9, False), (2, 9, True)],
)
def test_attempts_are_bounded_by_backends_and_three(attempts: int, candidates: int, allowed: bool) -> None:
    assert RetryBudget().allows(0.0, attempts, candidates) is allowed


def test_a_few_are_allowed_without_any_traffic() -> None:
    assert taken(RetryBudget(SMALL), 0.0, 10) == 3


def test_a_tenth_of_the_requests_may_be_tried_again() -> None:
    budget = RetryBudget(SMALL)
    for _ in range(500):
        budget.request(0.0)
    assert taken(budget, 0.0, 1000) == 50


def test_a_refusal_takes_nothing() -> None:
    budget = RetryBudget(SMALL)
    assert not any(budget.allows(0.0, attempts=3, candidates=9) for _ in range(100))
    assert taken(budget, 0.0, 10) == 3


def test_it_fills_again_with_time_and_forgets_old_traffic() -> None:
    budget = RetryBudget(SMALL)
    for _ in range(500):
        budget.request(0.0)
    assert taken(budget, 0.0, 1000) == 50
    assert taken(budget, 60.0, 1000) == 2  # of the burst; a trace of the fifty is left
    assert taken(budget, 200.0, 1000) == 3


def test_the_clock_of_another_event_may_be_a_little_behind() -> None:
    budget = RetryBudget(SMALL)
    budget.request(10.0)
    assert budget.allows(9.9, attempts=1, candidates=2)


def test_nothing_is_allowed_by_a_rule_of_nothing() -> None:
    budget = RetryBudget(RetryRule(share=0.0, burst=0))
    for _ in range(100):
        budget.request(0.0)
    assert taken(budget, 0.0, 10) == 0


def test_the_status_line() -> None:
    budget = RetryBudget(SMALL)
    budget.allows(0.0, 1, 2)
    assert repr(budget) == "<RetryBudget 1.0 of 3.0 used>"


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 0.5)), max_size=200))
def test_retries_never_exceed_the_share_and_the_burst(events: list[tuple[bool, float]]) -> None:
    budget, at, requests, retries = RetryBudget(SMALL), 0.0, 0, 0
    for is_request, passed in events:
        at += passed
        if is_request:
            budget.request(at)
            requests += 1
        else:
            retries += budget.allows(at, attempts=1, candidates=2)
    refills = 1 + at / budget.rule.memory_s
    assert retries <= (budget.rule.burst + budget.rule.share * requests) * refills


def test_what_clients_send_again_is_taken_from_the_same_budget() -> None:
    budget = RetryBudget(SMALL)
    for _ in range(2):
        budget.repeat(0.0)
    assert not budget.spent(0.0)
    budget.repeat(0.0)
    assert budget.spent(0.0)
    assert taken(budget, 0.0, 10) == 0


def test_however_much_clients_send_again_it_is_forgotten_soon() -> None:
    budget = RetryBudget(SMALL)
    for _ in range(10_000):
        budget.repeat(0.0)
    assert budget.spent(2.0)
    assert not budget.spent(10.0)


def test_each_tenant_has_its_own() -> None:
    budgets = RetryBudgets(SMALL)
    assert taken(budgets.of("a"), 0.0, 10) == 3
    assert taken(budgets.of("b"), 0.0, 10) == 3
    assert taken(budgets.of("a"), 0.0, 10) == 0


def test_those_of_the_tenants_that_ask_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryBudgets, "MOST", 2)
    budgets = RetryBudgets(SMALL)
    first, second = budgets.of("a"), budgets.of("b")
    assert budgets.of("a") is first
    budgets.of("c")
    assert budgets.of("a") is first
    assert budgets.of("b") is not second
