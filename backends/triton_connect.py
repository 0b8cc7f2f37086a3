"""From a configuration to a Triton engine that has answered: what is there, does it fit, is it alive."""

import asyncio
import logging

import grpc
from msgspec import Struct

from backends import triton_facts, words
from backends.bundle import Bundle
from backends.http1 import Pool, Timing, parse_url
from backends.openai_probe import Site
from backends.protocol import Backend, BackendError, BackendLost
from backends.scribe import Scribe
from backends.triton import Triton, target
from backends.triton_dialect import Speech
from backends.triton_engine import TritonEngine
from backends.triton_facts import Facts
from backends.triton_layout import Dialect, Layout, look
from backends.triton_link import Link, Server
from backends.triton_metrics import Page, Sizes
from backends.triton_stream import Patience

log = logging.getLogger(__name__)

METRICS_S = 5.0
UNSEEN_RUNNING = 32
"""Requests at once for an engine of which nothing says how many it takes, nor would show that they wait."""

UNSTREAMED_S = 600.0
"""The longest answer of a model that tells it in one piece, where nothing else is set."""

STRICT = 0.9
"""Share of the KV cache that may be promised where the engine does not show how full it is."""


class Found(Struct, frozen=True, kw_only=True):
    """Everything that was read of one engine."""

    server: Server
    layout: Layout
    facts: Facts
    sizes: Sizes
    words: words.Words | None
    metered: bool

    @property
    def tokens_per_block(self) -> int:
        return self.sizes.tokens_per_block or self.facts.tokens_per_block


async def connect(config: Triton, model: str) -> Backend:
    """See `Triton.connect`. `model` is the pool's name, Triton's own is the configuration's."""
    facts, known, metadata, credentials = await asyncio.to_thread(_files, config)
    link = Link(target(config.url), metadata, credentials)
    metrics = _metrics(config)
    try:
        found = await _look(config, link, metrics, facts, known)
        engine = _engine(config, model, link, found)
        engine.watch(config.canary_s, metrics if found.metered else None)
        await engine.canary.ask()
    except BaseException:
        await link.aclose()
        if metrics is not None:
            metrics.pool.close()
        raise
    if metrics is not None and not found.metered:
        metrics.pool.close()
    return engine


async def _look(config: Triton, link: Link, metrics: Site | None, facts: Facts, known: words.Words | None) -> Found:
    server = await link.server(config.connect_s)
    layout = await look(link, config.model, config.wanted, known is not None, config.connect_s)
    if layout.dialect is Dialect.TOKENS and known is None:
        raise BackendError(f"{config.name}: token ids need tokenizer: the folder with the model's tokenizer files")
    page = await _page(config, metrics, layout)
    sizes = page.sizes() if page is not None else Sizes()
    wrong = triton_facts.contradictions(facts, layout, sizes, config.limits, known.vocab_size if known else 0)
    if facts.max_seq_len and config.context_tokens > facts.max_seq_len:
        wrong.append(
            f"context_tokens = {config.context_tokens}, but {facts.source} has max_seq_len = {facts.max_seq_len}"
        )
    if wrong:
        raise BackendError(f"{config.name}: " + "; ".join(wrong))
    metered = page is not None and page.speaks
    return Found(server=server, layout=layout, facts=facts, sizes=sizes, words=known, metered=metered)


def _engine(config: Triton, model: str, link: Link, found: Found) -> TritonEngine:
    layout, facts = found.layout, found.facts
    speech = Speech(
        layout,
        cumulative=config.llmapi_text == "cumulative",
        logprobs=config.logprobs,
        tokens_per_block=found.tokens_per_block,
    )
    able = speech.able(config.tools)
    context = config.context_tokens or facts.max_seq_len or (found.words.context_tokens if found.words else 0)
    output, most = config.default_output_tokens, facts.max_input_len
    scribe = Scribe(config.name, able, found.words, context, output, input_tokens=most)
    running = config.limits.max_running or triton_facts.running(facts, layout, found.sizes) or UNSEEN_RUNNING
    bundle = Bundle(
        engine="tensorrt-llm",
        engine_version=facts.version,
        model=facts.model or layout.entry.name,
        revision=found.words.fingerprint if found.words else "",
        tokenizer=found.words.folder if found.words and layout.dialect is Dialect.TOKENS else "",
        precision=facts.precision,
        quantization=facts.quantization,
        driver=f"{found.server.name} {found.server.version}, {layout.dialect.value}",
        context_tokens=context,
        max_running=running,
        kv_tokens=_kv_tokens(found),
        features=able.features(),
        kinds=scribe.kinds,
    )
    first_s = config.first_token_s if layout.streams else config.total_s or UNSTREAMED_S
    patience = Patience(first_s, config.token_s, config.total_s)
    return TritonEngine(config.name, bundle, link, scribe, speech, patience)


def _kv_tokens(found: Found) -> int:
    """Tokens that the KV cache holds; fewer where nothing would show that it runs full; 0 where nothing says."""
    if found.sizes.kv_tokens:
        return found.sizes.kv_tokens
    said = found.layout.engine.parameters.get("max_tokens_in_paged_kv_cache", "")
    return int(int(said) * STRICT) if said.isdigit() else 0


def _files(
    config: Triton,
) -> tuple[Facts, words.Words | None, tuple[tuple[str, str], ...], grpc.ChannelCredentials | None]:
    """What is read from the disk."""
    facts = triton_facts.read(config.engine_config) if config.engine_config else Facts()
    known = words.load(config.tokenizer) if config.tokenizer else None
    metadata = tuple(config.metadata.items()) + config.secret()
    credentials = None
    if config.url.startswith("grpcs:"):
        credentials = grpc.ssl_channel_credentials(*config.certificates())
    return facts, known, metadata, credentials


def _metrics(config: Triton) -> Site | None:
    url = config.metrics_page
    if not url:
        return None
    timing = Timing(connect_s=min(config.connect_s, METRICS_S), first_byte_s=METRICS_S, idle_s=METRICS_S)
    return Site(Pool(parse_url(url), timing, None, 4), "")


async def _page(config: Triton, metrics: Site | None, layout: Layout) -> Page | None:
    """The metrics page. One that is set must be there; the guessed one may be missing, which is told."""
    if metrics is None:
        return None
    try:
        page = await metrics.get("" if metrics.pool.origin.prefix else "/metrics")
    except (BackendLost, BackendError) as error:
        if config.metrics_url:
            raise
        log.info("%s: no metrics at %s (%s): its load is our own count", config.name, config.metrics_page, error)
        return None
    if page.status != 200:
        if config.metrics_url:
            raise BackendError(f"{config.name}: metrics_url: {config.metrics_url} answers {page.status}")
        return None
    return Page(page.body, layout.engine.name, layout.entry.name)
