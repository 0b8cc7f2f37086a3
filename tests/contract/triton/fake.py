"""A Triton server in the test's own loop: the real calls and messages, with an engine that says what a test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import grpc.aio
from msgspec import Struct
from tritonclient.grpc import model_config_pb2 as mc
from tritonclient.grpc import service_pb2 as pb

from backends.triton_tensors import Outputs, integers, pack, strings
from tests.engines.triton_models import tensors
from tests.engines.triton_models.standin import text as words

SERVICE = "inference.GRPCInferenceService"
Reply = pb.ModelStreamInferResponse


class FakeModel(Struct):
    """What the server says of one model; tables as in `triton_models.tensors`."""

    name: str
    inputs: str
    outputs: str
    batch: int = 64
    batcher: bool = True
    decoupled: bool = True
    backend: str = "tensorrtllm"
    parameters: dict[str, str] = {}
    steps: dict[str, dict[str, str]] = {}
    state: str = "READY"
    reason: str = ""

    def metadata(self) -> pb.ModelMetadataResponse:
        said = pb.ModelMetadataResponse(name=self.name, versions=["1"])
        for table, to in ((self.inputs, said.inputs), (self.outputs, said.outputs)):
            for name, datatype, dims in rows(table):
                shape = [int(one) for one in dims.split(",")]
                to.add(name=name, datatype=datatype, shape=[-1, *shape] if self.batch else shape)
        return said

    def config(self) -> mc.ModelConfig:
        config = mc.ModelConfig(name=self.name, max_batch_size=self.batch, backend=self.backend)
        config.model_transaction_policy.decoupled = self.decoupled
        if self.batcher:
            config.dynamic_batching.SetInParent()
        for key, value in self.parameters.items():
            config.parameters[key].string_value = value
        for step, inputs in self.steps.items():
            made = config.ensemble_scheduling.step.add(model_name=step)
            for key, value in inputs.items():
                made.input_map[key] = value
        return config


def rows(table: str) -> Iterable[tuple[str, str, str]]:
    for line in filter(None, table.splitlines()):
        name, datatype, dims, *_ = line.split()
        yield name, "BYTES" if datatype == "STRING" else datatype, dims


def inflight() -> list[FakeModel]:
    parameters = {"guided_decoding_backend": "xgrammar", "max_beam_width": "1", "tokenizer_dir": "${tokenizer_dir}"}
    steps = {name: inputs for name, inputs, _ in tensors.ENSEMBLE_STEPS}
    return [
        FakeModel("tensorrt_llm", tensors.TENSORRT_LLM_IN, tensors.TENSORRT_LLM_OUT, parameters=parameters),
        FakeModel("ensemble", tensors.ENSEMBLE_IN, tensors.TEXT_OUT, batcher=False, backend="", steps=steps),
    ]


def llmapi() -> list[FakeModel]:
    given = (tensors.LLMAPI_IN, tensors.LLMAPI_OUT)
    return [FakeModel("tensorrt_llm", *given, batch=0, batcher=False, backend="python")]


def value(request: pb.ModelInferRequest, name: str) -> list[Any] | None:
    """The values of an input, None where it was not sent."""
    for declared, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if declared.name == name:
            if declared.datatype == "BYTES":
                return [one.decode() for one in strings("BYTES", raw)]
            if declared.datatype == "BOOL":
                return [bool(byte) for byte in raw]
            if declared.datatype in ("FP32", "FP64"):
                return Outputs({name: (declared.datatype, raw)}).numbers(name)
            return integers(declared.datatype, raw)
    return None


def reply(
    request: pb.ModelInferRequest, outputs: dict[str, tuple[str, list[Any]]], *, final: bool = False
) -> pb.ModelStreamInferResponse:
    said = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
    for name, (datatype, values) in outputs.items():
        said.outputs.add(name=name, datatype=datatype, shape=[1, 1, len(values)])
        said.raw_output_contents.append(pack(datatype, values))
    said.parameters["triton_final_response"].bool_param = final
    return pb.ModelStreamInferResponse(infer_response=said)


def error(text: str, final: bool = True) -> pb.ModelStreamInferResponse:
    said = pb.ModelStreamInferResponse(error_message=text)
    if final:
        said.infer_response.parameters["triton_final_response"].bool_param = True
    return said


Behaviour = Callable[[pb.ModelInferRequest, grpc.aio.ServicerContext], AsyncIterator[pb.ModelStreamInferResponse]]


class FakeTriton:
    """The server. `behave` answers requests to models; by default it writes words, one a response.

    `jobs` are the ids of what runs. A closed call ends a job only where the model is called directly, as in Triton.
    """

    def __init__(self, *models: FakeModel) -> None:
        self.models = {one.name: one for one in models}
        self.behave: Behaviour = self.generate
        self.ready = True
        self.token_s = 0.002
        self.jobs: dict[str, asyncio.Event] = {}
        self.seen: list[pb.ModelInferRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.stopped: list[str] = []
        self.port = 0
        self._server: Any = None
        self._orphans: dict[str, asyncio.Task[None]] = {}

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakeTriton":
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> "FakeTriton":
        self._server = grpc.aio.server()
        unary = {
            "ServerReady": (pb.ServerReadyRequest, self._server_ready),
            "ServerMetadata": (pb.ServerMetadataRequest, self._server_metadata),
            "RepositoryIndex": (pb.RepositoryIndexRequest, self._index),
            "ModelMetadata": (pb.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": (pb.ModelConfigRequest, self._model_config),
            "ModelReady": (pb.ModelReadyRequest, self._model_ready),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                call, request_deserializer=ask.FromString, response_serializer=_serialize
            )
            for name, (ask, call) in unary.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._infer, request_deserializer=pb.ModelInferRequest.FromString, response_serializer=_serialize
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        where = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(where)
        else:
            self.port = self._server.add_secure_port(where, credentials)
        await self._server.start()
        return self

    async def kill(self) -> None:
        """Every connection ends at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        for task in self._orphans.values():
            task.cancel()

    async def generate(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Words, the same for the same prompt; as much as was asked for."""
        ids = value(request, "input_ids")
        prompt = ids if ids is not None else words.encode((value(request, "text_input") or [""])[0])
        limits = [value(request, name) for name in ("request_output_len", "max_tokens", "sampling_param_max_tokens")]
        (limit,) = next(one for one in limits if one is not None)
        said = words.babble(sum(prompt) % 9973, limit)
        whole = ""
        for nth, token in enumerate(said):
            await asyncio.sleep(self.token_s)
            final = nth == len(said) - 1
            if self.jobs[request.id].is_set():
                yield reply(request, {}, final=True)
                return
            if ids is not None:
                outputs: dict[str, tuple[str, list[Any]]] = {
                    "output_ids": ("INT32", [token]),
                    "sequence_length": ("INT32", [1]),
                }
            elif value(request, "sampling_param_max_tokens") is not None:
                whole += words.decode([token])
                reason = "length" if final else "None"
                outputs = {"text_output": ("BYTES", [whole]), "finish_reason": ("BYTES", [reason])}
            else:
                outputs = {"text_output": ("BYTES", [words.decode([token])]), "num_output_tokens": ("INT32", [1])}
            yield reply(request, outputs, final=final)

    async def _infer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for request in requests:
            self.metadata.append({key: str(text) for key, text in context.invocation_metadata() or ()})
            if value(request, "stop"):
                self.stopped.append(request.id)
                if request.id in self.jobs:
                    self.jobs[request.id].set()
                yield reply(request, {}, final=True)
                return
            self.seen.append(request)
            self.jobs[request.id] = asyncio.Event()
            try:
                async for said in self.behave(request, context):
                    yield said
            except asyncio.CancelledError:
                if self.models[request.model_name].steps:
                    self._orphan(request.id)
                raise
            finally:
                if request.id not in self._orphans:
                    self.jobs.pop(request.id, None)

    def _orphan(self, request_id: str) -> None:
        """A request of an ensemble whose caller has gone runs on, until it is stopped."""

        async def wait() -> None:
            await self.jobs[request_id].wait()
            self.jobs.pop(request_id, None)
            self._orphans.pop(request_id, None)

        self._orphans[request_id] = asyncio.get_running_loop().create_task(wait())

    async def _server_ready(self, request: Any, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self.ready)

    async def _server_metadata(self, request: Any, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="triton", version="2.51.0")

    async def _index(self, request: Any, context: Any) -> pb.RepositoryIndexResponse:
        said = pb.RepositoryIndexResponse()
        for one in self.models.values():
            said.models.add(name=one.name, version="1", state=one.state, reason=one.reason)
        return said

    async def _model_metadata(self, request: Any, context: Any) -> pb.ModelMetadataResponse:
        return (await self._model(request.name, context)).metadata()

    async def _model_config(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        return pb.ModelConfigResponse(config=(await self._model(request.name, context)).config())

    async def _model_ready(self, request: Any, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=(await self._model(request.name, context)).state == "READY")

    async def _model(self, name: str, context: Any) -> FakeModel:
        if name not in self.models:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return self.models[name]


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())
