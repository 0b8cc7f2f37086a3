"""From a configuration to a serving process: the socket, the application on it, and how it ends."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator

import uvloop
from litestar import Litestar

from gateway.config import ConfigError, ServerConfig
from gateway.server import Server, uvicorn_config
from gateway.trunk import Trunk

log = logging.getLogger(__name__)

BACKLOG = 4_096
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ListenError(Exception):
    """The address can't be had. Its text is one line for the operator."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name counts as reachable by others, `localhost` apart."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(server: ServerConfig) -> socket.socket:
    """A listening socket. Raises ListenError."""
    try:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=BACKLOG)
    except OSError as error:
        code = error.errno or 0  # negative when the name was not found; positive ones have a text without details
        why = os.strerror(code) if code > 0 else error.strerror
        raise ListenError(f"can't listen on {server.host}:{server.port}: {why}") from None


def check_tls(server: ServerConfig) -> None:
    """The certificate and key can be read and belong together. Raises ConfigError."""
    if not server.tls_cert_file:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.tls_cert_file, server.tls_key_file)
    except OSError as error:
        raise ConfigError("$.server.tls_cert_file", f"can't be loaded with tls_key_file: {error}") from None


def run(app: Litestar, listener: socket.socket, on_ready: Callable[[], object], lifeline: int | None = None) -> int:
    """Serve until SIGTERM or SIGINT and the drain after it. The exit code; raises what the start-up raised.

    `lifeline` is a descriptor whose end of file means that the parent is gone: then it ends without a drain.
    """
    trunk: Trunk = app.state.trunk
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(app, listener, on_ready, lifeline))
    return 1 if trunk.supervisor.crashed else 0


async def _serve(app: Litestar, listener: socket.socket, on_ready: Callable[[], object], lifeline: int | None) -> None:
    """The lifespan is entered here and not by uvicorn, so that what fails in it arrives as the exception it is."""
    starting = asyncio.current_task()
    assert starting is not None
    _on_stop(lambda _: starting.cancel())
    try:
        async with app.lifespan():
            await _Process(app, on_ready, lifeline).serve([listener])
    except asyncio.CancelledError:
        log.info("stopped while starting")
    except ExceptionGroup as group:
        raise _innermost(group) from None


def _innermost(error: Exception) -> Exception:
    """Litestar runs its event emitter in a task group, which wraps what a start-up raises."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _on_stop(action: Callable[[signal.Signals], object]) -> None:
    for each in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(each, action, each)


class _Process(Server):
    """The server of one process that says when it is ready, and hears when its parent is gone."""

    def __init__(self, app: Litestar, on_ready: Callable[[], object], lifeline: int | None) -> None:
        trunk: Trunk = app.state.trunk
        settings = uvicorn_config(app, trunk.config.server)
        settings.lifespan = "off"
        super().__init__(settings, trunk)
        self._on_ready = on_ready
        self._lifeline = lifeline

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._lifeline is not None:
            asyncio.get_running_loop().add_reader(self._lifeline, self._orphaned)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises a signal again when it is done with it, and the process would die before its lifespan ends."""
        _on_stop(lambda each: self.handle_exit(each, None))
        yield

    def _orphaned(self) -> None:
        assert self._lifeline is not None
        asyncio.get_running_loop().remove_reader(self._lifeline)
        log.error("the parent process is gone; this worker ends")
        self.should_exit = self.force_exit = True
