"""What Triton's failures mean. In a stream, text is all there is: Triton gives in-band errors no code."""

import grpc

from backends.protocol import BackendBusy, BackendError, BackendLost, Refused

_GONE = (
    "not healthy",  # the Python backend, once it has noticed that a model's process died
    "failed to communicate with the stub",
    "server is shutting down",
    "server is not ready",
    "request for unknown model",
    "has no available versions",
    "no version is available",
    "is not ready",
    "unloading",
)
_FULL = ("maximum queue size", "max queue size", "queue is full", "queue size exceeded", "no free slots")
_TOO_LONG = (
    "exceeds the kv cache",
    "max_seq_len",
    "max_input_len",
    "maximum input length",
    "max_num_tokens",
    "maximum sequence length",
    "maximum number of tokens",
    "prompt length",
    "prompt is too long",
)
_LOST = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND})
_OUR_KEY = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
TEXT_CHARS = 500


def of_text(text: str) -> Exception:
    """The exception for an in-band error or the details of a status."""
    low = text.lower()
    said = text[:TEXT_CHARS]
    if any(phrase in low for phrase in _GONE):
        return BackendLost(f"Triton says: {said}")
    if any(phrase in low for phrase in _FULL):
        return BackendBusy(f"Triton says: {said}")
    if any(phrase in low for phrase in _TOO_LONG):
        return Refused(400, "context_length_exceeded", f"the engine says: {said}", "max_tokens")
    return BackendError(f"Triton says: {said}")


def of_status(error: grpc.RpcError) -> Exception:
    """The exception for a call that ended with another status than OK."""
    code, details = error.code(), str(error.details() or "")[:TEXT_CHARS]
    if code in _OUR_KEY:
        return BackendError(f"Triton refuses us ({code.name}: {details}): check api_key_env, api_key_file and metadata")
    if code in _LOST:
        return BackendLost(f"Triton: {code.name}: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return Refused(413, "too_large", f"the request is too large for this Triton server: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return BackendBusy(f"Triton: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return BackendError(f"this is no Triton server, or one without the call ({details}): is the url right?")
    known = of_text(details)
    return known if not isinstance(known, BackendError) else BackendError(f"Triton: {code.name}: {details}")
