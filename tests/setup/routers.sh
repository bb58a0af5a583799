#!/bin/sh
# routers.sh FOLDER: a virtual environment with Dynamo's indexer, and what check_routers.py needs to play an engine.
set -eu

venv=$1
wanted=ai-dynamo-runtime==${DYNAMO_VERSION:-1.6.1}
if [ "$(cat "$venv/ucmd.wanted" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -rf "$venv"
python3 -m venv "$venv" || {
    echo "check-routers: python3 has no venv: install python3-venv" >&2
    exit 1
}
echo "check-routers: fetching $wanted"
"$venv/bin/pip" -q --disable-pip-version-check install "$wanted" pyzmq msgpack
echo "$wanted" >"$venv/ucmd.wanted"
