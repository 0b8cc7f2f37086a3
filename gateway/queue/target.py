"""Where the store is and how to get in, from `store.url`; opens channels to it."""

import asyncio
import os
import pathlib
import ssl
from typing import Any

import redis.exceptions
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection, parse_url

from gateway.queue.channel import Address, Channel, Login, StoreUnfit

TAKEN = {"host", "port", "path", "db", "username", "password"}
"""What of a URL is not an option of TLS."""


class Target:
    """One store. Shared by all who open channels to it."""

    def __init__(self, url: str, namespace: str, password: str = "") -> None:
        """Raises StoreUnfit for a URL that cannot be used."""
        self.url, self.namespace = url, namespace
        scheme = url.partition("://")[0]
        if "sentinel" in scheme or "cluster" in scheme:
            raise StoreUnfit(
                f"store.url: {scheme} addresses are not supported yet; give the primary's redis:// address"
            )
        try:
            parts: dict[str, Any] = dict(parse_url(url))
            kind = parts.pop("connection_class", None)
            self._tls_options = {name: value for name, value in parts.items() if name not in TAKEN}
            if kind is not SSLConnection and self._tls_options:
                raise ValueError(f"unknown option {', '.join(self._tls_options)}")
            self._secure = SSLConnection(**self._tls_options).ssl_context if kind is SSLConnection else None
        except (ValueError, TypeError, redis.exceptions.RedisError) as error:
            raise StoreUnfit(f"store.url: {error}") from None
        self._address = (
            Address(path=parts.get("path", ""))
            if kind is UnixDomainSocketConnection
            else Address(parts.get("host", "localhost"), parts.get("port", 6379))
        )
        self._login = Login(parts.get("username", ""), password or parts.get("password", ""), int(parts.get("db", 0)))

    def __repr__(self) -> str:
        return f"<Target {self._address} {self.namespace}>"

    async def open(self) -> Channel:
        """A channel to the server that has the queue. Raises StoreAway or StoreUnfit."""
        return await Channel.connect(self._address, self._login, await self._tls())

    async def _tls(self) -> ssl.SSLContext | None:
        if self._secure is None:
            return None
        try:
            context: ssl.SSLContext = await asyncio.to_thread(self._secure.get)
        except OSError as error:
            raise StoreUnfit(f"store.url: its certificates: {error}") from None
        return context


def secret(field: str, env: str, file: str) -> str:
    """A secret given by the name of an environment variable or a file. Raises StoreUnfit when it is not there."""
    if env:
        if env not in os.environ:
            raise StoreUnfit(f"{field}_env: the environment has no {env}")
        return os.environ[env]
    if file:
        try:
            return pathlib.Path(file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise StoreUnfit(f"{field}_file: {error}") from None
    return ""
