"""The tensors of TensorRT-LLM's two model layouts for Triton, one a line: NAME TYPE DIMS [flags].

Dims are without the batch dimension. Flags: o optional, r ragged batches allowed, s a scalar (dims [1] reshaped to []).
Side inputs for logits, prompt tuning, LoRA, draft models and vision are left out.
"""

TENSORRT_LLM_IN = """
input_ids INT32 -1 or
input_lengths INT32 1 s
request_output_len INT32 1 s
num_return_sequences INT32 1 os
end_id INT32 1 os
pad_id INT32 1 os
stop_words_list INT32 2,-1 or
bad_words_list INT32 2,-1 or
embedding_bias FP32 -1 or
beam_width INT32 1 os
temperature FP32 1 os
runtime_top_k INT32 1 os
runtime_top_p FP32 1 os
len_penalty FP32 1 os
early_stopping BOOL 1 os
repetition_penalty FP32 1 os
min_tokens INT32 1 os
presence_penalty FP32 1 os
frequency_penalty FP32 1 os
seed UINT64 1 os
return_log_probs BOOL 1 os
return_perf_metrics BOOL 1 os
return_num_input_tokens BOOL 1 os
return_num_output_tokens BOOL 1 os
exclude_input_in_output BOOL 1 os
stop BOOL 1 os
streaming BOOL 1 os
guided_decoding_guide_type STRING 1 or
guided_decoding_guide STRING 1 or
"""

_SIDE_OUT = """
cum_log_probs FP32 -1
output_log_probs FP32 -1,-1
sequence_index INT32 1
kv_cache_alloc_new_blocks INT32 1
kv_cache_reused_blocks INT32 1
kv_cache_alloc_total_blocks INT32 1
num_input_tokens INT32 1
num_output_tokens INT32 1
"""

TENSORRT_LLM_OUT = "output_ids INT32 -1,-1\nsequence_length INT32 -1" + _SIDE_OUT

ENSEMBLE_IN = """
text_input STRING 1
max_tokens INT32 1
num_return_sequences INT32 1 o
bad_words STRING -1 o
stop_words STRING -1 o
exclude_input_in_output BOOL 1 o
end_id INT32 1 o
pad_id INT32 1 o
top_k INT32 1 o
top_p FP32 1 o
temperature FP32 1 o
length_penalty FP32 1 o
repetition_penalty FP32 1 o
min_tokens INT32 1 o
presence_penalty FP32 1 o
frequency_penalty FP32 1 o
seed UINT64 1 o
return_log_probs BOOL 1 o
return_perf_metrics BOOL 1 o
return_num_input_tokens BOOL 1 o
return_num_output_tokens BOOL 1 o
beam_width INT32 1 o
stream BOOL 1 o
guided_decoding_guide_type STRING 1 or
guided_decoding_guide STRING 1 or
"""

TEXT_OUT = "text_output STRING -1" + _SIDE_OUT

PREPROCESSING_IN = """
QUERY STRING 1
REQUEST_OUTPUT_LEN INT32 1
BAD_WORDS_DICT STRING -1 o
STOP_WORDS_DICT STRING -1 o
END_ID INT32 1 o
PAD_ID INT32 1 o
"""

PREPROCESSING_OUT = """
INPUT_ID INT32 -1
REQUEST_INPUT_LEN INT32 1
BAD_WORDS_IDS INT32 2,-1
STOP_WORDS_IDS INT32 2,-1
REQUEST_OUTPUT_LEN INT32 -1
OUT_END_ID INT32 1
OUT_PAD_ID INT32 1
"""

POSTPROCESSING_IN = "TOKENS_BATCH INT32 -1,-1\nSEQUENCE_LENGTH INT32 -1"
POSTPROCESSING_OUT = "OUTPUT STRING -1"

LLMAPI_IN = """
text_input STRING -1
streaming BOOL 1 o
sampling_param_best_of INT32 1 o
sampling_param_temperature FP32 1 o
sampling_param_top_k INT32 1 o
sampling_param_top_p FP32 1 o
sampling_param_frequency_penalty FP32 1 o
sampling_param_presence_penalty FP32 1 o
sampling_param_max_tokens INT32 1 o
sampling_param_stop STRING -1 o
sampling_param_seed UINT64 1 o
sampling_param_exclude_input_from_output BOOL 1 o
sampling_param_return_perf_metrics BOOL 1 o
return_finish_reason BOOL 1 o
return_stop_reason BOOL 1 o
return_cumulative_logprob BOOL 1 o
stop BOOL 1 o
"""

LLMAPI_OUT = """
text_output STRING -1
finish_reason STRING -1
stop_reason STRING -1
cumulative_logprob FP32 -1
kv_cache_reused_block INT32 -1
"""

_PASSED_ON = """
temperature repetition_penalty min_tokens presence_penalty frequency_penalty seed return_log_probs
return_perf_metrics return_num_input_tokens return_num_output_tokens num_return_sequences beam_width
guided_decoding_guide_type guided_decoding_guide exclude_input_in_output
"""

ENSEMBLE_STEPS: tuple[tuple[str, dict[str, str], dict[str, str]], ...] = (
    (
        "preprocessing",
        {
            "QUERY": "text_input",
            "REQUEST_OUTPUT_LEN": "max_tokens",
            "BAD_WORDS_DICT": "bad_words",
            "STOP_WORDS_DICT": "stop_words",
            "END_ID": "end_id",
            "PAD_ID": "pad_id",
        },
        {line.split()[0]: "_" + line.split()[0] for line in PREPROCESSING_OUT.strip().splitlines()},
    ),
    (
        "tensorrt_llm",
        {
            "input_ids": "_INPUT_ID",
            "input_lengths": "_REQUEST_INPUT_LEN",
            "request_output_len": "_REQUEST_OUTPUT_LEN",
            "end_id": "_OUT_END_ID",
            "pad_id": "_OUT_PAD_ID",
            "stop_words_list": "_STOP_WORDS_IDS",
            "bad_words_list": "_BAD_WORDS_IDS",
            "runtime_top_k": "top_k",
            "runtime_top_p": "top_p",
            "len_penalty": "length_penalty",
            "streaming": "stream",
            **{name: name for name in _PASSED_ON.split()},
        },
        {
            "output_ids": "_TOKENS_BATCH",
            "sequence_length": "_SEQUENCE_LENGTH",
            **{line.split()[0]: line.split()[0] for line in _SIDE_OUT.strip().splitlines()},
        },
    ),
    (
        "postprocessing",
        {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"},
        {"OUTPUT": "text_output"},
    ),
)
"""Model, its inputs from the ensemble's tensors, the ensemble's tensors from its outputs."""
