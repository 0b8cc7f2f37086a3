"""What `store.url` says. One server, the sentinels that know which server, or some nodes of a cluster:

    redis://[user:password@]host[:port][/db]             rediss:// with TLS
    unix:///path/to/socket
    redis+sentinel://[user:password@]host[:port],…/service[/db]
    redis+cluster://[user:password@]host[:port],…

Options after `?` are redis-py's for TLS (`ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_cert_reqs`,
`ssl_check_hostname`), and `sentinel_username`.
"""

from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import redis.exceptions
from msgspec import Struct
from redis.asyncio.connection import RedisSSLContext, SSLConnection, UnixDomainSocketConnection, parse_url

from gateway.queue.channel import Address, Login

SENTINEL_PORT = 26379
PORT = 6379
PLAIN = {"host", "port", "path", "db", "username", "password", "connection_class"}
"""What redis-py reads from a URL that is not an option of TLS."""


class Url(Struct, frozen=True):
    """`secure` makes the TLS context, None without TLS; `service` is what the sentinels call the store."""

    kind: Literal["server", "sentinel", "cluster"]
    addresses: tuple[Address, ...]
    login: Login
    secure: RedisSSLContext | None = None
    service: str = ""
    sentinel_username: str = ""


def read_url(url: str) -> Url:
    """Raises ValueError, whose text is for the operator."""
    scheme, _, rest = url.partition("://")
    base, _, kind = scheme.partition("+")
    if kind == "sentinel" and base in {"redis", "rediss"}:
        return _sentinel(base, rest)
    if kind == "cluster" and base in {"redis", "rediss"}:
        return _cluster(base, rest)
    if kind or base not in {"redis", "rediss", "unix"}:
        raise ValueError("a redis://, rediss:// or unix:// address, or redis[s]+sentinel:// or redis[s]+cluster://")
    parts, secure = _parsed(url)
    address = (
        Address(path=parts.get("path", ""))
        if parts.get("connection_class") is UnixDomainSocketConnection
        else Address(parts.get("host", "localhost"), parts.get("port", PORT))
    )
    if base == "unix" and not address.path:
        raise ValueError("a unix:// address needs the socket's path: unix:///path/to/socket")
    return Url("server", (address,), _login(parts), secure)


def shown(url: str) -> str:
    """For people: without what stands before the `@`."""
    scheme, mark, rest = url.partition("://")
    where, slash, path = rest.partition("/")
    return f"{scheme}{mark}{where.rpartition('@')[2]}{slash}{path}"


def _sentinel(base: str, rest: str) -> Url:
    user, hosts, path, query = _split(rest)
    service, _, database = path.partition("/")
    if not service or (database and not database.isdecimal()):
        raise ValueError("sentinels need the name of the service after their addresses: …,host:26379/service[/db]")
    parts, secure = _parsed(f"{base}://{user}x/{database or 0}{query}")
    sentinel_username = parts.pop("sentinel_username", "")
    addresses = _addresses(hosts, SENTINEL_PORT)
    return Url("sentinel", addresses, _login(parts), secure, unquote(service), sentinel_username)


def _cluster(base: str, rest: str) -> Url:
    user, hosts, path, query = _split(rest)
    if path:
        raise ValueError("a cluster has no databases: nothing may follow the addresses of its nodes")
    parts, secure = _parsed(f"{base}://{user}x{query}")
    if parts.get("db"):
        raise ValueError("a cluster has no databases: leave `db` out")
    return Url("cluster", _addresses(hosts, PORT), _login(parts), secure)


def _split(rest: str) -> tuple[str, str, str, str]:
    """`user@`, hosts, path without its slash, `?query`."""
    rest, mark, query = rest.partition("?")
    where, _, path = rest.partition("/")
    user, at, hosts = where.rpartition("@")
    return user + at, hosts, path.strip("/"), mark + query


def _addresses(hosts: str, port: int) -> tuple[Address, ...]:
    found = []
    for text in hosts.split(","):
        one = urlsplit(f"//{text}")
        if not one.hostname:
            raise ValueError(f"the address {text!r} has no host")
        try:
            found.append(Address(one.hostname, one.port or port))
        except ValueError:
            raise ValueError(f"the address {text!r} has no such port") from None
    return tuple(found)


def _parsed(url: str) -> tuple[dict[str, Any], RedisSSLContext | None]:
    """redis-py's reading of a URL, and its TLS context. Raises ValueError."""
    parts: dict[str, Any] = dict(parse_url(url))
    options = {name: value for name, value in parts.items() if name not in PLAIN and name != "sentinel_username"}
    if strange := [name for name in options if not name.startswith("ssl_")]:
        raise ValueError(f"there is no option {strange[0]!r}")
    if parts.get("connection_class") is not SSLConnection:
        if options:
            raise ValueError(f"the option {next(iter(options))!r} needs TLS: rediss://, or rediss+…://")
        return parts, None
    try:
        given = {name.removeprefix("ssl_"): value for name, value in options.items()}
        return parts, RedisSSLContext(**{"cert_reqs": "required", "check_hostname": True, **given})
    except (TypeError, redis.exceptions.RedisError) as error:
        raise ValueError(str(error)) from None


def _login(parts: dict[str, Any]) -> Login:
    return Login(parts.get("username", ""), parts.get("password", ""), int(parts.get("db", 0)))
