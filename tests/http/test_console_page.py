"""The console in a real browser: what it shows, to whom, and what it asks for.

`SIGNALBOX_CONSOLE_PICTURE=docs/console.png` takes the picture for the documents anew, under load.
"""

import asyncio
import contextlib
import json
import os
import random
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.config import Config, load
from gateway.tenants import hash_key
from tests.support.browser import BINARY, Tab, tab
from tests.support.site import Site, running
from tests.support.watched import HOSTILE, hostile, watched

ROOT = Path(__file__).parent.parent.parent
PICTURE = os.environ.get("SIGNALBOX_CONSOLE_PICTURE", "")

CROWD = 170
"""Clients on the picture."""

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(BINARY is None, reason="chromium is not here: it is a Debian package of that name"),
]


async def sign_in(page: Tab, site: Site, key: str = "admin") -> None:
    """By the keyboard alone: the page has put the focus where the key goes."""
    await page.open(f"{site.url}/console")
    await page.until("document.activeElement.id === 'key'")
    await page.type(key)
    await page.press("Enter", 13)


async def cells(page: Tab, table: str) -> list[dict[str, str]]:
    """Rows of a table by their column heads."""
    found: list[dict[str, str]] = await page.js(
        f"""(() => {{
          const table = document.querySelector({json.dumps(table)});
          const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
          return [...table.tBodies[0].rows].map((row) =>
            Object.fromEntries([...row.cells].map((cell, nth) => [heads[nth], cell.textContent])));
        }})()"""
    )
    return found


async def fits(page: Tab) -> bool:
    return bool(await page.js("document.documentElement.scrollWidth <= innerWidth"))


async def test_the_page_shows_what_the_stream_says_and_takes_names_for_names(tmp_path: Path) -> None:
    async with watched(hostile) as one, tab(tmp_path) as page:
        await page.size(1280, 900)
        await sign_in(page, one.site)
        await page.until("Number(document.body.dataset.at)")
        async with one.feed() as viewer:
            seen = await viewer.next()
        (pool,) = seen.pools
        (backend,) = pool.backends
        assert backend.leases is not None
        assert backend.prefill is not None
        assert backend.kv is not None
        (row,) = await cells(page, "#pools table")
        assert (row["Backend"], row["State"], row["Streams here"]) == (HOSTILE, "up", "2")
        assert row["Leases"] == f"{backend.leases.used:.0f} / {backend.leases.limit:.0f}" == "2 / 2"
        assert row["Prefill tokens"] == f"{backend.prefill.used:.0f} / 200k"
        assert row["KV tokens"] == f"{backend.kv.used:.0f} / {backend.kv.limit / 1000:.0f}k"
        classes = {row["Class"]: row for row in await cells(page, "#pools table:last-child")}
        assert {name: row["Waiting"] for name, row in classes.items()} == {
            service.name: f"{service.waiting:.0f}" for service in pool.services
        }
        assert classes["standard"]["Prompt tokens"] == f"{pool.services[1].tokens:.0f}"
        tenants = {row["Tenant"]: row for row in await cells(page, "#tenants")}
        assert {name: (row["standard"], row["Requests in all"]) for name, row in tenants.items()} == {
            tenant.name: (str(tenant.waiting.get("standard", 0)), f"{tenant.requests:.0f}") for tenant in seen.tenants
        }
        assert {row["Reason"]: row["In all"] for row in await cells(page, "#reasons")} == {
            end.reason: f"{end.total:.0f}" for end in seen.ends if end.reason != "ok"
        }
        requests = await cells(page, "#requests")
        assert [row["Tenant"] for row in requests] == [request.tenant for request in seen.requests]
        assert [row["Phase"].split()[0] for row in requests] == ["decode"] * 2 + ["queue"] * 3
        assert [row["Where"] for row in requests] == [f"{HOSTILE} on {HOSTILE}"] * 2 + [HOSTILE] * 3
        assert await page.text("#tiles dd:nth-of-type(1)") == [
            "3",
            "2",
            *(await page.text("#tiles dd:nth-of-type(1)"))[2:],
        ]
        assert HOSTILE in await page.text("#class option")
        await nothing_came_in(page, one.site)


async def nothing_came_in(page: Tab, site: Site) -> None:
    """No markup, script or request but the page's own, and nothing in its console."""
    assert await page.js("document.title") == "Signalbox"
    assert (
        await page.js("document.querySelectorAll('img, iframe, object, script:not([src]), [style*=url]').length") == 0
    )
    assert all(url.startswith(f"{site.url}/console") for url in page.urls), page.urls
    assert page.errors == []


async def test_it_fits_on_a_phone_and_follows_what_changes(tmp_path: Path) -> None:
    async with watched(hostile) as one, tab(tmp_path) as page:
        await page.size(390, 844, mobile=True)
        await page.scheme("dark")
        await sign_in(page, one.site)
        await page.until("Number(document.body.dataset.at)")
        await page.until("document.querySelectorAll('.plot canvas').length === 2")
        assert await fits(page)
        light = "getComputedStyle(document.body).backgroundColor"
        assert await page.js(light) == "rgb(20, 22, 26)"
        one.engine.release()
        await page.until("document.querySelector('#requests').tBodies[0].textContent === 'none'")
        assert await fits(page)
        await page.size(1280, 900)
        await page.scheme("light")
        await page.until(f"{light} === 'rgb(251, 251, 250)'")
        assert await fits(page)
        assert page.errors == []


async def test_keys_are_asked_for_kept_as_told_and_given_up(tmp_path: Path) -> None:
    async with watched() as one, tab(tmp_path) as page:
        await sign_in(page, one.site, "sk-alice")
        await page.until("document.querySelector('#trouble').textContent.includes(\"tenant's key\")")
        assert await page.js("document.querySelector('#board').hidden")
        await page.js("document.querySelector('#key').select()")
        await page.type("admin")
        await page.press("Tab", 9)
        await page.press(" ", 32)
        assert await page.js("document.activeElement.id === 'keep' && document.activeElement.checked")
        await page.press("Tab", 9)
        await page.press("Enter", 13)
        await page.until("!document.querySelector('#board').hidden")
        await page.open(f"{one.site.url}/console")
        await page.until("!document.querySelector('#board').hidden")  # without asking
        stage = one.site.trunk.audience
        await one.site.until(lambda: stage.viewers == 1)
        await page.js("document.querySelector('#pause').click()")
        await one.site.until(lambda: stage.viewers == 0)
        await page.js("document.querySelector('#pause').click()")
        await one.site.until(lambda: stage.viewers == 1)
        await page.js("document.querySelector('#leave').click()")
        await one.site.until(lambda: stage.viewers == 0)
        assert await page.js("sessionStorage.length + localStorage.length + document.cookie.length") == 0
        await page.until("document.activeElement.id === 'key'")


async def test_it_comes_back_when_the_stream_breaks(tmp_path: Path) -> None:
    async with watched() as one, tab(tmp_path) as page:
        await sign_in(page, one.site)
        await page.until("document.querySelector('#status').className === 'live'")
        stage = one.site.trunk.audience
        stage.close()
        await page.until("document.querySelector('#status').textContent.includes('Trying again')")
        stage.closed.clear()
        await page.until("document.querySelector('#status').className === 'live'")


@pytest.fixture
def shipped() -> Config:
    """The shipped configuration, with an admin key."""
    config = load(ROOT / "config.toml")
    return msgspec.structs.replace(
        config, server=msgspec.structs.replace(config.server, admin_keys=(hash_key("admin"),))
    )


@pytest.mark.skipif(not PICTURE, reason="the picture is taken when SIGNALBOX_CONSOLE_PICTURE says where it goes")
async def test_take_the_picture(shipped: Config, tmp_path: Path) -> None:
    """Under more than it can carry."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=60)
    async with (
        running(shipped) as site,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        crowd = Site(site.trunk, site.url, session)
        clients = [group.create_task(client(crowd, random.Random(nth))) for nth in range(CROWD)]
        async with tab(tmp_path) as page:
            await page.size(1280, 1460)
            await sign_in(page, site)
            await page.until("Number(document.body.dataset.at)")
            await asyncio.sleep(45)  # what the charts show
            picture = await page.picture()
        for each in clients:
            each.cancel()
    assert len(picture) <= 300_000
    await asyncio.to_thread((ROOT / PICTURE).write_bytes, picture)


async def client(site: Site, dice: random.Random) -> None:
    """One request after the other, of all classes and lengths; some with an objective that none could meet."""
    await asyncio.sleep(dice.uniform(0, 20))
    while True:
        headers: dict[str, Any] = {
            "authorization": f"Bearer sk-demo-{dice.choice(('alice', 'alice', 'bob'))}",
            "x-priority-class": dice.choice(("interactive", "interactive", "standard", "batch")),
        }
        if dice.random() < 0.04:
            headers["x-slo-ttft-ms"] = "20"
        words, tokens = int(dice.lognormvariate(5.5, 1.0)), int(dice.lognormvariate(5.0, 0.6))
        with contextlib.suppress(TimeoutError):  # they lose their patience
            async with site.chat("word " * words, headers=headers, max_tokens=tokens + 1, stream=True) as answer:
                await answer.read()
        await asyncio.sleep(dice.expovariate(1.0))
