"""`tensorrt_llm` of the LLM API layout: text in, text out, without a batch dimension."""

import json

import numpy as np
import text as words
import triton_python_backend_utils as pb
from engine import Engine, Job, scalar, setting

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def strings(*values):
    return np.array([str(value).encode() for value in values], dtype=np.object_)


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.engine = Engine(config, args["model_version"])
        self.delta = setting(config, "standin_stream_text", str, "cumulative") == "delta"

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._one(request, sender)
            except Exception as exc:
                self._fail(sender, f"Error generating request: {exc}")

    def _fail(self, sender, text):
        sender.send(pb.InferenceResponse(error=pb.TritonError(text)), flags=FINAL)

    def _one(self, request, sender):
        user_id = request.request_id()
        if scalar(request, "stop", False):
            self.engine.stop(user_id)
            self._fail(sender, "Request cancelled by client")
            return
        streaming = bool(scalar(request, "streaming", False))
        wants_reason = bool(scalar(request, "return_finish_reason", False))
        perf = bool(scalar(request, "sampling_param_return_perf_metrics", False))
        state = {"ids": [], "sent": ""}

        def on_tokens(new, final, reason, error):
            if error:
                self._fail(sender, f"Error generating request: {error}")
                return
            state["ids"] += new
            if not (streaming or final):
                return
            whole = words.to_bytes(state["ids"]).decode("utf-8", errors="ignore")
            said, state["sent"] = (whole[len(state["sent"]) :] if self.delta else whole), whole
            tensors = [pb.Tensor("text_output", strings(said))]
            if wants_reason:
                tensors.append(pb.Tensor("finish_reason", strings(reason)))
            if perf and final:  # written as text, though declared as a number
                tensors.append(pb.Tensor("kv_cache_reused_block", strings(job.reused)))
            sender.send(pb.InferenceResponse(tensors), flags=FINAL if final else 0)

        job = Job(
            prompt=words.encode(scalar(request, "text_input")),
            limit=int(scalar(request, "sampling_param_max_tokens", 32)),
            on_tokens=on_tokens,
            user_id=user_id,
            cancelled=sender.is_cancelled,
            seed=int(scalar(request, "sampling_param_seed", 0)),
        )
        self.engine.submit(job)

    def finalize(self):
        self.engine.close()
