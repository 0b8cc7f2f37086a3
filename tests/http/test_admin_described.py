"""Requests to `/admin` made up from its OpenAPI description, good and bad: every answer is described, none a 5xx."""

import asyncio
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.result import Ok

from gateway.tenants import hash_key
from tests.support.site import POOL, running

EXAMPLES = 20
"""Per operation and mode."""

CHECKED = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
ADMIN = f"""
[server]
admin_keys = ["{hash_key("admin")}"]
[[tenant]]
name = "alice"
{POOL}
"""


def call_all(url: str, mode: GenerationMode) -> Counter[int]:
    """Calls every operation; how often each status came. Runs in a thread of its own, as its HTTP client blocks."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_url(f"{url}/docs/openapi.json").include(path_regex="^/admin")
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
            if "name" in (case.path_parameters or {}):
                case.path_parameters["name"] = "alice"
            if isinstance(case.body, dict) and case.body.get("models"):
                case.body["models"] = ["demo"]
            response = case.call(timeout=5.0, headers={"authorization": "Bearer admin"})
            statuses[response.status_code] += 1
            assert response.status_code < 500, response.text
            case.validate_response(response, checks=[*CHECKS.get_by_names(CHECKED)])

        call()
    return statuses


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
async def test_no_described_request_fails_inside(mode: GenerationMode) -> None:
    async with running(ADMIN) as site:
        statuses = await asyncio.to_thread(call_all, site.url, mode)
        assert statuses[400] > 5
        if mode is GenerationMode.POSITIVE:
            assert statuses[200] > 5
            assert statuses[201] > 5
            assert statuses[403] > 5
        async with site.client.get(f"{site.url}/admin/tenants", headers={"authorization": "Bearer admin"}) as answer:
            assert answer.status == 200
