"""The command `signalbox`. Exit codes: 0 fine, 1 something does not work, 2 the command or configuration is wrong."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gateway import __version__, explain, explain_options, further, tenants_command, workers
from gateway.app import build
from gateway.checkup import checkup
from gateway.config import Config, ConfigError, check, load
from gateway.explain_text import printed
from gateway.greeting import greeting
from gateway.queue.client import StoreAway, StoreUnfit
from gateway.serving import ListenError, check_tls, is_loopback, listen, run
from gateway.telemetry import logs
from gateway.telemetry.start import check_telemetry
from gateway.tenants import Tenants, hash_key, new_key
from gateway.tenants_command import AdminError
from gateway.upstream import UpstreamError, discover

DEFAULT_FILE = Path("config.toml")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. What the operator can mend is one line on standard error."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser(words[0] if words else "").parse_args(words)
    try:
        code: int = args.command(args)
    except (ConfigError, UpstreamError) as error:
        print(f"signalbox: {error}", file=sys.stderr)
        return 2
    except (AdminError, ListenError, StoreAway, StoreUnfit) as error:
        print(f"signalbox: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser(wanted: str) -> argparse.ArgumentParser:
    """All commands; those of other packages only if one of them or none of ours is `wanted`."""
    parser = argparse.ArgumentParser(prog="signalbox", description="A gateway and scheduler in front of LLM engines.")
    parser.add_argument("--version", action="version", version=f"signalbox {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="start the gateway")
    serve.set_defaults(command=_serve)
    source = serve.add_mutually_exclusive_group()
    _add_config(source)
    source.add_argument(
        "--upstream",
        metavar="URL",
        action="append",
        default=[],
        help="no configuration: serve what this OpenAI-compatible server lists; may be given several times",
    )
    serve.add_argument("--upstream-key-env", metavar="NAME", default="", help="the variable with the upstreams' key")
    serve.add_argument("--host", help="address to listen on, in place of the configured one")
    serve.add_argument("--port", type=int, metavar="N", help="port to listen on; 0 takes a free one")
    serve.add_argument("--workers", type=int, metavar="N", help="gateway processes that share the port")
    serve.add_argument("--allow-open", action="store_true", help="serve without keys on an address others can reach")
    checks = commands.add_parser("check", help="check the configuration, the engines and the store")
    checks.set_defaults(command=_check)
    _add_config(checks)
    key = commands.add_parser("key", help="make an API key")
    key.set_defaults(command=_key)
    key.add_argument("tenant", metavar="TENANT", nargs="?", default="", help="whose key it is")
    tenants = commands.add_parser("tenants", help="tenants and keys of a running gateway")
    tenants.set_defaults(command=_tenants)
    tenants_command.add_arguments(tenants)
    explains = commands.add_parser("explain", help="what the queue would say to a request under a load; 1 if refused")
    explains.set_defaults(command=_explain)
    _add_config(explains)
    explain_options.add_arguments(explains)
    if wanted not in commands.choices:
        further.add_commands(commands, wanted)
    return parser


def _add_config(parser: "argparse._ActionsContainer") -> None:
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help=f"the configuration; without it, {DEFAULT_FILE} in this directory"
    )


def _serve(args: argparse.Namespace) -> int:
    logs.configure()
    found = (
        asyncio.run(discover(args.upstream, args.upstream_key_env)) if args.upstream else _configuration(args.config)
    )
    config = _listening(found, args)
    tenants = Tenants(config)
    check_reach(config, tenants, allow_open=args.allow_open)
    check_tls(config.server)
    check_telemetry(config)
    with listen(config.server) as listener:
        text = greeting(config, tenants, listener.getsockname()[1])

        def greet() -> None:
            print(text, flush=True)

        print(f"signalbox {__version__}: starting {_engines(config)}", flush=True)
        if config.server.workers > 1:
            return asyncio.run(workers.serve(config, listener, greet))
        return run(build(config), listener, greet)


def _configuration(file: Path | None) -> Config:
    if file is None and not DEFAULT_FILE.exists():
        raise ConfigError("", f"there is no {DEFAULT_FILE} here: give --config FILE, or serve --upstream URL")
    return load(file or DEFAULT_FILE)


def _listening(config: Config, args: argparse.Namespace) -> Config:
    """The configuration with the command line's own wishes, checked again."""
    wishes = {name: getattr(args, name) for name in ("host", "port", "workers")}
    wishes = {name: wish for name, wish in wishes.items() if wish is not None}
    server = msgspec.to_builtins(config.server) | wishes
    try:
        config = msgspec.structs.replace(config, server=msgspec.convert(server, type(config.server)))
    except msgspec.ValidationError as error:
        raise ConfigError("command line", str(error)) from None
    check(config)
    return config


def check_reach(config: Config, tenants: Tenants, *, allow_open: bool) -> None:
    """Whoever can reach the address needs a key that is not public. Raises ConfigError."""
    host = config.server.host
    if is_loopback(host):
        return
    if tenants.has_demo_keys():
        raise ConfigError(
            "$.server.host", f"{host} can be reached by others, and demo keys are configured: replace them"
        )
    if tenants.open is not None and not allow_open:
        raise ConfigError(
            "$.server.host",
            f"{host} can be reached by others, and there are no tenants: configure some, or give --allow-open",
        )


def _engines(config: Config) -> str:
    count = sum(len(pool.backends) for pool in config.pools)
    return f"{count} {'engine' if count == 1 else 'engines'} in {len(config.pools)} pool(s)"


def _check(args: argparse.Namespace) -> int:
    logs.configure("WARNING")
    config = _configuration(args.config)
    Tenants(config)
    check_tls(config.server)
    check_telemetry(config)
    text, well = asyncio.run(checkup(config))
    print(text)
    return 0 if well else 1


def _key(args: argparse.Namespace) -> int:
    key = new_key()
    print(f"key:    {key}   (shown only now)")
    print(f'config: keys = ["{hash_key(key)}"]' + (f"   in the [[tenant]] {args.tenant}" if args.tenant else ""))
    return 0


def _tenants(args: argparse.Namespace) -> int:
    print(asyncio.run(tenants_command.answer(args)))
    return 0


def _explain(args: argparse.Namespace) -> int:
    answer = explain.explain(_configuration(args.config), args)
    print(explain.encoded(answer) if args.json else printed(answer))
    return 1 if answer.reason else 0
