#!/bin/sh
# all.sh [DIRECTORY]: everything that decides about copies, in ten minutes at most, on a host with a
# GPU. It runs the tests of this directory by each strategy. Copies through entries, summaries and
# selections run under compute-sanitizer's memcheck. Then come ucm-bench copy, and its figures
# against the aims. Logs and figures go to DIRECTORY (.). COMPUTE_SANITIZER names the program; or
# its wheel (nvidia-cuda-sanitizer-api) lies in sanitizer/ here. SANITIZER_TOOLS="racecheck
# initcheck" runs more of it after the table: each with three strategies, 100 s at most each time.
# racecheck reports ucm_attend_mla_* (zeros of part-filled tiles) and ucm_select_stream_* (tiles'
# numbers). It sees no order in a __syncwarp before one lane arrives at an mbarrier, as that is no
# instruction on Hopper. Exit status: 0 when every test passed and every part came to its end.
here=$(cd "$(dirname "$0")" && pwd)
begin=$(date +%s)
status=0
mkdir -p "${1:-.}" && cd "${1:-.}" || exit 1

# part NAME SECONDS COMMAND...: its errors and, except for figures, its output go to NAME.log.
part() {
    name=$1 limit=$2
    shift 2
    case $name in
    copy-*) timeout -k 5 "$limit" "$@" >"$name.json" 2>"$name.log" ;;
    *) timeout -k 5 "$limit" "$@" >"$name.log" 2>&1 ;;
    esac
    rc=$?
    [ $rc = 0 ] || status=1
    echo "== $name: exit status $rc, $(($(date +%s) - begin)) s after the start"
}

# find_sanitizer: sets sanitizer, and libraries to where the wheel has them.
find_sanitizer() {
    sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)}
    wheel=$(find "$here/sanitizer" -name '*.whl' 2>/dev/null | head -n 1)
    libraries=
    if [ -z "$sanitizer" ] && [ -n "$wheel" ] && python3 -m zipfile -e "$wheel" "$unpacked"; then
        sanitizer=$(find "$unpacked" -name compute-sanitizer -type f | head -n 1)
        chmod -R u+x "$unpacked"
        libraries=$(dirname "$sanitizer")/../lib
    fi
    [ -n "$sanitizer" ] || echo '== sanitizers: skipped, there is no compute-sanitizer'
}

# sanitize_kernels TOOL: summaries and selections, encodings, loads with position shifts, entries of a block pool, attention, decode steps; some of each kind.
sanitize_kernels() {
    [ -n "$sanitizer" ] || return
    for kernels in sparse encoding rope entries attend decode; do
        part "$1-$kernels" 100 env LD_LIBRARY_PATH="$here/lib" "$sanitizer" --tool "$1" --error-exitcode 9 \
            ${libraries:+--injection-path "$libraries"} "$here/test_$kernels" --few
        grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|Invalid|Uninitialized|hazard|^FAIL|passed' "$name.log" | sort | uniq -c
    done
}

# sanitize TOOL STRATEGY
sanitize() {
    [ -n "$sanitizer" ] || return
    part "$1-$2" 100 env LD_LIBRARY_PATH="$here/lib" UCM_TEST_STRATEGY="$2" UCM_TEST_NO_VMM=1 "$sanitizer" \
        --tool "$1" --report-api-errors no --error-exitcode 9 \
        ${libraries:+--injection-path "$libraries"} "$here/test_copy"
    grep -E 'ERROR SUMMARY|Invalid|Uninitialized|hazard|^FAIL|passed' "$name.log" | sort | uniq -c
}

# bench NAME OPTION...
bench() {
    name=$1
    shift
    part "$name" 130 env LD_LIBRARY_PATH="$here/lib" "$here/ucm-bench" copy --ucmd "$here/ucmd" --time 200ms \
        --fragments 4KiB,16KiB,32KiB,64KiB,512KiB,2MiB --json "$@"
    tail -n 3 "$name.log"
}

part tests 330 env UCM_TEST_BENCH=no TEST_SECONDS=60 "$here/run.sh"
grep -E '^(==|FAIL|[0-9]+ passed)' tests.log
unpacked=$(mktemp -d)
find_sanitizer
sanitize memcheck staged
sanitize_kernels memcheck
bench copy-1 --strategies dma,sm,staged
bench copy-2 --strategies auto,auto+ring --nvme-dir "${BENCH_DIR:-/var/tmp}"
bench copy-3 --encoding fp8,int8,q4,lossless
python3 "$here/table.py" copy-1.json copy-2.json copy-3.json || status=1
for tool in ${SANITIZER_TOOLS:-}; do
    for strategy in staged dma sm; do
        sanitize "$tool" "$strategy"
    done
    sanitize_kernels "$tool"
done
rm -r "$unpacked"
exit $status
