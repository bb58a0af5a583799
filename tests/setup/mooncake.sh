#!/bin/sh
# mooncake.sh DIRECTORY: a virtual environment with Mooncake's master and Python client.
# bin/mooncake-python in it runs its Python, or with --exec another program. It adds the RDMA
# libraries that the client is linked to: the system's, or Debian's packages unpacked into the
# directory.
set -eu

venv=$1
wanted=mooncake-transfer-engine-non-cuda==${MOONCAKE_VERSION:-0.3.13.post1}
if [ "$(cat "$venv/ucmd.wanted" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -rf "$venv"
# Debian's Python, because the backend's sandbox shows /usr. Installing pip alone would take four
# seconds of a processor.
if /usr/bin/python3 -m pip --python /usr/bin/python3 --version >/dev/null 2>&1; then
    /usr/bin/python3 -m venv --without-pip "$venv"
    pip="/usr/bin/python3 -m pip --python $venv/bin/python"
else
    /usr/bin/python3 -m venv "$venv"
    pip="$venv/bin/pip"
fi
echo "ucmd: fetching $wanted"
# shellcheck disable=SC2086
$pip -q --disable-pip-version-check --timeout 15 --retries 1 install --no-deps "$wanted" msgpack
mkdir -p "$venv/rdma"
if ! /sbin/ldconfig -p | grep -q libibverbs.so.1; then
    (cd "$venv/rdma" && apt-get -q download libibverbs1 libnl-3-200 libnl-route-3-200 >/dev/null 2>&1 &&
        for deb in *.deb; do dpkg -x "$deb" . || exit 1; done) || {
        echo "ucmd: no libibverbs1, which Mooncake's client is linked to: apt install libibverbs1" >&2
        exit 1
    }
fi
cat >"$venv/bin/mooncake-python" <<'EOF'
#!/bin/sh
venv=$(dirname "$(dirname "$(readlink -f "$0")")")
LD_LIBRARY_PATH=$(echo "$venv"/rdma/usr/lib/*-linux-gnu):$(echo "$venv"/rdma/lib/*-linux-gnu)
export LD_LIBRARY_PATH
[ "${1-}" != --exec ] || { shift; exec "$@"; }
exec "$venv/bin/python" "$@"
EOF
chmod +x "$venv/bin/mooncake-python"
"$venv/bin/mooncake-python" -c 'import mooncake.store, msgpack' || {
    echo "ucmd: $wanted can't be imported from $venv" >&2
    exit 1
}
echo "$wanted" >"$venv/ucmd.wanted"
