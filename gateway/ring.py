"""Tenants and keys that were made at run time, as values: what is known at one version, and the changes to it.

Nothing here does I/O or reads a clock. A change gives back another ring, or raises Denied and gives none.
"""

from collections.abc import Collection, Mapping

import msgspec
from msgspec import Struct

from gateway.config import TenantSettings
from policies.reasons import Reason, Refusal

MOST_TENANTS = 10_000
MOST_KEYS = 20_000
"""Every process holds all of them and reads all of them anew at a change."""

KEEP_ENDED_S = 7 * 86_400
"""How long a revoked or expired key stays in the lists."""


class Denied(Exception):
    """The change can't be made; `refusal` says why."""

    def __init__(self, reason: Reason, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.refusal = Refusal(reason, message, param)


class TenantRecord(TenantSettings, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A tenant in the store. `created` is Unix time in seconds."""

    created: int = 0


class KeyRecord(Struct, frozen=True, kw_only=True):
    """A key in the store, under its SHA-256. Times are Unix seconds; 0 is never."""

    tenant: str
    id: str
    created: int = 0
    label: str = ""
    expires: int = 0
    revoked: int = 0

    def ends_at(self) -> int:
        """When it stops, or stopped, to open anything; 0 is never."""
        return min(self.expires, self.revoked) or self.expires or self.revoked

    def lives(self, now: float) -> bool:
        ends = self.ends_at()
        return not ends or now < ends


class Ring(Struct, frozen=True, kw_only=True):
    """Everything at one version. `keys` are by the SHA-256 of the secret, in hex.

    Versions count up; `stamp` tells two changes apart that a failover gave the same number.
    """

    version: int = 0
    stamp: str = ""
    tenants: Mapping[str, TenantRecord] = {}
    keys: Mapping[str, KeyRecord] = {}

    def __repr__(self) -> str:
        return f"<Ring {self.version}: {len(self.tenants)} tenants, {len(self.keys)} keys>"

    @property
    def mark(self) -> tuple[int, str]:
        return self.version, self.stamp

    def keys_of(self, tenant: str) -> dict[str, KeyRecord]:
        """A tenant's keys, oldest first."""
        return {digest: key for digest, key in self.keys.items() if key.tenant == tenant}


def put_tenant(ring: Ring, name: str, record: TenantRecord) -> Ring:
    """With a new tenant, or with new settings of a known one. Keys that an earlier tenant of the name left are gone."""
    known = name in ring.tenants
    if not known and len(ring.tenants) >= MOST_TENANTS:
        raise Denied(Reason.INVALID_REQUEST, f"there are {MOST_TENANTS} tenants, which is the most", "name")
    keys = ring.keys if known else {digest: key for digest, key in ring.keys.items() if key.tenant != name}
    return msgspec.structs.replace(ring, tenants={**ring.tenants, name: record}, keys=keys)


def drop_tenant(ring: Ring, name: str) -> Ring:
    """Without a tenant and its keys."""
    tenants = {each: record for each, record in ring.tenants.items() if each != name}
    keys = {digest: key for digest, key in ring.keys.items() if key.tenant != name}
    return msgspec.structs.replace(ring, tenants=tenants, keys=keys)


def put_key(ring: Ring, digest: str, key: KeyRecord, base: Collection[str]) -> Ring:
    """With one key more; ended ones are forgotten after a while, or for lack of room. `base` are the configuration's
    tenants."""
    if key.tenant not in ring.tenants and key.tenant not in base:
        raise no_tenant(key.tenant)
    kept = {each: one for each, one in ring.keys.items() if one.lives(key.created - KEEP_ENDED_S)}
    if len(kept) >= MOST_KEYS:
        kept = {each: one for each, one in kept.items() if one.lives(key.created)}
    if len(kept) >= MOST_KEYS:
        raise Denied(Reason.INVALID_REQUEST, f"there are {MOST_KEYS} keys, which is the most: revoke some", "name")
    return msgspec.structs.replace(ring, keys={**kept, digest: key})


def end_key(ring: Ring, tenant: str, key_id: str, at: int, now: float) -> Ring:
    """With a key that opens nothing from `at` on: revoked if that is now, else expiring. One that ended stays as it is.

    Raises Denied where the tenant has no such key.
    """
    digest, key = find_key(ring, tenant, key_id)
    if not key.lives(now) or (key.ends_at() and key.ends_at() <= at):
        return ring
    ended = msgspec.structs.replace(key, **({"revoked": at} if at <= now else {"expires": at}))
    return msgspec.structs.replace(ring, keys={**ring.keys, digest: ended})


def find_key(ring: Ring, tenant: str, key_id: str) -> tuple[str, KeyRecord]:
    """A tenant's key by its id. Raises Denied."""
    for digest, key in ring.keys.items():
        if key.id == key_id and key.tenant == tenant:
            return digest, key
    raise Denied(Reason.NOT_FOUND, f"the tenant {tenant!r} has no key {key_id!r}", "id")


def no_tenant(name: str) -> Denied:
    return Denied(Reason.NOT_FOUND, f"there is no tenant {name!r}", "name")
