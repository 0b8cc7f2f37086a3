"""No configuration at all: a pool per model that some OpenAI-compatible servers list."""

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from backends.openai import OpenAI
from backends.protocol import BackendBusy, BackendError, BackendLost, Refused
from gateway.config import Config, ConfigError, check

ANSWER_S = 10.0


class UpstreamError(Exception):
    """A server given on the command line can't be used. Its text is one line for the operator."""


async def discover(urls: Sequence[str], key_env: str = "") -> Config:
    """A configuration with what the servers serve; several with the same model share its pool. Raises UpstreamError.

    `key_env` names the environment variable with the key that all of them want, if they want one.
    """
    servers = [_server(nth, url, key_env) for nth, url in enumerate(dict.fromkeys(map(_root, urls)))]
    listed = await asyncio.gather(*map(_models, servers))
    pools: dict[str, list[OpenAI]] = {}
    for server, names in zip(servers, listed, strict=True):
        for name in names:
            pools.setdefault(name, []).append(server)
    found = {"pool": [{"model": name, "backend": msgspec.to_builtins(each)} for name, each in pools.items()]}
    try:
        config = msgspec.convert(found, Config)
        check(config)
    except (msgspec.ValidationError, ConfigError) as error:
        raise UpstreamError(f"what the servers list can't be served: {error}") from None
    return config


def _root(url: str) -> str:
    """Clients are given URLs that end in /v1; a backend's does not."""
    return url.rstrip("/").removesuffix("/v1")


def _server(nth: int, url: str, key_env: str) -> OpenAI:
    try:
        return OpenAI(name=f"{urlsplit(url).hostname or 'upstream'}-{nth}", url=url, api_key_env=key_env)
    except ValueError as error:
        raise UpstreamError(f"--upstream {url}: {error}") from None


async def _models(server: OpenAI) -> list[str]:
    try:
        async with asyncio.timeout(ANSWER_S):
            names = [card.id for card in await server.models()]
    except TimeoutError:
        raise UpstreamError(f"{server.url} did not list its models within {ANSWER_S:.0f} s") from None
    except (BackendLost, BackendError, BackendBusy, Refused, OSError) as error:
        raise UpstreamError(f"{server.url} can't be asked for its models: {error}") from None
    if not names:
        raise UpstreamError(f"{server.url} lists no models")
    return names
