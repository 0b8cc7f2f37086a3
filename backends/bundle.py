"""What a backend runs, pinned: the thing that a difference at start is measured against."""

from msgspec import Struct

EVERY_FEATURE = "*"


class Bundle(Struct, frozen=True, kw_only=True):
    """What a backend says it runs, read when it connects. Empty strings and zeros are "it did not say".

    `features` are names of `backends.features.Feature`, or `*` where only the engine knows (a remote server).
    `context_tokens` is prompt and output together; `kv_tokens` is what the KV cache holds.
    """

    engine: str
    engine_version: str = ""
    model: str
    revision: str = ""
    tokenizer: str = ""
    precision: str = ""
    quantization: str = ""
    driver: str = ""
    context_tokens: int = 0
    max_running: int = 0
    kv_tokens: int = 0
    features: frozenset[str] = frozenset({EVERY_FEATURE})
    kinds: frozenset[str] = frozenset({"chat", "completion"})

    def lacks(self, wanted: frozenset[str]) -> frozenset[str]:
        """The features among `wanted` that this bundle does not have."""
        return frozenset() if EVERY_FEATURE in self.features else wanted - self.features
