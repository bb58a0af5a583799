#!/bin/sh
# lmcache.sh DIRECTORY: makes a virtual environment with the LMCache that the adapter is tested
# against. It lacks LMCache's CUDA packages, because check-lmcache runs on a CPU.
set -eu

venv=$1
wanted=lmcache==${LMCACHE_VERSION:-0.5.6}
if [ "$(cat "$venv/ucmd.wanted" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -rf "$venv"
python3 -m venv "$venv" || {
    echo "check-lmcache: python3 has no venv: install python3-venv" >&2
    exit 1
}
pip() {
    "$venv/bin/pip" -q --disable-pip-version-check install "$@"
}
echo "check-lmcache: fetching $wanted and what it needs, some GB"
pip --no-deps "$wanted"
pip torch 'numpy<=2.2.6' msgspec blake3 pyyaml pyzmq psutil py-cpuinfo sortedcontainers cachetools nvtx aiofile aiofiles \
    'prometheus_client<=0.24.1' 'opentelemetry-sdk' 'opentelemetry-exporter-prometheus<=0.61b0' opentelemetry-exporter-otlp safetensors numba transformers httpx fastapi aiohttp cryptography protobuf grpcio redis uvicorn huggingface_hub
(cd "$venv" && bin/python -c 'import lmcache.v1.distributed.storage_manager') || {
    echo "check-lmcache: $wanted can't be imported from $venv" >&2
    exit 1
}
echo "$wanted" >"$venv/ucmd.wanted"
