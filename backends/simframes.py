"""What only the simulated engine says on the wire: embeddings."""

import base64
import struct

import msgspec


def embeddings(model: str, vectors: list[list[float]], base64_wanted: bool, prompt_tokens: int) -> bytes:
    """The body of an embeddings answer. In base64 a vector is little-endian 32-bit floats, as OpenAI has it."""
    rows = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if base64_wanted else vector}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return msgspec.json.encode({"object": "list", "data": rows, "model": model, "usage": usage})


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
