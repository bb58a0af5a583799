#!/bin/sh
# torch.sh FOLDER: PyTorch in the virtual environment FOLDER, with cupy where a GPU is, for make check-encodings-trained.
set -eu

venv=$1
"$venv/bin/python" -c "import torch" 2>/dev/null || {
    echo "torch: fetching PyTorch, some GB"
    "$venv/bin/pip" -q --disable-pip-version-check install torch
}
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    "$venv/bin/python" -c "import cupy" 2>/dev/null || "$venv/bin/pip" -q --disable-pip-version-check install cupy-cuda13x
fi
