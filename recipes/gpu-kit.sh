#!/bin/sh
# Proves prefill on this machine's GPU and measures it, in ten minutes: see docs/cuda.md. It needs a python3 that has
# torch and transformers, and no network. PYTHON names another python3, OUT the folder of results.json
# (default: gpu-kit-results). `./run.sh --help` shows the options.
set -eu
kit=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
OUT=$(mkdir -p "${OUT:-gpu-kit-results}" && cd "${OUT:-gpu-kit-results}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

# An environment that sees the packages of python3, which may itself be one of a virtual environment
"$python" -m venv --without-pip --system-site-packages "$work/env"
"$python" -c 'import sys; print("\n".join(each for each in sys.path if each.endswith("-packages")))' \
  > "$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/python3.pth"

# What is there stays; what is lacking comes from the kit
for pip in "$kit"/wheels/pip-*.whl; do :; done
"$work/env/bin/python" "$pip/pip" --isolated --disable-pip-version-check install --quiet --no-index \
  --no-cache-dir --find-links "$kit/wheels" prefillcli pytest hypothesis accelerate

export OUT HF_HUB_OFFLINE=1
cd "$kit"
"$work/env/bin/python" -m benchmarks.gpu_kit "$@"
