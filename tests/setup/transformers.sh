#!/bin/sh
# transformers.sh FOLDER: PyTorch and transformers in the virtual environment FOLDER, for make check-blend.
set -eu

venv=$1
"$(dirname "$0")/torch.sh" "$venv"
"$venv/bin/python" -c "import transformers, accelerate" 2>/dev/null && exit 0
echo "transformers: fetching transformers and accelerate"
"$venv/bin/pip" -q --disable-pip-version-check install "transformers>=5" accelerate || {
    echo "transformers: pip can't install transformers and accelerate, which make check-blend needs: it needs PyPI, or a folder with" \
         "their wheels and those that they name (PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER)" >&2
    exit 1
}
