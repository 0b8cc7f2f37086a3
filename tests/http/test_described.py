"""Requests made up from the OpenAPI description, good and bad ones: every answer is a described one, none a 5xx."""

import asyncio
import time
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.result import Ok

from tests.support.quiet import zero
from tests.support.site import running

EXAMPLES = 20
"""Per operation and mode."""

SLOWEST_S = 5.0
CHECKED = ("status_code_conformance", "content_type_conformance", "response_headers_conformance")

TINY = """
[server]
max_body_bytes = 65536
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 0.1
context_tokens = 1024
output_mean_tokens = 4
limits = { max_running = 16 }
"""

DEADLINES = {"x-slo-ttft-ms", "x-deadline-ms", "idempotency-key"}


def call_all(url: str, mode: GenerationMode) -> dict[int, int]:
    """Calls every operation; how often each status came. Runs in a thread of its own, as its HTTP client blocks."""
    schema = schemathesis.openapi.from_url(f"{url}/docs/openapi.json")
    statuses: dict[int, int] = {}
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # there is nothing to get wrong

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "demo"
            started = time.perf_counter()
            response = case.call(timeout=SLOWEST_S)
            assert time.perf_counter() - started < SLOWEST_S
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            expired = response.status_code == 504 and DEADLINES & {name.lower() for name in case.headers or {}}
            assert expired or response.status_code < 500, response.text
            case.validate_response(response, checks=[*CHECKS.get_by_names(CHECKED)])

        call()
    return statuses


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
async def test_no_described_request_fails_inside(mode: GenerationMode) -> None:
    async with running(TINY) as site:
        statuses = await asyncio.to_thread(call_all, site.url, mode)
        assert statuses[400] > 10
        assert mode is GenerationMode.NEGATIVE or statuses[200] > 5
        await zero(site)
