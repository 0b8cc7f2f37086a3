#!/bin/sh
# Writes the model repository that compose.triton.yaml serves, from the templates in Triton's own image:
#
#   docker run --rm -v "$PWD/docker/triton:/here:ro" -v "$MODEL_REPOSITORY:/repository" IMAGE sh /here/fill.sh [ensemble]
#
# Without a word the repository has `tensorrt_llm` alone, which is all that the token dialect needs; with `ensemble` it
# has the models that take and give text, too. BATCH is how many requests Triton lets through at once: not less than the
# engine's max_batch_size, because Triton's batcher holds what is above it for up to half a second.
set -eu

TEMPLATES=/app/all_models/inflight_batcher_llm
FILL=/app/tools/fill_template.py
OUT=/repository
BATCH=${BATCH:-64}
KV_FRACTION=${KV_FRACTION:-0.9}

fill() {
    rm -rf "${OUT:?}/$1"
    cp -r "$TEMPLATES/$1" "$OUT/$1"
    mkdir -p "$OUT/$1/1"
    python3 "$FILL" -i "$OUT/$1/config.pbtxt" "$2"
}

fill tensorrt_llm "triton_backend:tensorrtllm,triton_max_batch_size:$BATCH,decoupled_mode:True,engine_dir:/models/engine,\
batching_strategy:inflight_fused_batching,max_queue_delay_microseconds:0,max_queue_size:0,enable_kv_cache_reuse:True,\
exclude_input_in_output:True,kv_cache_free_gpu_mem_fraction:$KV_FRACTION,encoder_input_features_data_type:TYPE_FP16,\
logits_datatype:TYPE_FP32"

if [ "${1:-}" = ensemble ]; then
    words="tokenizer_dir:/models/tokenizer,triton_max_batch_size:$BATCH"
    fill preprocessing "$words,preprocessing_instance_count:4"
    fill postprocessing "$words,postprocessing_instance_count:4"
    fill ensemble "triton_max_batch_size:$BATCH,logits_datatype:TYPE_FP32"
fi
