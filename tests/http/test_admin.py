"""`/admin`: tenants and keys made while gateways run, on real stores."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.tenants import KNOWN_HEADERS, hash_key
from tests.faults.test_store import store
from tests.support import store as stores
from tests.support.site import POOL, Site, running
from tests.support.store import StoreServer

shared_server, server, own_server = stores.shared_server, stores.server, stores.own_server

ADMIN = f"""
[server]
admin_keys = ["{hash_key("admin")}"]
[[tenant]]
name = "alice"
keys = ["{hash_key("key-of-alice")}"]
{POOL}
"""
WITHIN_S = 1.0


class Operator:
    """Calls `/admin/tenants` of one site."""

    def __init__(self, site: Site) -> None:
        self.site = site

    async def __call__(
        self, method: str, path: str = "", body: Any = None, *, key: str | None = "admin", raw: bytes | None = None
    ) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        url = f"{self.site.url}/admin/tenants{path}"
        async with self.site.client.request(method, url, json=body, data=raw, headers=headers) as answer:
            text = await answer.text()
            if answer.status in (429, 503):
                assert int(answer.headers["retry-after"]) >= 1
            return answer.status, json.loads(text) if text else None

    async def key(self, tenant: str, **form: Any) -> dict[str, Any]:
        """A new key of a tenant, which is made if there is none."""
        if (await self("GET", f"/{tenant}"))[0] == 404:
            assert (await self("POST", "", {"name": tenant}))[0] == 201
        status, made = await self("POST", f"/{tenant}/keys", form)
        assert status == 201
        found: dict[str, Any] = made
        return found

    async def refusal(self, *call: Any, **more: Any) -> tuple[int, str, str | None]:
        """Status, reason and field of an answer that says no."""
        status, answer = await self(*call, **more)
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        assert answer["error"]["message"]
        return status, answer["error"]["code"], answer["error"]["param"]


async def opens(site: Site, key: str) -> bool:
    async with site.chat(max_tokens=1, headers={"authorization": f"Bearer {key}"}) as answer:
        await answer.read()
        assert answer.status in (200, 401)
        return bool(answer.status == 200)


async def until_opens(site: Site, key: str, expected: bool, within_s: float = WITHIN_S) -> None:
    async with asyncio.timeout(within_s):
        while await opens(site, key) is not expected:
            await asyncio.sleep(0.01)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running(ADMIN) as one:
        yield one


@pytest.fixture
def admin(site: Site) -> Operator:
    return Operator(site)


@asynccontextmanager
async def two(store: StoreServer) -> AsyncIterator[tuple[Site, Site]]:
    toml = f'{ADMIN}\n[store]\nurl = "{store.url}"\n'
    async with running(toml) as here, running(toml) as there:
        yield here, there


async def test_a_key_made_on_one_gateway_opens_the_other_and_is_revoked_from_there(server: StoreServer) -> None:
    async with two(server) as (here, there):
        key = await Operator(here).key("bob", label="for tests")
        assert await opens(here, key["key"])
        await until_opens(there, key["key"], expected=True)
        assert (await Operator(there)("DELETE", f"/bob/keys/{key['id']}"))[0] == 204
        assert not await opens(there, key["key"])
        await until_opens(here, key["key"], expected=False)
        assert await opens(here, "key-of-alice")


async def test_a_look_sees_what_another_gateway_has_just_made(server: StoreServer) -> None:
    async with two(server) as (here, there):
        for nth in range(5):
            assert (await Operator(here)("POST", "", {"name": f"t{nth}"}))[0] == 201
            assert (await Operator(there)("GET", f"/t{nth}"))[0] == 200
            assert (await Operator(there)("PATCH", f"/t{nth}", {"weight": 2}))[0] == 200
            assert (await Operator(here)("GET", f"/t{nth}"))[1]["weight"] == 2


async def test_the_store_has_hashes_only(server: StoreServer) -> None:
    async with two(server) as (here, _):
        secrets = [(await Operator(here).key("bob"))["key"] for _ in range(3)]
        _, rotated = await Operator(here)("POST", f"/bob/keys/{(await keys_of(here, 'bob'))[0]['id']}/rotate")
        everything = everything_in(server)
        assert hash_key(secrets[0]).removeprefix("sha256:").encode() in everything
        for secret in (*secrets, rotated["key"], "admin", "key-of-alice"):
            assert secret.removeprefix("sk-").encode() not in everything


async def keys_of(site: Site, tenant: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await Operator(site)("GET", f"/{tenant}/keys"))[1]["data"]
    return found


def everything_in(server: StoreServer) -> bytes:
    reads = {"hash": ("HGETALL",), "stream": ("XRANGE", "-", "+"), "string": ("GET",), "set": ("SMEMBERS",)}
    reads["zset"] = ("ZRANGE", "0", "-1")
    parts = []
    names = server.keys()
    for key in names:
        verb, *rest = reads[server("TYPE", key).decode()]
        parts += [key.encode(), repr(server(verb, key, *rest)).encode()]
    return b"\n".join(parts)


async def test_a_tenant_is_made_changed_and_removed(admin: Operator) -> None:
    form = {"name": "bob", "weight": 2.5, "class": "batch", "models": ["demo"], "tokens_per_min": 1_000}
    status, made = await admin("POST", "", form)
    assert status == 201
    assert made.items() >= {**form, "source": "store", "keys": 0, "requests_per_min": 0, "max_queued": 0}.items()
    assert await admin("POST", "", form) == (200, made)
    assert await admin("GET", "/bob") == (200, made)
    status, changed = await admin("PATCH", "/bob", {"class": "", "models": [], "max_queued": 7})
    assert (status, changed) == (200, made | {"class": "", "models": [], "max_queued": 7})
    tenant = next(one for one in admin.site.trunk.tenants.all if one.name == "bob")
    assert (tenant.weight, tenant.rank, tenant.limits.max_queued, tenant.limits.tokens_per_min) == (2.5, 0, 7, 1_000)
    _, listed = await admin("GET")
    assert [(one["name"], one["source"], one["keys"]) for one in listed["data"]] == [
        ("alice", "config", 1),
        ("bob", "store", 0),
    ]
    key = (await admin.key("bob"))["key"]
    assert await opens(admin.site, key)
    assert await admin("DELETE", "/bob") == (204, None)
    assert not await opens(admin.site, key)
    assert await admin.refusal("DELETE", "/bob") == (404, "not_found", "name")
    await admin.key("bob")
    assert not await opens(admin.site, key)


async def test_a_tenant_is_held_to_its_class_and_models(admin: Operator) -> None:
    assert (await admin("POST", "", {"name": "bob", "class": "batch"}))[0] == 201
    key = (await admin.key("bob"))["key"]
    headers = {"authorization": f"Bearer {key}", "x-priority-class": "interactive"}
    async with admin.site.chat(max_tokens=1, headers=headers) as answer:
        assert (answer.status, answer.headers["x-signalbox-class"]) == (200, "batch")
    async with admin.site.client.get(f"{admin.site.url}/v1/models", headers={"x-api-key": key}) as answer:
        assert [one["id"] for one in (await answer.json())["data"]] == ["demo"]


async def test_a_secret_is_shown_once_and_never_cached(admin: Operator) -> None:
    key = await admin.key("bob", label="ci", expires_in_s=3_600)
    assert key["expires"] - key["created"] in (3_600, 3_601)
    _, listed = await admin("GET", "/bob/keys")
    assert listed["data"] == [{name: value for name, value in key.items() if name != "key"}]
    assert await admin("GET", f"/bob/keys/{key['id']}") == (200, listed["data"][0])
    headers = {"authorization": "Bearer admin"}
    async with admin.site.client.post(f"{admin.site.url}/admin/tenants/bob/keys", headers=headers) as answer:
        assert (answer.status, answer.headers["cache-control"]) == (201, "no-store")


async def test_a_key_is_rotated_at_once_or_with_a_grace(admin: Operator) -> None:
    first = await admin.key("bob", label="ci", expires_in_s=3_600)
    status, second = await admin("POST", f"/bob/keys/{first['id']}/rotate")
    assert (status, second["label"], second["expires"]) == (201, "ci", first["expires"])
    assert not await opens(admin.site, first["key"])
    assert await opens(admin.site, second["key"])
    _, third = await admin("POST", f"/bob/keys/{second['id']}/rotate", {"grace_s": 1, "expires_in_s": 0})
    assert third["expires"] is None
    assert await opens(admin.site, second["key"])
    await until_opens(admin.site, second["key"], expected=False, within_s=3)
    assert await opens(admin.site, third["key"])
    assert {one["id"]: one["state"] for one in await keys_of(admin.site, "bob")} == {
        first["id"]: "revoked",
        second["id"]: "expired",
        third["id"]: "good",
    }
    for ended in (first, second):
        assert await admin.refusal("POST", f"/bob/keys/{ended['id']}/rotate") == (400, "invalid_request", "id")


async def test_revoking_again_is_fine_and_a_wrong_id_is_not(admin: Operator) -> None:
    key = await admin.key("bob")
    for _ in range(2):
        assert await admin("DELETE", f"/bob/keys/{key['id']}") == (204, None)
    assert await admin.refusal("DELETE", f"/alice/keys/{key['id']}") == (404, "not_found", "id")
    assert await admin.refusal("DELETE", "/bob/keys/no") == (404, "not_found", "id")
    assert await admin.refusal("GET", "/bob/keys/no") == (404, "not_found", "id")
    assert await admin.refusal("POST", "/bob/keys/no/rotate") == (404, "not_found", "id")


async def test_a_configured_tenant_gets_further_keys_and_nothing_else(admin: Operator) -> None:
    key = await admin.key("alice")
    assert await opens(admin.site, key["key"])
    own, made = await keys_of(admin.site, "alice")
    assert (own["source"], made["source"], (await admin("GET", "/alice"))[1]["keys"]) == ("config", "store", 2)
    for call in (
        ("PATCH", "/alice", {"weight": 2}),
        ("DELETE", "/alice"),
        ("POST", "", {"name": "alice"}),
    ):
        assert await admin.refusal(*call) == (403, "forbidden", "name")
    for call in (("DELETE", f"/alice/keys/{own['id']}"), ("POST", f"/alice/keys/{own['id']}/rotate")):
        assert await admin.refusal(*call) == (403, "forbidden", "id")
    assert await admin("DELETE", f"/alice/keys/{made['id']}") == (204, None)
    assert not await opens(admin.site, key["key"])
    assert await opens(admin.site, "key-of-alice")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (("POST", "", {}), "name"),
        (("POST", "", {"name": 1}), "name"),
        (("POST", "", {"name": "a b"}), "name"),
        (("POST", "", {"name": "b\n"}), "name"),
        (("POST", "", {"name": "b", "wat": 1}), "wat"),
        (("POST", "", {"name": "b", "weight": "2"}), "weight"),
        (("POST", "", {"name": "b", "weight": 0}), "weight"),
        (("POST", "", {"name": "b", "class": "gold"}), "class"),
        (("POST", "", {"name": "b", "models": ["demo", "x"]}), "models[1]"),
        (("POST", "", {"name": "b", "tokens_per_min": -1}), "tokens_per_min"),
        (("POST", "", {"name": "b", "requests_per_min": 10**13}), "requests_per_min"),
        (("POST", "", {"name": "b", "max_queued": 1.5}), "max_queued"),
        (("POST", "", [1]), None),
        (("PATCH", "/bob", {"weight": None}), "weight"),
        (("PATCH", "/bob", {"name": "c"}), "name"),
        (("PATCH", "/bob", {"class": "gold"}), "class"),
        (("PATCH", "/bob", {"models": ["x"]}), "models[0]"),
        (("POST", "/bob/keys", {"label": 1}), "label"),
        (("POST", "/bob/keys", {"label": "a\nb"}), "label"),
        (("POST", "/bob/keys", {"label": "x" * 201}), "label"),
        (("POST", "/bob/keys", {"expires_in_s": -1}), "expires_in_s"),
    ],
)
async def test_a_bad_form_names_its_field_and_changes_nothing(admin: Operator, call: Any, field: str | None) -> None:
    await admin.key("bob")
    before = admin.site.trunk.keyring.ring
    assert await admin.refusal(*call) == (400, "invalid_request", field)
    assert admin.site.trunk.keyring.ring is before


async def test_what_is_no_form_at_all(admin: Operator) -> None:
    for raw in (b"{", b"\xff\xfe", b'{"name": "\xff"}', b"null", b"[" * 10_000):
        assert await admin.refusal("POST", raw=raw) == (400, "invalid_request", None)
    assert await admin.refusal("POST", raw=b" " * 70_000) == (413, "too_large", None)
    assert await admin.refusal("PUT") == (405, "method_not_allowed", None)


async def test_the_same_name_with_other_settings_is_refused(admin: Operator) -> None:
    assert (await admin("POST", "", {"name": "bob"}))[0] == 201
    assert await admin.refusal("POST", "", {"name": "bob", "weight": 2}) == (400, "invalid_request", "name")


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "%00", "a%2Fb", "%0d%0a", "%ff", "%F0%9F%98%80", "x" * 5_000, "*", "%7Bsignalbox%7D:keys"]
)
async def test_hostile_names_lead_nowhere(admin: Operator, name: str) -> None:
    import yarl

    for method, path in (("GET", ""), ("DELETE", ""), ("PATCH", ""), ("POST", "/keys"), ("DELETE", "/keys/x")):
        url = yarl.URL(f"{admin.site.url}/admin/tenants/{name}{path}", encoded=True)
        headers = {"authorization": "Bearer admin"}
        async with admin.site.client.request(method, url, headers=headers, data=b"{}") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "not_found"
    assert admin.site.trunk.keyring.ring.version == 0


async def test_only_an_admin_key_opens_it(admin: Operator) -> None:
    key = await admin.key("bob")
    for wrong in (None, "", "Admin", "admin2", "x" * 10_000):
        assert await admin.refusal("GET", key=wrong) == (401, "unauthenticated", None)
    for tenants in (key["key"], "key-of-alice"):
        assert await admin.refusal("DELETE", "/bob", key=tenants) == (403, "forbidden", None)
    async with admin.site.client.get(f"{admin.site.url}/admin/tenants", headers={"x-api-key": "admin"}) as answer:
        assert answer.status == 200
    assert not await opens(admin.site, "admin")


async def test_without_an_admin_key_it_is_off(server: StoreServer) -> None:
    async with running(POOL) as site:
        for key in (None, "admin"):
            assert await Operator(site).refusal("GET", key=key) == (404, "not_found", None)
        _, answer = await Operator(site)("POST", "", {"name": "bob"})
        assert "server.admin_key" in answer["error"]["message"]
        assert await opens(site, "anything")
        async with site.client.get(f"{site.url}/docs/openapi.json") as described:
            assert not [path for path in (await described.json())["paths"] if "admin" in path]


async def test_with_an_admin_key_nobody_is_let_in_before_there_is_a_tenant() -> None:
    async with running(f'[server]\nadmin_keys = ["{hash_key("admin")}"]\n{POOL}') as site:
        assert not await opens(site, "anything")
        key = await Operator(site).key("bob")
        assert await opens(site, key["key"])
        assert (await Operator(site)("DELETE", "/bob"))[0] == 204
        assert not await opens(site, key["key"])
        assert not await opens(site, "anything")


async def test_random_keys_leave_nothing_behind(admin: Operator) -> None:
    tenants = admin.site.trunk.tenants
    for nth in range(200):
        assert not await opens(admin.site, f"sk-{nth}")
    assert not tenants._by_header
    key = (await admin.key("bob"))["key"]
    for nth in range(1, 400):
        assert tenants.of(b"Bearer" + b" " * nth + key.encode()) is not None
    assert len(tenants._by_header) < 256 <= KNOWN_HEADERS
    await admin.key("bob")
    assert not tenants._by_header


async def test_while_the_store_is_lost_keys_go_on_and_changes_are_refused(own_server: StoreServer) -> None:
    async with running(f'{ADMIN}\n[store]\nurl = "{own_server.url}"\n') as site:
        admin = Operator(site)
        key = await admin.key("bob")
        own_server.kill()
        await site.until(lambda: site.trunk.keyring.away)
        for call in (
            ("POST", "", {"name": "carol"}),
            ("PATCH", "/bob", {"weight": 2}),
            ("DELETE", "/bob"),
            ("POST", "/bob/keys"),
            ("DELETE", f"/bob/keys/{key['id']}"),
        ):
            assert await admin.refusal(*call) == (503, "store_lost", None)
        assert (await admin("GET", "/bob"))[1]["keys"] == 1
        headers = {"authorization": f"Bearer {key['key']}"}
        async with site.client.get(f"{site.url}/v1/models", headers=headers) as answer:
            assert answer.status == 200
        own_server.start()
        await site.until(lambda: not (site.trunk.keyring.away or site.trunk.queue.lost))
        assert await opens(site, key["key"])
        assert (await admin("DELETE", f"/bob/keys/{key['id']}"))[0] == 204
        assert not await opens(site, key["key"])


async def test_an_embedded_store_that_is_killed_takes_no_key_with_it(admin: Operator) -> None:
    import os
    import signal

    key = await admin.key("bob")
    before = store(admin.site)
    os.kill(before, signal.SIGKILL)
    await admin.site.until(lambda: admin.site.trunk.queue._embedded.pid not in (None, before))  # type: ignore[union-attr]
    await admin.site.until(lambda: not (admin.site.trunk.keyring.away or admin.site.trunk.queue.lost))
    assert (await admin("DELETE", f"/bob/keys/{key['id']}"))[0] == 204
    assert not await opens(admin.site, key["key"])


async def test_it_is_described(admin: Operator) -> None:
    async with admin.site.client.get(f"{admin.site.url}/docs/openapi.json") as answer:
        described = await answer.json()
    paths = {path: set(one) for path, one in described["paths"].items() if path.startswith("/admin")}
    assert paths == {
        "/admin/tenants": {"get", "post"},
        "/admin/tenants/{name}": {"get", "patch", "delete"},
        "/admin/tenants/{name}/keys": {"get", "post"},
        "/admin/tenants/{name}/keys/{key_id}": {"get", "delete"},
        "/admin/tenants/{name}/keys/{key_id}/rotate": {"post"},
    }
    made = described["paths"]["/admin/tenants"]["post"]
    assert made["security"] == [{"admin": []}]
    schema = made["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["name"]
    assert {"weight", "class", "models", "max_queued"} < schema["properties"].keys()
    patch = described["paths"]["/admin/tenants/{name}"]["patch"]["requestBody"]["content"]["application/json"]["schema"]
    assert patch["properties"].keys() == schema["properties"].keys() - {"name"}
