#!/bin/sh
# ucm.sh DIRECTORY: installs the UCM that the stores are tested against, from PyPI, without its
# dependencies. check-ucm leaves out its compiled parts.
set -eu

to=$1
wanted=uc-manager-cuda-cu130==${UCM_VERSION:-0.8.1}
if [ "$(cat "$to/ucmd.wanted" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -rf "$to"
mkdir -p "$to"
echo "check-ucm: fetching $wanted"
python3 -m venv "$to/venv" || {
    echo "check-ucm: python3 has no venv: install python3-venv" >&2
    exit 1
}
"$to/venv/bin/pip" -q --disable-pip-version-check download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    -d "$to/wheels" "$wanted"
python3 -m zipfile -e "$to"/wheels/*.whl "$to"
rm -rf "$to/wheels" "$to/venv"
echo "$wanted" >"$to/ucmd.wanted"
