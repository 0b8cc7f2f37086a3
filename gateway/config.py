"""The configuration: `config.toml` decoded straight into frozen Structs. Wrong input is a ConfigError with a path."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from backends.openai import OpenAI
from backends.simulated import Simulated
from backends.triton import Triton
from backends.trtllm import TrtLlm
from backends.vllm import Vllm
from gateway.queue.client import Store
from gateway.telemetry.metrics import MetricsConfig
from gateway.telemetry.settings import Telemetry
from policies.order import Order
from policies.quota import Limit, TenantLimits
from policies.retry import RetryRule
from policies.types import ServiceClass

Engine = OpenAI | Vllm | Triton | TrtLlm | Simulated
IN_PROCESS = (Vllm, TrtLlm)
"""Engines that this process holds: there is one of each, and starting one takes minutes."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")]
"""Of a tenant: it goes into store keys and metric labels."""

Model = Annotated[str, Meta(pattern=r"^[!-~]{1,256}\Z")]
"""As clients send it: printable ASCII without spaces."""

KeyHash = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]

Seconds = Annotated[float, Meta(gt=0, le=86_400)]

DEFAULT_CLASSES = (
    ServiceClass(name="interactive", rank=0, ttft_ms=5_000),
    ServiceClass(name="standard", rank=1, ttft_ms=30_000),
    ServiceClass(name="batch", rank=2, ttft_ms=600_000, total_ms=3_600_000),
)


class ConfigError(Exception):
    """The configuration is wrong at `path` (`$.pool[0].backend[1].url`). Its text is one line for the operator."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path, self.message = path, message


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The listening side. A client that takes longer than `header_s` or `body_s` to send is cut off.

    `stall_s` is how long a client may leave its answer unread before it is cut off.
    `drain_s` is how long running streams may go on after SIGTERM. Without the TLS files it speaks plain HTTP.
    The admin keys open `/admin`: as hashes, or as secrets by name like a tenant's; with none, it stays closed.
    """

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8080
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    max_body_bytes: Annotated[int, Meta(ge=1_024)] = 32 * 1024 * 1024
    header_s: Seconds = 10.0
    body_s: Seconds = 30.0
    idle_s: Seconds = 75.0
    stall_s: Seconds = 30.0
    drain_s: Seconds = 30.0
    tls_cert_file: str = ""
    tls_key_file: str = ""
    admin_keys: tuple[KeyHash, ...] = ()
    admin_key_file: str = ""
    admin_key_env: str = ""

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin key, hence tenants that are made at run time."""
        return bool(self.admin_keys or self.admin_key_file or self.admin_key_env)


Weight = Annotated[float, Meta(ge=0.001, le=1_000)]


class TenantSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may do, wherever it is defined: in the configuration, or in the store at run time.

    `top_class` is the highest class a request of this tenant gets, empty for no cap; `models` empty means all. The
    limits are those of `TenantLimits`.
    """

    weight: Weight = 1.0
    top_class: str = field(name="class", default="")
    models: tuple[str, ...] = ()
    requests_per_min: Limit = 0
    tokens_per_min: Limit = 0
    tokens_in_flight: Limit = 0
    max_queued: Limit = 0

    @property
    def limits(self) -> TenantLimits:
        return TenantLimits(
            requests_per_min=self.requests_per_min,
            tokens_per_min=self.tokens_per_min,
            tokens_in_flight=self.tokens_in_flight,
            max_queued=self.max_queued,
        )


class TenantConfig(TenantSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who pays. Keys come as hashes, or as secrets by name: lines of `key_file`, or the variable `key_env`.

    With an admin key configured they may also come later, over `/admin`.
    """

    name: Name
    keys: tuple[KeyHash, ...] = ()
    key_file: str = ""
    key_env: str = ""


class PoolConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines that serve one model. Clients ask for `model` or one of its `aliases`."""

    model: Model
    aliases: tuple[Model, ...] = ()
    backends: tuple[Engine, ...] = field(name="backend", default=())


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything. Built here from a file, or in code; then `check` it."""

    server: ServerConfig = ServerConfig()
    store: Store = Store()
    order: Order = Order()
    metrics: MetricsConfig = MetricsConfig()
    retry: RetryRule = RetryRule()
    telemetry: Telemetry = Telemetry()
    default_class: str = "standard"
    classes: tuple[ServiceClass, ...] = field(name="class", default=DEFAULT_CLASSES)
    tenants: tuple[TenantConfig, ...] = field(name="tenant", default=())
    pools: tuple[PoolConfig, ...] = field(name="pool", default=())

    def class_named(self, name: str) -> ServiceClass | None:
        return next((one for one in self.classes if one.name == name), None)


def load(file: Path) -> Config:
    """The checked configuration in `file`. Raises ConfigError, whose text names the file."""
    try:
        return decode(file.read_bytes())
    except OSError as error:
        raise ConfigError("", f"{file}: {error.strerror or error}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.path}" if error.path else str(file), error.message) from None


def decode(toml: bytes) -> Config:
    """The checked configuration in a TOML document. Raises ConfigError."""
    try:
        config = msgspec.toml.decode(toml, type=Config)
    except msgspec.ValidationError as error:
        raise located(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("", f"not TOML: {error}") from None
    check(config)
    return config


def check(config: Config) -> None:
    """Names are unique and every reference has its target. Raises ConfigError for the first that fails."""
    for path, message in _faults(config):
        raise ConfigError(path, message)


_AT = re.compile(r"(?P<message>.*) - at `(?P<path>\$[^`]*)`\Z", re.DOTALL)
_FIELD = re.compile(r"Object (?P<what>contains unknown|missing required) field `(?P<field>.*)`\Z", re.DOTALL)


def located(text: str) -> ConfigError:
    """msgspec's message as ours: the path leads to the field itself, also where the field is the fault."""
    at = _AT.match(text)
    path, message = (at["path"], at["message"]) if at else ("$", text)
    if named := _FIELD.match(message):
        what = "unknown field" if named["what"] == "contains unknown" else "required field is missing"
        return ConfigError(f"{path}.{named['field']}", what)
    return ConfigError(path, message)


def _faults(config: Config) -> Iterator[tuple[str, str]]:
    yield from _server_faults(config)
    yield from _class_faults(config)
    yield from _pool_faults(config)
    yield from _tenant_faults(config)


def _server_faults(config: Config) -> Iterator[tuple[str, str]]:
    if bool(config.server.tls_cert_file) != bool(config.server.tls_key_file):
        missing = "tls_key_file" if config.server.tls_cert_file else "tls_cert_file"
        yield f"$.server.{missing}", "TLS needs both tls_cert_file and tls_key_file"
    if config.metrics.access == "admin" and not config.server.has_admin:
        yield "$.metrics.access", "`admin` needs an admin key: give server.admin_keys, admin_key_env or admin_key_file"
    if config.server.workers > 1:
        for path, engine in engines(config):
            if isinstance(engine, IN_PROCESS):
                yield (
                    f"{path}.kind",
                    f"an engine in this process can't be shared by {config.server.workers} workers: "
                    "use workers = 1, or run the engine's own server and attach it with kind = 'openai'",
                )


def _class_faults(config: Config) -> Iterator[tuple[str, str]]:
    yield from _twice((f"$.class[{at}].name", one.name) for at, one in enumerate(config.classes))
    yield from _twice((f"$.class[{at}].rank", str(one.rank)) for at, one in enumerate(config.classes))
    if config.class_named(config.default_class) is None:
        yield "$.default_class", _dangling("class", config.default_class, (one.name for one in config.classes))


def _pool_faults(config: Config) -> Iterator[tuple[str, str]]:
    if not config.pools:
        yield "$.pool", "there is no pool: add one [[pool]] per model, with a [[pool.backend]] per engine"
    yield from _twice((path, name) for path, name, _ in _served(config))
    for at, pool in enumerate(config.pools):
        if not pool.backends:
            yield f"$.pool[{at}].backend", f"the pool {pool.model!r} has no backend"
        yield from _twice((f"$.pool[{at}].backend[{nth}].name", one.name) for nth, one in enumerate(pool.backends))


def _tenant_faults(config: Config) -> Iterator[tuple[str, str]]:
    tenants = list(enumerate(config.tenants))
    yield from _twice((f"$.tenant[{at}].name", one.name) for at, one in tenants)
    yield from _twice((f"$.tenant[{at}].keys[{nth}]", key) for at, one in tenants for nth, key in enumerate(one.keys))
    for at, one in tenants:
        if not (one.keys or one.key_file or one.key_env or config.server.has_admin):
            yield f"$.tenant[{at}].keys", f"the tenant {one.name!r} has no key: give keys, key_file or key_env"
        for name, message in setting_faults(config, one):
            yield f"$.tenant[{at}].{name}", message


def setting_faults(config: Config, settings: TenantSettings) -> Iterator[tuple[str, str]]:
    """Fields of a tenant that refer to what this configuration does not have, with what is wrong."""
    if settings.top_class and config.class_named(settings.top_class) is None:
        yield "class", _dangling("class", settings.top_class, (each.name for each in config.classes))
    served = models(config)
    for nth, model in enumerate(settings.models):
        if model not in served:
            yield f"models[{nth}]", _dangling("model", model, served)


def engines(config: Config) -> Iterator[tuple[str, Engine]]:
    """Every engine with its path in the configuration."""
    for at, pool in enumerate(config.pools):
        for nth, engine in enumerate(pool.backends):
            yield f"$.pool[{at}].backend[{nth}]", engine


def models(config: Config) -> dict[str, str]:
    """Every name a client may ask for, aliases included, to the model of its pool."""
    return {name: model for _, name, model in _served(config)}


def _served(config: Config) -> Iterator[tuple[str, str, str]]:
    for at, pool in enumerate(config.pools):
        yield f"$.pool[{at}].model", pool.model, pool.model
        for nth, alias in enumerate(pool.aliases):
            yield f"$.pool[{at}].aliases[{nth}]", alias, pool.model


def _twice(named: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    first: dict[str, str] = {}
    for path, name in named:
        if name in first:
            yield path, f"{name!r} is taken by {first[name]}"
        else:
            first[name] = path


def _dangling(what: str, name: str, known: Iterable[str]) -> str:
    return f"there is no {what} {name!r}; there is {', '.join(sorted(known)) or 'none'}"
