"""`signalbox tenants`: the tenants and keys of a running gateway, over its `/admin`."""

import argparse
import datetime
import os
import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import yarl

from gateway.config import ConfigError

ANSWER_S = 15.0
URL = "http://127.0.0.1:8080"
KEY_ENV = "SIGNALBOX_ADMIN_KEY"

SETTINGS = {
    "weight": (float, "share against other tenants of the same class"),
    "class": (str, "highest class; '' for no cap"),
    "requests_per_min": (int, "requests a minute; 0 is no limit, here and below"),
    "tokens_per_min": (int, "prompt and output tokens a minute"),
    "tokens_in_flight": (int, "tokens of the requests that engines have now"),
    "max_queued": (int, "requests that may wait"),
}
ROUTES = {
    "list": ("GET", ""),
    "add": ("POST", ""),
    "set": ("PATCH", "/{name}"),
    "remove": ("DELETE", "/{name}"),
    "keys": ("GET", "/{name}/keys"),
    "new-key": ("POST", "/{name}/keys"),
    "rotate": ("POST", "/{name}/keys/{id}/rotate"),
    "revoke": ("DELETE", "/{name}/keys/{id}"),
}
BODIES = {
    "add": ("name", *SETTINGS, "models"),
    "set": (*SETTINGS, "models"),
    "new-key": ("label", "expires_in_s"),
    "rotate": ("grace_s", "expires_in_s"),
}
_TENANT = ("name", "source", "keys", "weight", "class", "models", *[name for name in SETTINGS if "_" in name])
COLUMNS = {
    "list": _TENANT,
    "add": _TENANT,
    "set": _TENANT,
    "keys": ("id", "state", "source", "label", "created", "expires", "revoked"),
}
TIMES = frozenset({"created", "expires", "revoked"})


class AdminError(Exception):
    """The gateway can't be asked or says no. Its text is one line for the operator."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `signalbox tenants`, each with the options that say which gateway."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--url", default=URL, help=f"the gateway; {URL} if not given")
    where.add_argument("--admin-key-env", metavar="NAME", default=KEY_ENV, help=f"the admin key's variable; {KEY_ENV}")
    where.add_argument("--ca-file", metavar="FILE", help="certificates to trust, for an https URL")
    where.add_argument("--json", action="store_true", help="print the gateway's answer as it is")
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")

    def action(name: str, says: str, *names: str) -> argparse.ArgumentParser:
        one = actions.add_parser(name, help=says, parents=[where])
        for each in names:
            one.add_argument(each, metavar=each.upper())
        return one

    action("list", "all tenants")
    _add_settings(action("add", "make a tenant", "name"))
    _add_settings(action("set", "change a tenant's settings; what is not given stays", "name"))
    action("remove", "remove a tenant and its keys", "name")
    action("keys", "a tenant's keys", "name")
    new = action("new-key", "make a key and print it", "name")
    new.add_argument("--label", default="", help="what it is for")
    rotate = action("rotate", "print a new key in place of one", "name", "id")
    rotate.add_argument("--grace-s", type=int, default=0, metavar="N", help="seconds that the old key goes on; 0")
    for one in (new, rotate):
        one.add_argument("--expires-in-s", type=int, metavar="N", help="seconds that the key is good for; 0 is no end")
    action("revoke", "revoke a key", "name", "id")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    for name, (kind, says) in SETTINGS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, dest=name, metavar="C" if kind is str else "N", help=says
        )
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--model", action="append", dest="models", metavar="M", help="may use it; may be repeated")
    models.add_argument("--all-models", action="store_const", const=[], dest="models", help="may use every model")


async def answer(args: argparse.Namespace) -> str:
    """What to print for the action. Raises AdminError, or ConfigError where the command itself is wrong."""
    found = await _ask(args, *ROUTES[args.action], _body(args))
    if args.json:
        return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    if args.action in COLUMNS:
        return _table(COLUMNS[args.action], found.get("data", [found]))
    if "key" in found:
        return f"key: {found['key']}   (shown only now)\nid:  {found['id']}"
    return f"removed {args.name} and its keys" if args.action == "remove" else f"revoked {args.id} of {args.name}"


def _body(args: argparse.Namespace) -> dict[str, Any] | None:
    fields = BODIES.get(args.action)
    if fields is None:
        return None
    given = {name: value for name in fields if (value := getattr(args, name)) is not None}
    if args.action == "set" and not given:
        raise ConfigError("", "tenants set: say what to change")
    return given


async def _ask(args: argparse.Namespace, method: str, path: str, body: dict[str, Any] | None) -> Any:
    key = os.environ.get(args.admin_key_env, "").strip()
    if not key:
        raise ConfigError("", f"--admin-key-env: the environment variable {args.admin_key_env} is not set or empty")
    try:
        tls = ssl.create_default_context(cafile=args.ca_file) if args.url.startswith("https:") else True
    except OSError as error:
        raise ConfigError("", f"--ca-file: {args.ca_file} can't be loaded: {error}") from None
    names = {name: quote(getattr(args, name, ""), safe="") for name in ("name", "id")}
    url = args.url.rstrip("/").removesuffix("/v1") + "/admin/tenants" + path.format(**names)
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as client,
            client.request(
                method, yarl.URL(url, encoded=True), json=body, ssl=tls, headers={"authorization": f"Bearer {key}"}
            ) as said,
        ):
            return _read(args.url, said.status, await said.read())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        why = error.strerror if isinstance(error, aiohttp.ClientConnectorError) else str(error)
        raise AdminError(f"{args.url} can't be asked: {why or 'no answer'}") from None


def _read(url: str, status: int, raw: bytes) -> Any:
    try:
        found = msgspec.json.decode(raw or b"{}")
        refusal = None if status < 300 else found["error"]
        said = "" if refusal is None else f"{refusal['message']} ({refusal['code']})"
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        raise AdminError(f"{url} answered {status}, and not as a gateway does") from None
    if refusal is not None:
        raise AdminError(said)
    return found


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    lines = [tuple(columns), *(tuple(_cell(name, row[name]) for name in columns) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cell(name: str, value: Any) -> str:
    if name == "models" and not value:
        return "all"
    if value in (None, "") or (value == 0 and name != "keys"):
        return "-"
    if name in TIMES:
        return datetime.datetime.fromtimestamp(value, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ", ".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)
