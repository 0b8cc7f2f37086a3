"""A request in the terms of an engine that takes tokens: what a plan's `work` is for such a backend."""

from msgspec import Struct

from backends.generation import Guide, Sampling
from backends.protocol import Kind
from backends.toolcalls import Calling


class Ask(Struct, kw_only=True):
    """A checked request. Nothing in it has to be given back.

    `ids` are the prompt's tokens, empty where nobody here has a tokenizer; `text` is the prompt as text, without the
    token that a server's tokenizer would begin it with. `max_tokens` bounds each of the `n` choices and is never 0.
    `end_ids` end a choice: the model's own, unless the client wants them ignored, and those that it named. `stops` are
    found in the text by `backends.answer`; an engine may be told of them as well. `calling` is how tool calls are to be
    found in it. `ready` is an answer that needs no engine.
    """

    kind: Kind
    ids: list[int] = []
    text: str = ""
    max_tokens: int = 1
    n: int = 1
    sampling: Sampling = Sampling()
    guide: Guide | None = None
    calling: Calling | None = None
    logprobs: bool = False
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    end_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    exact: bool = False
    ready: bytes | None = None

    def close(self) -> None:
        """Does nothing: there is nothing to let go of."""
