"""The tokenizing step of the in-flight layout."""

import numpy as np
import text as words
import triton_python_backend_utils as pb


def word_lists(request, name, rows):
    """[rows, 2, n] as `tensorrt_llm` reads it."""
    tensor = pb.get_input_tensor_by_name(request, name)
    lists = []
    for row in range(rows):
        flat, ends = [], []
        for word in tensor.as_numpy()[row].reshape(-1) if tensor is not None else ():
            flat += words.encode(word.decode())
            ends.append(len(flat))
        lists.append((flat, ends))
    out = np.full((rows, 2, max([1, *(len(flat) for flat, _ in lists)])), -1, np.int32)
    out[:, 0, :] = 0
    for row, (flat, ends) in enumerate(lists):
        out[row, 0, : len(flat)] = flat
        out[row, 1, : len(ends)] = ends
    return out


class TritonPythonModel:
    def execute(self, requests):
        return [self._one(request) for request in requests]

    def _one(self, request):
        query = pb.get_input_tensor_by_name(request, "QUERY").as_numpy()
        rows = query.shape[0]
        ids = [words.encode(one.decode()) or [words.BOS] for one in query.reshape(-1)]
        longest = max(map(len, ids))

        def given(name, default):
            tensor = pb.get_input_tensor_by_name(request, name)
            return tensor.as_numpy().astype(np.int32) if tensor is not None else np.full((rows, 1), default, np.int32)

        tensors = {
            "INPUT_ID": np.array([one + [words.PAD] * (longest - len(one)) for one in ids], np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(one)] for one in ids], np.int32),
            "STOP_WORDS_IDS": word_lists(request, "STOP_WORDS_DICT", rows),
            "BAD_WORDS_IDS": word_lists(request, "BAD_WORDS_DICT", rows),
            "REQUEST_OUTPUT_LEN": pb.get_input_tensor_by_name(request, "REQUEST_OUTPUT_LEN").as_numpy(),
            "OUT_END_ID": given("END_ID", words.EOS),
            "OUT_PAD_ID": given("PAD_ID", words.PAD),
        }
        return pb.InferenceResponse([pb.Tensor(name, value) for name, value in tensors.items()])
