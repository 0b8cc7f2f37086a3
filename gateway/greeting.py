"""What `signalbox serve` prints when it is ready: the address, the pools, what to try, how to attach an engine."""

import os
import shutil
import sys

import msgspec

from gateway.config import Config, PoolConfig, ServerConfig
from gateway.tenants import DEMO_KEYS, Tenant, Tenants

EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


def greeting(config: Config, tenants: Tenants, port: int) -> str:
    """Lines for people. `port` is the one that was really bound."""
    url = address(config.server, port)
    lines = [f"Signalbox serves {url}", "", *map(_pool, config.pools), "", "Try it:", ""]
    lines += [f"  {line}" for line in _curl(url, config, tenants)]
    lines += [
        "",
        f"Models: {url}/v1/models   API: {url}/docs   Ready: {url}/readyz"
        + (f"   Console: {url}/console" if tenants.admin else ""),
        f"Attach an engine: {_command()} serve --upstream http://HOST:PORT for any OpenAI-compatible server,",
        "or a [[pool]] in config.toml for several pools, tenants and classes (docs/configuration.md).",
    ]
    return "\n".join(lines)


def address(server: ServerConfig, port: int) -> str:
    """The URL to reach the server by from this machine."""
    host = "localhost" if server.host in EVERYWHERE else server.host
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if server.tls_cert_file else 'http'}://{host}:{port}"


def _command() -> str:
    """How to call us again."""
    if shutil.which("signalbox"):
        return "signalbox"
    called = os.path.relpath(sys.argv[0])
    return "python -m gateway" if called.endswith("__main__.py") else called


def _pool(pool: PoolConfig) -> str:
    names = pool.model + (f" (also {', '.join(pool.aliases)})" if pool.aliases else "")
    return f"  {names}: {', '.join(f'{one.name} ({_kind(one)})' for one in pool.backends)}"


def _kind(engine: msgspec.Struct) -> str:
    return str(engine.__struct_config__.tag)


def _curl(url: str, config: Config, tenants: Tenants) -> list[str]:
    model, key = _example(config, tenants)
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    return [
        f"curl -N {url}/v1/chat/completions \\",
        *([f"  -H 'Authorization: Bearer {key}' \\"] if key else []),
        "  -H 'Content-Type: application/json' \\",
        f"  -d '{msgspec.json.encode(body).decode()}'",
    ]


def _example(config: Config, tenants: Tenants) -> tuple[str, str]:
    """A model and the key to ask for it with; no key where everyone is let in."""
    if tenants.open is not None:
        return config.pools[0].model, ""
    for key in sorted(DEMO_KEYS):
        if (tenant := tenants.of_key(key.encode())) is not None:
            return _first_model(config, tenant), key
    for tenant in tenants.all:
        return _first_model(config, tenant), f"KEY_OF_{tenant.name.upper()}"
    return config.pools[0].model, "KEY"


def _first_model(config: Config, tenant: Tenant) -> str:
    return next(pool.model for pool in config.pools if tenant.may_use(pool.model))
