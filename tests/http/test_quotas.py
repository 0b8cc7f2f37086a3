"""A tenant's limits as its clients see them: headers while there is room, a wait that is worth obeying when not."""

from tests.support.site import POOL, running

LIMITED = (
    POOL
    + """
[[tenant]]
name = "small"
keys = ["sha256:32a642c5fd761670c7f9989b70138c93c56ea519529eb544d46b91a8e59f3075"]
requests_per_min = 2
tokens_per_min = 100_000
"""
)
KEY = {"authorization": "Bearer sk-demo-alice"}


async def test_limits_are_told_and_kept() -> None:
    async with running(LIMITED) as site:
        left = []
        for _ in range(2):
            async with site.chat(headers=KEY, max_tokens=2) as answer:
                assert answer.status == 200
                assert answer.headers["x-ratelimit-limit-requests"] == "2"
                assert answer.headers["x-ratelimit-limit-tokens"] == "100000"
                assert 0 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 100_000
                left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
        assert left == [1, 0]
        async with site.chat(headers=KEY, max_tokens=2) as answer:
            assert answer.status == 429
            assert answer.headers["x-signalbox-reason"] == "rate_limited"
            assert answer.headers["x-should-retry"] == "true"
            assert 1 <= int(answer.headers["retry-after"]) <= 70
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"


async def test_who_has_no_limits_hears_of_none() -> None:
    async with running() as site, site.chat(max_tokens=2) as answer:
        assert answer.status == 200
        assert not [name for name in answer.headers if name.lower().startswith("x-ratelimit")]
