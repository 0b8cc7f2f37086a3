"""The detokenizing step of the in-flight layout: every response is decoded by itself, broken characters and all."""

import numpy as np
import text as words
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [self._one(request) for request in requests]

    def _one(self, request):
        tokens = pb.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
        said = [
            words.decode(beam[:size].tolist()).encode()
            for row, sizes in zip(tokens, lengths, strict=True)
            for beam, size in zip(row, sizes, strict=True)
        ]
        return pb.InferenceResponse([pb.Tensor("OUTPUT", np.array(said, dtype=np.object_))])
