"""`tensorrt_llm` of the in-flight layout: token ids in, token ids out, stopped by a second request of the same id."""

import json

import numpy as np
import text as words
import triton_python_backend_utils as pb
from engine import Engine, Job, scalar

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def word_list(request, name):
    """[1, 2, n]: ids in row 0, where each word ends in row 1, filled up with -1."""
    tensor = pb.get_input_tensor_by_name(request, name)
    if tensor is None:
        return []
    flat, ends = tensor.as_numpy().reshape(2, -1)
    found, start = [], 0
    for end in ends:
        if end <= start:
            break
        found.append(flat[start:end].tolist())
        start = int(end)
    return found


class TritonPythonModel:
    def initialize(self, args):
        self.engine = Engine(json.loads(args["model_config"]), args["model_version"])

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._one(request, sender)
            except Exception as exc:
                sender.send(pb.InferenceResponse(error=pb.TritonError(str(exc))), flags=FINAL)

    def _one(self, request, sender):
        user_id = request.request_id()
        if scalar(request, "stop", False):
            self.engine.stop(user_id)
            sender.send(pb.InferenceResponse(), flags=FINAL)
            return
        ids = pb.get_input_tensor_by_name(request, "input_ids").as_numpy().reshape(-1).tolist()
        streaming, wanted = bool(scalar(request, "streaming", False)), set(request.requested_output_names())
        logprobs, perf = scalar(request, "return_log_probs", False), scalar(request, "return_perf_metrics", False)
        counts = scalar(request, "return_num_input_tokens", False)
        kept = []

        def on_tokens(new, final, reason, error):
            if error:
                text = f"Executor failed process requestId 1 due to the following error: {error}"
                sender.send(pb.InferenceResponse(error=pb.TritonError(text)), flags=FINAL)
                return
            kept.extend(new)
            if not (streaming or final):
                return
            out = new if streaming else kept
            tensors = {
                "output_ids": np.array(out, np.int32).reshape(1, 1, -1),
                "sequence_length": np.array([[len(out)]], np.int32),
            }
            if logprobs:
                tensors["output_log_probs"] = np.full((1, 1, len(out)), -0.5, np.float32)
            if counts:
                tensors["num_input_tokens"] = np.array([[len(job.prompt)]], np.int32)
                tensors["num_output_tokens"] = np.array([[len(out)]], np.int32)
            if perf and final:
                tensors["kv_cache_reused_blocks"] = np.array([[job.reused]], np.int32)
            response = [pb.Tensor(name, value) for name, value in tensors.items() if name in wanted]
            sender.send(pb.InferenceResponse(response), flags=FINAL if final else 0)

        job = Job(
            prompt=ids[: int(scalar(request, "input_lengths"))],
            limit=int(scalar(request, "request_output_len")),
            on_tokens=on_tokens,
            user_id=user_id,
            cancelled=sender.is_cancelled,
            end_id=int(scalar(request, "end_id", words.EOS)),
            stop_ids=word_list(request, "stop_words_list"),
            seed=int(scalar(request, "seed", 0)),
            guide=scalar(request, "guided_decoding_guide", ""),
        )
        self.engine.submit(job)

    def finalize(self):
        self.engine.close()
