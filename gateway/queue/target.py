"""Where the store is and how to get in, from `store.url`; opens channels to it."""

import asyncio
import os
import pathlib
import ssl

from msgspec.structs import replace
from redis.crc import key_slot

from gateway.queue.channel import Address, Channel, Login, StoreUnfit
from gateway.queue.finders import Cluster, Finder, Fixed, Sentinels
from gateway.queue.keys import Keys
from gateway.queue.urls import read_url


class Target:
    """One store, wherever it is at the moment. Shared by all who open channels to it."""

    def __init__(self, url: str, namespace: str, password: str = "", sentinel_password: str = "") -> None:
        """Raises StoreUnfit for a URL that cannot be used."""
        self.url, self.namespace = url, namespace
        try:
            self._read = read_url(url)
        except ValueError as error:
            raise StoreUnfit(f"store.url: {error}") from None
        login = self._read.login
        self._login = replace(login, password=password or login.password)
        self._sentinel_login = Login(self._read.sentinel_username, sentinel_password)
        self._finder: Finder | None = None
        self._tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"<Target {self._read.kind} {', '.join(map(str, self._read.addresses))} {self.namespace}>"

    @property
    def kind(self) -> str:
        """`server`, `sentinel` or `cluster`."""
        return self._read.kind

    async def find(self) -> Address:
        """The server that has the queue now. Raises StoreAway or StoreUnfit."""
        if self._finder is None:
            self._finder = await self._make_finder()
        return await self._finder.find()

    async def open(self) -> Channel:
        """A channel to the server that has the queue. Raises StoreAway or StoreUnfit."""
        address = await self.find()
        return await Channel.connect(address, self._login, self._tls)

    async def aclose(self) -> None:
        """Let go of what is kept to find the store. Channels stay with those who opened them."""
        if self._finder is not None:
            await self._finder.aclose()

    async def _make_finder(self) -> Finder:
        read = self._read
        if read.secure is not None:
            try:
                self._tls = await asyncio.to_thread(read.secure.get)
            except OSError as error:
                raise StoreUnfit(f"store.url: its certificates: {error}") from None
        if read.kind == "sentinel":
            return Sentinels(read.addresses, read.service, self._sentinel_login, self._tls)
        if read.kind == "cluster":
            slot = key_slot(Keys(self.namespace).prefix.encode())
            return Cluster(read.addresses, slot, self._login, self._tls)
        return Fixed(read.addresses[0])


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
