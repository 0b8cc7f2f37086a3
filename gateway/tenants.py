"""API keys to tenants. Keys are known by their SHA-256 only; a secret is read once, at load, and hashed."""

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from gateway.config import Config, ConfigError, TenantConfig, models

DEMO_KEYS = frozenset({"sk-demo-alice", "sk-demo-bob"})
"""In the shipped configuration and in print, so good for loopback only."""

KNOWN_HEADERS = 4_096


class Tenant(Struct, frozen=True):
    """Who asks. `rank` is the best class rank it may use; `models` are pools' models, empty for all."""

    name: str
    index: int = 0
    weight: float = 1.0
    rank: int = 0
    models: frozenset[str] = frozenset()

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
    """Finds the tenant of a request. Immutable but for its memory of headers; a reload makes a new one."""

    def __init__(self, config: Config, environ: Mapping[str, str] = os.environ) -> None:
        """Reads the key files and variables. Raises ConfigError where one is missing, empty or names a key twice."""
        served = models(config)
        self.all = tuple(_tenant(config, at, served) for at in range(len(config.tenants)))
        self.open = None if self.all else Tenant("default")
        self._by_digest: dict[bytes, Tenant] = {}
        self._by_header: dict[bytes, Tenant] = {}
        for at, (tenant, entry) in enumerate(zip(self.all, config.tenants, strict=True)):
            for path, key_hash in _hashes(f"$.tenant[{at}]", entry, environ):
                taken = self._by_digest.setdefault(bytes.fromhex(key_hash.removeprefix("sha256:")), tenant)
                if taken is not tenant:
                    raise ConfigError(path, f"a key of {tenant.name!r} also belongs to {taken.name!r}")

    def __repr__(self) -> str:
        return f"<Tenants {'open' if self.open else len(self.all)}, {len(self._by_digest)} keys>"

    def of(self, authorization: bytes | None) -> Tenant | None:
        """The tenant of an `Authorization` header value, or None. With no tenants configured everyone is `default`."""
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

    def _look_up(self, authorization: bytes) -> Tenant | None:
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        tenant = self.of_key(key.strip())
        if tenant is not None:
            if len(self._by_header) >= KNOWN_HEADERS:
                del self._by_header[next(iter(self._by_header))]
            self._by_header[authorization] = tenant
        return tenant


def _tenant(config: Config, at: int, served: Mapping[str, str]) -> Tenant:
    entry = config.tenants[at]
    top = config.class_named(entry.top_class)
    return Tenant(
        name=entry.name,
        index=at,
        weight=entry.weight,
        rank=top.rank if top else min(one.rank for one in config.classes),
        models=frozenset(served[name] for name in entry.models),
    )


def _hashes(path: str, entry: TenantConfig, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for nth, key_hash in enumerate(entry.keys):
        yield f"{path}.keys[{nth}]", key_hash
    if entry.key_env:
        key = environ.get(entry.key_env, "").strip()
        if not key:
            raise ConfigError(f"{path}.key_env", f"the environment variable {entry.key_env} is not set or empty")
        yield f"{path}.key_env", hash_key(key)
    if entry.key_file:
        for key in _lines(f"{path}.key_file", entry.key_file):
            yield f"{path}.key_file", hash_key(key)


def _lines(path: str, file: str) -> list[str]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(path, f"can't read {file}: {error}") from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ConfigError(path, f"{file} holds no key")
    return keys
