#!/bin/bash
# run.sh BUILD: starts a private daemon on a temporary directory and measures against it, each figure
# against its baseline. `make bench` calls it.
# BENCH_DIR names the directory's parent: put it on the disk that is to be measured.
set -eu

build=$1
directory=$(mktemp -d "${BENCH_DIR:-/var/tmp}/ucm-bench.XXXXXX")
daemon=

cleanup() {
    if [ -n "$daemon" ]; then
        kill "$daemon" 2>/dev/null || true
        wait "$daemon" 2>/dev/null || true
    fi
    rm -rf "$directory"
}
trap cleanup EXIT
trap 'exit 1' INT TERM

mkdir "$directory/nvme"
export UCM_SOCKET=$directory/ucmd.sock
"$build/ucmd" --set "socket=$UCM_SOCKET" --set "nvme.paths=$directory/nvme" --set nvme.size=2GiB \
    --set arena.size=1GiB 2>"$directory/log" &
daemon=$!
for _ in $(seq 100); do
    "$build/ucmctl" health >/dev/null 2>&1 && break
    kill -0 "$daemon" 2>/dev/null || { cat "$directory/log" >&2; exit 1; }
    sleep 0.1
done

"$build/ucm-bench" lookup
for fragment in 4KiB 64KiB 1MiB; do
    "$build/ucm-bench" load --fragment "$fragment"
    "$build/ucm-bench" dump --fragment "$fragment"
done
"$build/ucm-bench" tier --ucmd "$build/ucmd" --dir "$directory"
