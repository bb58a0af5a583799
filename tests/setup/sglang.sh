#!/bin/sh
# sglang.sh FOLDER: a virtual environment with the SGLang that the storage is tried against. Its wheels are those for NVIDIA GPUs; what
# check-sglang uses of it runs without one.
set -eu

venv=$1
wanted=sglang==${SGLANG_VERSION:-0.5.23}
if [ "$(cat "$venv/ucmd.wanted" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -rf "$venv"
python3 -m venv "$venv" || {
    echo "check-sglang: python3 has no venv: install python3-venv" >&2
    exit 1
}
echo "check-sglang: fetching $wanted and what it needs, several GB"
"$venv/bin/pip" -q --disable-pip-version-check install "$wanted"
(cd "$venv" && bin/python -c 'import sglang.srt.mem_cache.pool_host.mha') || {
    echo "check-sglang: $wanted can't be imported from $venv" >&2
    exit 1
}
echo "$wanted" >"$venv/ucmd.wanted"
