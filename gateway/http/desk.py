"""Looks and changes that `/admin/tenants` offers, over the configuration and the keyring."""

import logging
import math
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from gateway.clock import wall
from gateway.config import Config, TenantSettings, setting_faults
from gateway.http.admin_forms import (
    KeyView,
    NewKey,
    NewKeyView,
    NewTenant,
    Rotation,
    TenantChanges,
    TenantView,
)
from gateway.keyring import Keyring
from gateway.ring import (
    Denied,
    KeyRecord,
    Ring,
    TenantRecord,
    drop_tenant,
    end_key,
    find_key,
    no_tenant,
    put_key,
    put_tenant,
)
from gateway.tenants import Tenants, hash_key, new_key
from policies.reasons import Reason

log = logging.getLogger(__name__)

_SETTINGS = tuple(one.name for one in msgspec.structs.fields(TenantSettings))


class Desk(Struct):
    """Every method raises Denied where the answer is no; those that change something StoreAway or StoreUnfit."""

    config: Config
    known: Tenants
    keyring: Keyring

    async def tenants(self) -> list[TenantView]:
        """Those of the configuration first, then the others by name."""
        ring = await self.keyring.newest()
        names = [*self.known.base, *sorted(ring.tenants.keys() - self.known.base.keys())]
        counts = self._counts(ring)
        return [self._view(ring, name, counts.get(name, 0)) for name in names]

    async def tenant(self, name: str) -> TenantView:
        ring = await self.keyring.newest()
        return self._view(ring, name, self._counts(ring).get(name, 0))

    async def make(self, form: NewTenant) -> tuple[TenantView, bool]:
        """The tenant, and whether it is a new one: asking twice for the same makes one."""
        self._only_stored(form.name)
        settings = {name: getattr(form, name) for name in _SETTINGS}
        record = TenantRecord(**settings, created=int(wall()))
        self._check(record)
        made = True

        def change(ring: Ring) -> Ring:
            nonlocal made
            made = (there := ring.tenants.get(form.name)) is None
            if there is None:
                return put_tenant(ring, form.name, record)
            if msgspec.structs.replace(there, created=record.created) != record:
                message = f"there is a tenant {form.name!r} with other settings: change it with PATCH"
                raise Denied(Reason.INVALID_REQUEST, message, "name")
            return ring

        ring = await self.keyring.change(change)
        if made:
            log.info("tenant %s is made", form.name)
        return self._view(ring, form.name, self._counts(ring).get(form.name, 0)), made

    async def alter(self, name: str, form: TenantChanges) -> TenantView:
        changes = {field: value for field in _SETTINGS if (value := getattr(form, field)) is not UNSET}

        def change(ring: Ring) -> Ring:
            record = self._stored(ring, name)
            altered = msgspec.structs.replace(record, **changes)
            self._check(altered)
            return ring if altered == record else put_tenant(ring, name, altered)

        ring = await self.keyring.change(change)
        log.info("tenant %s is changed: %s", name, ", ".join(changes) or "nothing")
        return self._view(ring, name, self._counts(ring).get(name, 0))

    async def remove(self, name: str) -> None:
        def change(ring: Ring) -> Ring:
            self._stored(ring, name)
            return drop_tenant(ring, name)

        await self.keyring.change(change)
        log.info("tenant %s is removed", name)

    async def keys(self, name: str) -> list[KeyView]:
        """Those of the configuration first, then the others, oldest first."""
        ring, now = await self.keyring.newest(), wall()
        self._settings(ring, name)
        stored = sorted(ring.keys_of(name).values(), key=lambda key: (key.created, key.id))
        return [*self._configured(name), *(KeyView(**_facts(key, now)) for key in stored)]

    async def key(self, name: str, key_id: str) -> KeyView:
        for view in await self.keys(name):
            if view.id == key_id:
                return view
        raise Denied(Reason.NOT_FOUND, f"the tenant {name!r} has no key {key_id!r}", "id")

    async def make_key(self, name: str, form: NewKey) -> NewKeyView:
        now = wall()
        expires = _after(now, form.expires_in_s)
        record = KeyRecord(tenant=name, id=_key_id(), created=int(now), label=_printable(form.label), expires=expires)
        return await self._give_out(record, now, lambda ring, digest: put_key(ring, digest, record, self.known.base))

    async def rotate(self, name: str, key_id: str, form: Rotation) -> NewKeyView:
        """A key that has ended can't be rotated: its holder would be given one anew."""
        now = wall()
        self._not_configured(name, key_id)
        _, old = find_key(await self.keyring.newest(), name, key_id)
        expires = old.expires if form.expires_in_s is UNSET else _after(now, form.expires_in_s)
        record = KeyRecord(tenant=name, id=_key_id(), created=int(now), label=old.label, expires=expires)

        def change(ring: Ring, digest: str) -> Ring:
            if not find_key(ring, name, key_id)[1].lives(now):
                raise Denied(Reason.INVALID_REQUEST, f"the key {key_id!r} has ended: make a new one", "id")
            ended = end_key(ring, name, key_id, _after(now, form.grace_s) or int(now), now)
            return put_key(ended, digest, record, self.known.base)

        view = await self._give_out(record, now, change)
        log.info("key %s of tenant %s ends in %d s", key_id, name, form.grace_s)
        return view

    async def revoke(self, name: str, key_id: str) -> None:
        """At once. Of a key that has ended already it is no error."""
        self._not_configured(name, key_id)
        now = wall()
        await self.keyring.change(lambda ring: end_key(ring, name, key_id, int(now), now))
        log.info("key %s of tenant %s is revoked", key_id, name)

    async def _give_out(self, record: KeyRecord, now: float, change: Callable[[Ring, str], Ring]) -> NewKeyView:
        secret = new_key()
        digest = hash_key(secret).removeprefix("sha256:")
        await self.keyring.change(lambda ring: change(ring, digest))
        log.info("key %s of tenant %s is made", record.id, record.tenant)
        return NewKeyView(**_facts(record, now), key=secret)

    # -- what is there ----------------------------------------------------------------------------------------------

    def _only_stored(self, name: str) -> None:
        if name in self.known.base:
            raise Denied(
                Reason.FORBIDDEN, f"the tenant {name!r} is in the configuration and can be changed only there", "name"
            )

    def _stored(self, ring: Ring, name: str) -> TenantRecord:
        self._only_stored(name)
        if (record := ring.tenants.get(name)) is None:
            raise no_tenant(name)
        return record

    def _settings(self, ring: Ring, name: str) -> TenantSettings:
        for entry in self.config.tenants:
            if entry.name == name:
                return entry
        return self._stored(ring, name)

    def _check(self, settings: TenantSettings) -> None:
        for field, message in setting_faults(self.config, settings):
            raise Denied(Reason.INVALID_REQUEST, f"{field}: {message}", field)

    def _counts(self, ring: Ring) -> dict[str, int]:
        """Good keys by tenant."""
        now, counts = wall(), {name: len(self.known.digests_of(name)) for name in self.known.base}
        for key in ring.keys.values():
            if key.lives(now):
                counts[key.tenant] = counts.get(key.tenant, 0) + 1
        return counts

    def _view(self, ring: Ring, name: str, keys: int) -> TenantView:
        found = self._settings(ring, name)
        settings = {field: getattr(found, field) for field in _SETTINGS} | {"models": list(found.models)}
        if isinstance(found, TenantRecord):
            return TenantView(name=name, source="store", created=found.created, keys=keys, **settings)
        return TenantView(name=name, source="config", created=None, keys=keys, **settings)

    def _configured(self, name: str) -> list[KeyView]:
        return [
            KeyView(
                id=f"config-{digest.hex()[:12]}", tenant=name, source="config", state="good",
                label="", created=None, expires=None, revoked=None,
            )
            for digest in self.known.digests_of(name)
        ]  # fmt: skip

    def _not_configured(self, name: str, key_id: str) -> None:
        if any(view.id == key_id for view in self._configured(name)):
            message = f"the key {key_id!r} is in the configuration and can be changed only there"
            raise Denied(Reason.FORBIDDEN, message, "id")


def _key_id() -> str:
    return f"key_{secrets.token_hex(8)}"


def _after(now: float, seconds: int) -> int:
    """Unix time so many seconds from now, not too early; 0 for none."""
    return math.ceil(now + seconds) if seconds else 0


def _printable(label: str) -> str:
    if not label.isprintable():
        raise Denied(Reason.INVALID_REQUEST, "label: printable characters only", "label")
    return label


def _facts(key: KeyRecord, now: float) -> dict[str, Any]:
    state = "revoked" if key.revoked else "good" if key.lives(now) else "expired"
    return {
        "id": key.id, "tenant": key.tenant, "source": "store", "state": state, "label": key.label,
        "created": key.created, "expires": key.expires or None, "revoked": key.revoked or None,
    }  # fmt: skip
