#!/bin/bash
# run.sh [FOLDER]: measures roots of the shared tier with what lies beside it: a bucket (s3_bench), an NFS server (ucm-bench share), what the hop to a process
# costs (backend_bench), processes that are killed (backend_kills.py), and a Mooncake store (mooncake_bench.py). As root. Each part has a time limit of
# its own; the figures stand at the end, and in FOLDER/figures.txt. With 16 cores the kills have cores of their own and run beside the rest. PARTS="hop-nfs
# nfs" runs only these.
set -u
here=$(cd "$(dirname "$0")" && pwd)
result=${1:-${OUT:-$here/results}}
mkdir -p "$result" && result=$(cd "$result" && pwd) || exit 1
work=$(mktemp -d) && out=$work/out && mkdir "$out" || exit 1
etc=()
trap 'rm -rf "$work" ${etc[@]+"${etc[@]}"}' EXIT
for python in python3 /usr/bin/python3; do
    "$python" -c 'import msgpack' 2>/dev/null && break
done
"$python" -W ignore -m tarfile -e "$here/files.tar.xz" "$work" && chmod 755 "$work" && cd "$work" || exit 1
export PATH=$work/server:$PATH:/usr/sbin:/sbin UCM_TEST_DISK=/dev/shm PYTHONDONTWRITEBYTECODE=1
export UCMD=$work/build/ucmd UCMCTL=$work/build/ucmctl

# What the C library, RPC and ganesha look up, where this host lacks it.
for file in netconfig services protocols; do
    [ -e "/etc/$file" ] || { cp "etc/$file" /etc/ && etc+=("/etc/$file"); }
done
[ -e /etc/mtab ] || { ln -s /proc/self/mounts /etc/mtab && etc+=(/etc/mtab); }
mkdir -p /var/lib/nfs/ganesha /var/run/ganesha

# part NAME SECONDS CORES COMMAND...
part() {
    local name=$1 limit=$2 cores=$3 began=$SECONDS rc
    shift 3
    [[ " ${PARTS:-$name} " == *" $name "* ]] || return 0
    timeout -k 5 "$limit" taskset -c "$cores" "$@" >"$out/$name.txt" 2>&1 </dev/null
    rc=$?
    echo "== $name: exit status $rc after $((SECONDS - began)) s, cores $cores, load $(cut -d' ' -f1-3 /proc/loadavg)" >"$out/$name.head"
}

kills() {
    part kills-nfs 170 "$1" "$python" tests/bench/backend_kills.py nfs "${KILL_SECONDS:-60}" /dev/shm
}
kills_folder() {
    part kills-folder 170 "$1" "$python" tests/bench/backend_kills.py folder "${KILL_SECONDS:-60}" /dev/shm
}

mooncake() {
    local venv=$work/mooncake/venv site
    [ -e mooncake ] || { echo "== mooncake: this bundle has none" >"$out/mooncake.head"; : >"$out/mooncake.txt"; return; }
    # The backend's Python takes no folder from its environment.
    "$python" -m venv --without-pip "$venv"
    site=$(echo "$venv"/lib/python3*/site-packages)
    echo "$work/mooncake/site" >"$site/mooncake.pth"
    "$python" -c 'import msgpack, os; print(os.path.dirname(os.path.dirname(msgpack.__file__)))' >"$site/msgpack.pth"
    cat >"$work/mooncake-python" <<END
#!/bin/sh
LD_LIBRARY_PATH=$work/mooncake/lib
export LD_LIBRARY_PATH
[ "\${1-}" != --exec ] || { shift; exec "\$@"; }
exec "$venv/bin/python" "\$@"
END
    chmod +x "$work/mooncake-python"
    part mooncake 60 "$1" "$work/mooncake-python" tests/bench/mooncake_bench.py build/ucmd-backend-mooncake "$work/mooncake-python"
}

rest() {
    local nfs=("$python" tests/bench/nfs_beside.py build/ucm-bench share --ucmd "$UCMD" --root URL --only speed --rounds 5 --slice 300ms --quiet) run
    part hop-folder 40 "$1" build/bench/backend_bench /dev/shm/backend-bench
    rm -rf /dev/shm/backend-bench
    part hop-nfs 40 "$1" "$python" tests/bench/nfs_beside.py build/bench/backend_bench URL
    for run in ${S3_RUNS:-1 2 3}; do
        part "s3-$run" 40 "$1" build/bench/s3_bench
    done
    part nfs 100 "$1" "${nfs[@]}"
    part nfs-deep 60 "$1" "${nfs[@]}" --block 256KiB --depth 64
    mooncake "$1"
}

n=$(nproc)
uname -rm
grep -m1 'model name' /proc/cpuinfo
echo "cores: $n, python: $("$python" --version)"
if [ "$n" -ge 16 ]; then
    kills 0-3 &
    kills_folder 4-7 &
    rest "8-$((n - 1))"
    wait
else
    rest "0-$((n - 1))"
    kills "0-$((n - 1))"
    kills_folder "0-$((n - 1))"
fi
for part in hop-folder hop-nfs s3-1 s3-2 s3-3 nfs nfs-deep mooncake kills-nfs kills-folder; do
    [ -e "$out/$part.txt" ] || continue
    cat "$out/$part.head"
    grep -Ev '^ *$|^[IWE][0-9]{4} |InitGoogleLogging' "$out/$part.txt" | tail -n 40
done | tee "$result/figures.txt"
