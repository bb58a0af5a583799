#!/bin/sh
# run.sh [OPTION...]: measures the NVMe tier with the programs and libraries next to it, on the disk
# of $BENCH_DIR (this directory's). OPTIONs are those of `ucm-bench tier`.
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
uname -rm
grep -m1 'model name' /proc/cpuinfo
echo "cores: $(nproc)"
exec "$here/ucm-bench" tier --ucmd "$here/ucmd" --dir "${BENCH_DIR:-$here}" "$@"
