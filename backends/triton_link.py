"""The way to one Triton server: a channel, and its calls with what their failures mean.

Keepalive stays off: a stock Triton answers pings without data with GOAWAY, which ends every stream of the channel.
"""

import functools
from typing import Any

import grpc
import grpc.aio
from msgspec import Struct
from tritonclient.grpc import service_pb2 as pb

from backends.protocol import BackendLost
from backends.triton_faults import of_status
from backends.triton_tensors import Declared

_SERVICE = "/inference.GRPCInferenceService/"
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per backend, not one shared through the library
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

Metadata = tuple[tuple[str, str], ...]


@functools.cache
def _keep_poller() -> None:
    """gRPC's poller lives from here on as long as the process: else the last channel to be collected would wait for its
    thread to end, in the middle of whatever the loop is doing then. Needs a running loop."""
    grpc.aio.init_grpc_aio()


class Server(Struct, frozen=True):
    """What the server says of itself."""

    name: str
    version: str


class Listed(Struct, frozen=True):
    """One version of a model in the repository index; `state` is READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str
    state: str
    reason: str


class Link:
    """One channel. `metadata` goes with every call. Belongs to the loop it was made on.

    Every call raises BackendLost, BackendBusy, BackendError or Refused for what went wrong.
    """

    def __init__(self, target: str, metadata: Metadata, credentials: grpc.ChannelCredentials | None = None) -> None:
        _keep_poller()
        self._metadata = metadata
        if credentials is None:
            self._channel: Any = grpc.aio.insecure_channel(target, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        self.closed = False
        # One message and half a close is all that a request needs, so the two-way call is used as a one-way one.
        self._stream = self._channel.unary_stream(
            _SERVICE + "ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )

    def stream(self, request: pb.ModelInferRequest, trace: Metadata = ()) -> Any:
        """A started streaming call; its `read` gives ModelStreamInferResponse or EOF. Raises BackendLost if closed."""
        self._check()
        return self._stream(request, metadata=self._metadata + trace)

    async def server(self, timeout_s: float) -> Server:
        """Its name and version. Raises BackendLost where it is not ready."""
        ready = await self._ask("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse, timeout_s)
        if not ready.ready:
            raise BackendLost("Triton is not ready: a model is still loading, or failed to")
        said = await self._ask("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse, timeout_s)
        return Server(said.name, said.version)

    async def model_ready(self, model: str, timeout_s: float) -> bool:
        """Whether the model is loaded. True also where its process has died: only a request shows that."""
        ask = pb.ModelReadyRequest(name=model)
        return bool((await self._ask("ModelReady", ask, pb.ModelReadyResponse, timeout_s)).ready)

    async def index(self, timeout_s: float) -> list[Listed]:
        """Every version of every model in the repository."""
        ask = pb.RepositoryIndexRequest()
        said = await self._ask("RepositoryIndex", ask, pb.RepositoryIndexResponse, timeout_s)
        return [Listed(one.name, one.version, one.state, one.reason) for one in said.models]

    async def tensors(self, model: str, timeout_s: float) -> tuple[dict[str, Declared], dict[str, Declared]]:
        """The inputs and the outputs that the model declares, by name."""
        ask = pb.ModelMetadataRequest(name=model)
        said = await self._ask("ModelMetadata", ask, pb.ModelMetadataResponse, timeout_s)
        inputs, outputs = (
            {one.name: Declared(one.name, one.datatype, tuple(one.shape)) for one in each}
            for each in (said.inputs, said.outputs)
        )
        return inputs, outputs

    async def config(self, model: str, timeout_s: float) -> Any:
        """The model's configuration as Triton has it, a ModelConfig message."""
        ask = pb.ModelConfigRequest(name=model)
        return (await self._ask("ModelConfig", ask, pb.ModelConfigResponse, timeout_s)).config

    async def aclose(self) -> None:
        """Cancel what runs and let the connection go. Idempotent."""
        if not self.closed:
            self.closed = True
            await self._channel.close()

    async def _ask(self, name: str, request: Any, answer: Any, timeout_s: float) -> Any:
        self._check()
        call = self._channel.unary_unary(_SERVICE + name, type(request).SerializeToString, answer.FromString)
        try:
            return await call(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.RpcError as error:
            raise of_status(error) from error

    def _check(self) -> None:
        if self.closed:
            raise BackendLost("the connection to Triton was closed")
