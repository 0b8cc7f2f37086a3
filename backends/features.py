"""What a request may ask of an engine beyond plain text, and the body field that asks for it."""

import enum


class Feature(enum.StrEnum):
    TOOLS = "tools"
    STRUCTURED_OUTPUT = "structured_output"
    LOGPROBS = "logprobs"
    LOGIT_BIAS = "logit_bias"
    CHOICES = "choices"  # n > 1 or best_of > 1
    IMAGES = "images"
    AUDIO = "audio"
    ECHO = "echo"
    SUFFIX = "suffix"
    PROMPTS = "prompts"  # several prompts in one completion request
    TOKEN_IDS = "token_ids"  # noqa: S105 - a completion's prompt as token ids
    REASONING = "reasoning"


FIELDS: dict[str, Feature] = {
    "tools": Feature.TOOLS,
    "tool_choice": Feature.TOOLS,
    "functions": Feature.TOOLS,
    "function_call": Feature.TOOLS,
    "parallel_tool_calls": Feature.TOOLS,
    "response_format": Feature.STRUCTURED_OUTPUT,
    "structured_outputs": Feature.STRUCTURED_OUTPUT,
    "logprobs": Feature.LOGPROBS,
    "top_logprobs": Feature.LOGPROBS,
    "prompt_logprobs": Feature.LOGPROBS,
    "logit_bias": Feature.LOGIT_BIAS,
    "n": Feature.CHOICES,
    "best_of": Feature.CHOICES,
    "modalities": Feature.AUDIO,
    "audio": Feature.AUDIO,
    "echo": Feature.ECHO,
    "suffix": Feature.SUFFIX,
    "reasoning_effort": Feature.REASONING,
}
"""Which field asks for which feature. Values that ask for nothing (null, false, n = 1, type text) do not count."""
