#!/bin/sh
# transformers.sh FOLDER: a virtual environment with PyTorch, transformers and numpy, for make check-transformers.
set -eu

venv=$1
"$venv/bin/python" -c "import torch, transformers, accelerate, numpy" 2>/dev/null && exit 0
rm -rf "$venv"
python3 -m venv "$venv" || {
    echo "check-transformers: python3 has no venv: install python3-venv" >&2
    exit 1
}
echo "check-transformers: fetching torch and transformers, some GB"
"$venv/bin/pip" -q --disable-pip-version-check install torch "transformers>=5" accelerate numpy || {
    echo "check-transformers: pip can't install torch, transformers and accelerate: it needs PyPI, or a folder with their wheels and" \
         "those that they name (PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER)" >&2
    exit 1
}
