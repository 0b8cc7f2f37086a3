"""Builds a tiny random Llama with a tokenizer and a chat template: a real engine's work without a download.

    python scripts/make_tiny.py DIR

The tokenizer is a byte-level BPE trained on Python's own standard library; the weights are random but the same every
time, so greedy answers repeat. What it writes is nonsense by design. Needs torch, tokenizers and transformers.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
CONTEXT_TOKENS = 4096
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content or [] -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` words, trained on 80 modules of the standard library."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train([str(path) for path in modules], trainer)
    begin, end = SPECIAL[:2]
    words = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=begin, eos_token=end, pad_token=end)
    words.chat_template = TEMPLATE
    return words


def weights() -> LlamaForCausalLM:
    """Two layers. `head_dim` is 64, because vLLM's CPU attention has no kernel for very small heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(folder)
    weights().save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
