#!/bin/sh
# Makes .venv-triton: a real Triton server for `make test-engines`, from the Python package index, without Docker or a
# GPU. The wheel nvidia-pytriton holds the server and its Python backend (Triton 24.10, 150 MB); the models of the tests
# run in the environment around it, whose numpy is 1.x: with numpy 2 this server's backend sends empty strings.
# Needs Linux on x86-64, and Python 3.10, 3.11 or 3.12 with a shared libpython. Runs again for nothing when its inputs
# have not changed. VENV_TRITON=folder puts it elsewhere, PYTHON_TRITON=python3.12 chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."
venv=${VENV_TRITON:-.venv-triton}
python=${PYTHON_TRITON:-${PYTHON:-python3}}

say() { echo "triton: $*" >&2; }

if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    say "there is no such server for $(uname -s) on $(uname -m): its tests will be skipped"
    exit 0
fi
stamp=$(cat constraints-triton.txt "$0" | cksum)
if [ "$(cat "$venv/.installed" 2>/dev/null || true)" != "$stamp" ]; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    case $version in
    3.10 | 3.11 | 3.12) ;;
    *)
        say "its Python backend needs Python 3.10, 3.11 or 3.12, not $version: set PYTHON_TRITON=python3.11"
        exit 1
        ;;
    esac
    "$python" -c 'import sysconfig, sys; sys.exit(not sysconfig.get_config_var("Py_ENABLE_SHARED"))' || {
        say "$python has no shared libpython, which the Python backend needs: set PYTHON_TRITON to one that has"
        exit 1
    }
    say "making $venv with Python $version ..."
    rm -rf "$venv"
    "$python" -m venv "$venv"
    pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" --quiet --no-input --constraint constraints-triton.txt; }
    pip install numpy
    say "installing the Triton server into $venv/server (some minutes) ..."
    pip install --no-deps --target "$venv/server" nvidia-pytriton
    server=$venv/server/pytriton/tritonserver
    cp "$server/python_backend_stubs/$version/triton_python_backend_stub" "$server/backends/python/"
    "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))' >"$venv/libdir"
    echo "$stamp" >"$venv/.installed"
fi
say "$venv has nvidia-pytriton $(sed -n 's/^nvidia-pytriton==//p' constraints-triton.txt): Triton server 2.51.0"
