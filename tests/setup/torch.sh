#!/bin/sh
# torch.sh FOLDER: PyTorch in the virtual environment FOLDER, with cupy where a GPU is, for make check-encodings-trained.
set -eu

venv=$1
missing() {
    echo "torch: pip can't install $1, which training needs: it needs PyPI, or a folder with its wheel and those that" \
         "it names (PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER)" >&2
    exit 1
}
"$venv/bin/python" -c "import torch" 2>/dev/null || {
    echo "torch: fetching PyTorch, some GB"
    "$venv/bin/pip" -q --disable-pip-version-check install torch || missing torch
}
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    "$venv/bin/python" -c "import cupy" 2>/dev/null || "$venv/bin/pip" -q --disable-pip-version-check install cupy-cuda13x || missing cupy-cuda13x
fi
