"""API keys to tenants. Keys are known by their SHA-256 only; a secret is read once, at load, and hashed."""

import hashlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from gateway.config import Config, ConfigError, TenantSettings, models
from gateway.ring import Ring
from policies.quota import TenantLimits

log = logging.getLogger(__name__)

DEMO_KEYS = frozenset({"sk-demo-alice", "sk-demo-bob"})
"""In the shipped configuration and in print, so good for loopback only."""

KNOWN_HEADERS = 4_096
LONGEST_HEADER = 256
"""Bytes of a header that is remembered; a key may come with any amount of white space before it."""


class Tenant(Struct, frozen=True):
    """Who asks. `rank` is the best class rank it may use; `models` are pools' models, empty for all."""

    name: str
    weight: float = 1.0
    rank: int = 0
    models: frozenset[str] = frozenset()
    limits: TenantLimits = TenantLimits()

    def may_use(self, model: str) -> bool:
        """Whether it may use the pool of `model` (the pool's own name, no alias)."""
        return not self.models or model in self.models


def hash_key(key: str) -> str:
    """The form in which a key stands in the configuration."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A fresh secret of 256 bits."""
    return "sk-" + secrets.token_urlsafe(32)


class Tenants:
    """Finds the tenant of a request: those of the configuration, and those of the ring it was last given.

    `base` are the configuration's, which never change; `all` has both. `open` is the tenant of everyone where there
    are neither tenants nor an admin key to make some.
    """

    def __init__(self, config: Config, environ: Mapping[str, str] = os.environ) -> None:
        """Reads the key files and variables. Raises ConfigError where one is missing, empty or names a key twice."""
        self._config = config
        self._served = models(config)
        self.base = {one.name: self._tenant(one.name, one, f"$.tenant[{at}]") for at, one in enumerate(config.tenants)}
        self.all = tuple(self.base.values())
        self.admin = AdminKeys(config, environ)
        self.open = None if self.all or self.admin else Tenant("default")
        self._of_base = self._base_keys(environ)
        self._by_digest: Mapping[bytes, Tenant] = self._of_base
        self._by_header: dict[bytes, Tenant] = {}
        self._made: dict[str, tuple[TenantSettings, Tenant]] = {}

    def __repr__(self) -> str:
        return f"<Tenants {'open' if self.open else len(self.all)}, {len(self._by_digest)} keys>"

    def of(self, authorization: bytes | None) -> Tenant | None:
        """The tenant of an `Authorization` header value, or None; in an open gateway, `default` whatever it says."""
        if self.open is not None:
            return self.open
        if authorization is None:
            return None
        return self._by_header.get(authorization) or self._look_up(authorization)

    def of_key(self, key: bytes) -> Tenant | None:
        """The tenant of a bare key, as in `x-api-key`, or None."""
        return self.open or self._by_digest.get(hashlib.sha256(key).digest())

    def has_demo_keys(self) -> bool:
        """Whether a key that everyone can read in the shipped configuration opens this gateway."""
        return any(hashlib.sha256(key.encode()).digest() in self._by_digest for key in DEMO_KEYS)

    def adopt(self, ring: Ring, now: float) -> float:
        """Take over what the store has, in one step: what a header was known for is forgotten.

        `now` is Unix time in seconds; returns when the first of the keys ends, infinity if none does.
        """
        self._made = {name: self._adopted(name, record) for name, record in ring.tenants.items()}
        made = {name: tenant for name, (_, tenant) in self._made.items() if name not in self.base}
        known = {**made, **self.base}
        keys: dict[bytes, Tenant] = {}
        first = float("inf")
        for digest, key in ring.keys.items():
            tenant, ends = known.get(key.tenant), key.ends_at()
            if tenant is not None and (not ends or now < ends):
                keys[bytes.fromhex(digest)] = tenant
                first = min(first, ends or first)
        if self.open is not None and len(known) > len(self.all):
            log.warning("the store has %d tenants, but without an admin key everyone is let in here", len(known))
        self.all = (*self.base.values(), *made.values())
        self._by_digest = {**keys, **self._of_base}
        self._by_header = {}
        return first

    def digests_of(self, name: str) -> list[bytes]:
        """The hashes of a configured tenant's own keys."""
        return [digest for digest, tenant in self._of_base.items() if tenant.name == name]

    def _look_up(self, authorization: bytes) -> Tenant | None:
        key = bearer(authorization)
        tenant = self.of_key(key) if key is not None else None
        if tenant is not None and len(authorization) <= LONGEST_HEADER:
            if len(self._by_header) >= KNOWN_HEADERS:
                del self._by_header[next(iter(self._by_header))]
            self._by_header[authorization] = tenant
        return tenant

    def _adopted(self, name: str, record: TenantSettings) -> tuple[TenantSettings, Tenant]:
        """A stored tenant; the same one as before while its record is."""
        if (was := self._made.get(name)) is not None and was[0] is record:
            return was
        return record, self._tenant(name, record, f"the stored tenant {name!r}")

    def _tenant(self, name: str, settings: TenantSettings, where: str) -> Tenant:
        """What the store says may refer to what this configuration lacks: that opens nothing, and is logged."""
        classes = self._config.classes
        top = self._config.class_named(settings.top_class)
        rank = top.rank if top else min(one.rank for one in classes)
        if settings.top_class and top is None:
            rank = max(one.rank for one in classes)
            log.warning("%s: there is no class %r here; it gets the lowest one", where, settings.top_class)
        if strange := [model for model in settings.models if model not in self._served]:
            log.warning("%s: there is no model %s here", where, ", ".join(map(repr, strange)))
        allowed = frozenset(self._served.get(model, model) for model in settings.models)
        return Tenant(name, settings.weight, rank, allowed, settings.limits)

    def _base_keys(self, environ: Mapping[str, str]) -> dict[bytes, Tenant]:
        found: dict[bytes, Tenant] = {}
        for at, (tenant, entry) in enumerate(zip(self.all, self._config.tenants, strict=True)):
            path = f"$.tenant[{at}]"
            named = (f"{path}.key_env", entry.key_env), (f"{path}.key_file", entry.key_file)
            for where, digest in _digests((f"{path}.keys", entry.keys), *named, environ):
                taken = found.setdefault(digest, tenant)
                if taken is not tenant:
                    raise ConfigError(where, f"a key of {tenant.name!r} also belongs to {taken.name!r}")
                if digest in self.admin.digests:
                    raise ConfigError(where, f"a key of {tenant.name!r} is also an admin key")
        return found


class AdminKeys:
    """The keys that open `/admin`, of the configuration. False where there are none."""

    def __init__(self, config: Config, environ: Mapping[str, str] = os.environ) -> None:
        """Reads the key file and the variable. Raises ConfigError where one is missing or empty."""
        server, path = config.server, "$.server.admin_key"
        named = (f"{path}_env", server.admin_key_env), (f"{path}_file", server.admin_key_file)
        self.digests = frozenset(digest for _, digest in _digests((f"{path}s", server.admin_keys), *named, environ))

    def __bool__(self) -> bool:
        return bool(self.digests)

    def __repr__(self) -> str:
        return f"<AdminKeys {len(self.digests)}>"

    def let_in(self, key: bytes) -> bool:
        return hashlib.sha256(key).digest() in self.digests


def bearer(authorization: bytes) -> bytes | None:
    """The key in an `Authorization` header value; None where there is none."""
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def _digests(
    hashed: tuple[str, tuple[str, ...]], env: tuple[str, str], file: tuple[str, str], environ: Mapping[str, str]
) -> Iterator[tuple[str, bytes]]:
    """The SHA-256 of every key that three settings give, with the place of each; they come as (path, value)."""
    for nth, key_hash in enumerate(hashed[1]):
        yield f"{hashed[0]}[{nth}]", bytes.fromhex(key_hash.removeprefix("sha256:"))
    if env[1]:
        key = environ.get(env[1], "").strip()
        if not key:
            raise ConfigError(env[0], f"the environment variable {env[1]} is not set or empty")
        yield env[0], hashlib.sha256(key.encode()).digest()
    for key in _lines(*file) if file[1] else ():
        yield file[0], hashlib.sha256(key.encode()).digest()


def _lines(path: str, file: str) -> list[str]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(path, f"can't read {file}: {error}") from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ConfigError(path, f"{file} holds no key")
    return keys
