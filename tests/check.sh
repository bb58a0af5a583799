#!/bin/bash
# check.sh MAKE PHASE...: builds and runs the tests of these phases:
# - plain (gcc): every test
# - system (gcc): tests of whole programs
# - long (gcc): only the long suites
# - asan (clang), tsan (gcc) and fuzz (clang)
# Unit tests run in asan or in plain: one of the two suffices. tests.mk says what else asan and tsan
# have. Prints one line a program, and the output of what failed. The last line sums up. The exit
# status is 0 only when nothing failed. `make check` and its relatives call it, from the top
# directory.
set -u
shopt -s extglob
read -ra make <<<"$1"
shift

results=$PWD/build/results
# The Python that `make setup-mooncake` downloads.
mooncake=$(realpath -m "${MOONCAKE_VENV:-build/mooncake-venv}")/bin/mooncake-python
# Debian's Python, which has the packages of `make setup`. Another one may be first in PATH.
python3=/usr/bin/python3
[ -x "$python3" ] || python3=python3
passed=0 failed=0 skipped=0
failures=()
# Users and installations build there, unless make's BUILD names another directory.
plain=${BUILD:-build} fatbins=build/fatbin symbols=-g

# ---- counting ----

# report LABEL NAME SECONDS PASSED FAILED SKIPPED
report() {
    local note=
    passed=$((passed + $4)) failed=$((failed + $5)) skipped=$((skipped + $6))
    [ "$5" = 0 ] || { note="  $5 FAILED" failures+=("$1 $2"); }
    [ "$6" = 0 ] || note="$note  $6 skipped"
    printf '%-6s %-28s %4d passed  %4d s%s\n' "$1" "$2" "$4" "$3" "$note"
}

show() {
    printf -- '---- %s, the last lines of it:\n' "$1"
    tail -n 60 "$1"
    printf -- '----\n'
}

count() {
    grep -cE "$1" "$2" 2>/dev/null
}

# A test fails if a sanitizer wrote about any of its processes, also those that it started.
sanitizer_reports() {
    local found=0 file
    for file in "$1".san.*; do
        [ -e "$file" ] || continue
        # Tests of memory shortage ask for more than there is.
        grep -qvE '^(==[0-9]+==WARNING: [A-Za-z]+ failed to allocate .*)?$' "$file" || continue
        show "$file"
        found=1
    done
    return $found
}

# ---- builds ----

# runs PHASE PROGRAM: whether the phase has this program of the list.
runs() {
    case $1:${2##*/} in
    # In asan these tests are as fast as here.
    system:s3 | long:*) return 1 ;;
    system:integration | system:fault | system:roots | system:mooncake) ;;
    system:*) return 1 ;;
    esac
}

# without_kernels: if no GPU could run kernels, does not compile them. Empty files replace them, in
# builds that nobody installs.
without_kernels() {
    local files
    [ ! -e /dev/nvidiactl ] || return 0
    files=$("${make[@]}" -s FATBINS=build/no-kernels list-fatbins)
    [ -n "$files" ] || return 0
    plain=$plain/plain fatbins=build/no-kernels symbols=-g1
    mkdir -p "$fatbins"
    # shellcheck disable=SC2086
    "${make[@]}" -sq FATBINS="$fatbins" fatbins 2>/dev/null || touch $files
}

# build_of PHASE: make's arguments for its build, the build's directory, and the targets.
build_of() {
    case $1 in
    # Files that take a compiler a minute come first, so that none is alone at the end.
    plain | system | long)
        arguments=(BUILD="$plain" FATBINS="$fatbins" SYMBOLS="$symbols")
        directory=$plain targets=(fatbins all build-tests)
        ;;
    # Fuzz targets share the objects. -g1: reports name lines. -O0: optimising a sanitizer's checks
    # would take longer than the tests run.
    asan | fuzz)
        arguments=(BUILD=build/clang FATBINS="$fatbins" "CC=${CLANG:-clang}" 'SAN=address,undefined,fuzzer-no-link' 'CFLAGS=-O0 -g1' SUITES=marked)
        directory=build/clang/san-address targets=(build-daemon build-tests)
        [ "$1" = asan ] || targets=(build-fuzz)
        ;;
    # Kernels have no threads of their own, so one instruction set suffices.
    tsan)
        arguments=(BUILD=build/tsan SAN=thread FATBINS="$fatbins" KERNEL_ISA=base 'CFLAGS=-O0 -g1' SUITES=marked)
        directory=build/tsan/san-thread targets=(build-daemon build-tests)
        ;;
    esac
}

# leave_out PHASE: targets of programs that the phase does not run.
leave_out() {
    local program tests=(test-tools)
    for program in $("${make[@]}" -s "${arguments[@]}" list-tests); do
        ! runs "$1" "$program" || tests+=("$program")
    done
    mapfile -t targets < <(printf '%s\n' "${targets[@]/build-tests/}" "${tests[@]}" | grep .)
}

# start_build PHASE [WORD...]: builds in the background, by commands that begin with these words.
# Tests of all phases use some of the plain build.
start_build() {
    local phase=$1 arguments directory targets used=("$plain"/{libucmclient.so,ucmctl,ucm-bench,encoding_kernels.so})
    shift
    build_of "$phase"
    [ "$directory" != "$plain" ] || used=()
    [[ " ${targets[*]} " != *" build-tests "* ]] || leave_out "$phase"
    mkdir -p "$results/$phase"
    {
        started=$SECONDS
        { [ ${#used[@]} = 0 ] || "$@" "${make[@]}" -s BUILD="$plain" FATBINS="$fatbins" SYMBOLS="$symbols" "${used[@]}"; } &&
            "$@" "${make[@]}" -k "${arguments[@]}" "${targets[@]}"
        echo "$? $((SECONDS - started))" >"$results/$phase/build.status"
    } >"$results/$phase/build.log" 2>&1 </dev/null &
    building=$!
}

# finish_build PHASE: a build that fails is one failure, and its phase is over.
finish_build() {
    local log=$results/$1/build.log status=1 seconds=0
    wait "$building"
    read -r status seconds <"$results/$1/build.status"
    if [ "$status" != 0 ]; then
        report "$1" build "$seconds" 0 1 0
        printf -- '---- %s, its errors:\n' "$log"
        grep -E 'error|warning|Error|undefined|multiple' "$log" | grep -v '^  CC\|^  LINK' | cut -c 1-240 | head -n 40
        printf -- '----\n'
        return 1
    fi
    printf '%-6s %-28s %4s         %4d s\n' "$1" build "done" "$seconds"
}

# ---- one program ----

# criterion LABEL PROGRAM
criterion() {
    local label=$1 name=${2##*/} start=$SECONDS jobs rc ok bad skip
    local log=$results/$label/$name
    # These tests wait more than they work.
    jobs=$((2 * $(nproc)))
    # With the real master, one test runs at a time, because some stop it. Without it, the client is
    # played, as for test_shared_mooncake_hosts.py.
    if [ "$name" = mooncake ] && [ -x "$mooncake" ]; then
        jobs=1
        export UCM_MOONCAKE_PYTHON=$mooncake
    fi
    timeout -k 10 "${TEST_SECONDS:-900}" "$2" "--tap=$log.tap" -j"$jobs" >"$log.log" 2>&1 </dev/null
    rc=$?
    unset UCM_MOONCAKE_PYTHON
    skip=$(count '^ok .*# SKIP' "$log.tap")
    ok=$(($(count '^ok ' "$log.tap") - skip))
    bad=$(count '^not ok ' "$log.tap")
    finish "$label" "$name" "$start" "$rc" "${ok:-0}" "${bad:-0}" "${skip:-0}"
}

# python LABEL 'FILE [TEST...]': reads the counts from unittest's last lines.
python() {
    local label=$1 name words start=$SECONDS rc ran bad=0 skip n log
    read -ra words <<<"$2"
    name=${words[0]##*/} log=$results/$label/${words[0]##*/}
    # The first of them compiles these, and the others find them.
    timeout -k 10 "${TEST_SECONDS:-300}" "$python3" "${words[@]}" >"$log.log" 2>&1 </dev/null
    rc=$?
    ran=$(sed -nE 's/^Ran ([0-9]+) tests?.*/\1/p' "$log.log" | tail -n 1)
    skip=$(sed -nE 's/^(OK|FAILED) \(.*skipped=([0-9]+).*/\2/p' "$log.log" | tail -n 1)
    for n in $(tail -n 1 "$log.log" | grep -oE '(failures|errors)=[0-9]+' | cut -d= -f2); do
        bad=$((bad + n))
    done
    finish "$label" "$name" "$start" "$rc" $((${ran:-0} - bad - ${skip:-0})) "$bad" "${skip:-0}"
}

# finish LABEL NAME START STATUS PASSED FAILED SKIPPED: a program that ended badly, or ran no test,
# has failed, whatever it counted.
finish() {
    local label=$1 name=$2 log=$results/$1/$2 rc=$4 ok=$5 bad=$6 skip=$7
    [ "$rc" = 0 ] && [ $((ok + skip)) = 0 ] && [ "$bad" = 0 ] && rc=no-test
    sanitizer_reports "$log" || rc=sanitizer
    [ "$rc" != 0 ] && [ "$bad" = 0 ] && bad=1
    report "$label" "$name" $((SECONDS - $3)) "$ok" "$bad" "$skip"
    [ "$bad" = 0 ] || { echo "       exit status $rc"; show "$log.log"; }
}

# ---- next to each other ----

# worker NAME COMMAND...: runs COMMAND with each line that it reads from descriptor 8, where other
# workers read, too. NAME.counts has what it reported.
# shellcheck disable=SC2030,SC2031
worker() {
    local at=$results/$1 task
    shift
    passed=0 failed=0 skipped=0 failures=()
    exec 9>"${at%/*}/lock"
    while flock 9 && read -r task <&8; do
        flock -u 9
        "$@" "$task" >"$at.out" 2>&1 8<&- 9>&-
        flock 9
        cat "$at.out"
    done
    printf '%s\n' "$passed" "$failed" "$skipped" ${failures[@]+"${failures[@]}"} >"$at.counts"
}

# together NAME WORKERS COMMAND TASK...: COMMAND is one word or more, in quotes.
# shellcheck disable=SC2031
together() {
    local name=$1 workers=$2 command i counts running=()
    read -ra command <<<"$3"
    shift 3
    mkdir -p "$results/$name"
    exec 8< <(printf '%s\n' "$@")
    for ((i = 0; i < workers; i++)); do
        worker "$name/$i" "${command[@]}" &
        running+=($!)
    done
    wait "${running[@]}"
    exec 8<&-
    for ((i = 0; i < workers; i++)); do
        counts=(0 1 0 "$name: one of its workers died")
        [ ! -s "$results/$name/$i.counts" ] || mapfile -t counts <"$results/$name/$i.counts"
        passed=$((passed + counts[0])) failed=$((failed + counts[1])) skipped=$((skipped + counts[2]))
        failures+=("${counts[@]:3}")
    done
}

# ---- phases ----

# environment PHASE DIRECTORY NAME: variables that tell a test about its build.
environment() {
    local label=${1/@(system|long)/plain} o=$PWD/$2 log=$results/$1/$3.san
    export UCMD=$o/ucmd UCMCTL=$o/ucmctl UCMEVENTS=$o/ucmevents UCM_BENCH=$o/ucm-bench UCM_PHASE=$label
    export UCMCLIENT_LIB=$PWD/$plain/libucmclient.so PYTHONPATH=$PWD/client/python
    export UCM_SPARSE_KERNELS=$PWD/$plain/sparse_kernels.so UCM_ENCODING_KERNELS=$PWD/$plain/encoding_kernels.so
    export UCM_DECODE_KERNELS=$PWD/$plain/decode_kernels.so
    # For tests that call make.
    export BUILD=$plain FATBINS=$fatbins
    # Programs that only make work for a daemon have no sanitizer.
    [ "$label" = plain ] || UCM_BENCH=$PWD/$plain/ucm-bench
    [ "$label" != tsan ] || UCMCTL=$PWD/$plain/ucmctl
    # Its threads spin for work, on cores that other tests need.
    export OPENBLAS_NUM_THREADS=1
    export ASAN_OPTIONS="strict_string_checks=1:detect_leaks=1:log_path=$log"
    export UBSAN_OPTIONS="print_stacktrace=1:log_path=$log"
    export TSAN_OPTIONS="second_deadlock_stack=1:log_path=$log"
    [ ! -e tests/runner/tsan.supp ] || TSAN_OPTIONS+=":suppressions=$PWD/tests/runner/tsan.supp"
}

# pythons PHASE: the longest first. Under a sanitizer, tests of hostile clients run; under
# ThreadSanitizer, those in which the daemon has most threads.
pythons() {
    local topic name file hostile=(integration/test_{protocol,protocol_blocks,encoding_hostile,limits,held_up,turns,proof,shared_hangs,shared_attempts}.py
        integration/test_{mapping,events_zmq}.py fault/test_retrieval_random.py fuzz/live/test_live.py)
    local threads=(fault/test_{hosts,retrieval_random}.py integration/test_{mapping,gather_nvme,encoding_life,shared_hangs}.py)
    case $1 in
    asan) printf 'tests/%s\n' "${hostile[@]}" && return ;;
    tsan) printf 'tests/%s\n' "${threads[@]}" && return ;;
    long)
        while read -r topic name _; do
            [[ " ${LONG:-} " != *" $topic "* ]] || echo "tests/integration/$name"
        done < <(grep -v '^#' tests/long_suites)
        return
        ;;
    esac
    for file in tests/integration/test_{shared_s3_hosts,shared_roots,plugins_trouble,health,bench_serve,encryption_shared,vllm_trouble,install,turns}.py \
        tests/integration/test_{forms,encryption,encryption_keys,tenants,shared_hangs,mapping,vllm_connector,purge,trtllm,observe,service,vllm_layer_stores,events,limits,vllm_stages,ucmctl_host}.py \
        tests/fault/test_hosts.py tests/integration/test_{vllm_hybrid,fairness,few_files,vllm_encoding}.py \
        tests/integration/*.py tests/fault/*.py; do
        ! grep -qs 'unittest\.main' "$file" || echo "$file"
    done | awk '!seen[$0]++' | shorten
}

# shorten: adds to long suites' lines the tests that they have this time, or drops the line
# (tests/long_suites).
shorten() {
    awk -v long=" ${LONG-encoding sparse blend connector gate} " '
        NR == FNR { if (!/^#/ && !index(long, " " $1 " ")) { file = "tests/integration/" $2; $1 = $2 = ""; tests[file] = $0 } next }
        tests[$0] ~ /-$/ { next }
        { print $0 tests[$0] }' tests/long_suites -
}

# one LABEL DIRECTORY TEST
one() {
    local file=${3%% *}
    environment "$1" "$2" "${file##*/}"
    case $file in
    *.py) python "$1" "$3" ;;
    *) criterion "$1" "$3" ;;
    esac
}

# mix WAITING...: prints the lines of standard input, with WAITING, which mostly wait, among the
# first.
mix() {
    local line n=0
    while read -r line; do
        echo "$line"
        [ $((++n % 2)) = 0 ] && [ $# -gt 0 ] && echo "$1" && shift
    done
    [ $# = 0 ] || printf '%s\n' "$@"
}

# suite PHASE: programs that wait for disks, deadlines and servers begin first. Python tests run
# alongside those that compute.
suite() {
    local phase=$1 arguments directory targets program work=() waits=() tests workers=$((2 * $(nproc)))
    build_of "$phase"
    for program in $("${make[@]}" -s "${arguments[@]}" list-tests); do
        runs "$phase" "$program" || continue
        case ${program##*/} in
        fault | s3 | roots | mooncake | integration) waits+=("$program") ;;
        *) work+=("$program") ;;
        esac
    done
    mapfile -t -O "${#waits[@]}" waits < <(pythons "$phase")
    mapfile -t tests < <(printf '%s\n' ${work[@]+"${work[@]}"} | grep . | mix "${waits[@]}")
    # Without a sanitizer these tests wait more than they work.
    [[ $phase != @(plain|system|long) ]] || workers=$((4 * $(nproc)))
    together "$phase/workers" "$workers" "one $phase $directory" "${tests[@]}"
}

# fuzz PROGRAM
fuzz() {
    local seconds=${FUZZ_SECONDS:-3} name=${1##*/} start=$SECONDS corpus seeds log rc
    corpus=build/fuzz/corpus/$name log=$results/fuzz/$name
    seeds=tests/fuzz/corpus/${name#fuzz_}
    [ -d "$seeds" ] || seeds=
    mkdir -p "$corpus"
    environment fuzz build/clang/san-address "$name"
    unset ASAN_OPTIONS UBSAN_OPTIONS
    timeout -k 10 $((seconds + 60)) "$1" -max_total_time="$seconds" -timeout=10 \
        -rss_limit_mb=2048 -artifact_prefix="$results/fuzz/" "$corpus" \
        ${seeds:+"$seeds"} >"$log.log" 2>&1 </dev/null
    rc=$?
    finish fuzz "$name" "$start" $rc $((rc == 0)) 0 0
}

fuzzers() {
    local arguments directory targets names
    build_of fuzz
    read -ra names < <("${make[@]}" -s "${arguments[@]}" list-fuzz)
    together fuzz/workers 2 fuzz "${names[@]}"
}

rm -rf "$results"
mkdir -p "$results"
start=$SECONDS
without_kernels
fetching=
if [[ " $* " =~ \ (plain|system)\  ]]; then
    "${make[@]}" -s setup-mooncake >"$results/mooncake.log" 2>&1 </dev/null &
    fetching=$!
fi
start_build "$1"
while [ $# -gt 0 ]; do
    phase=$1 built=yes
    shift
    finish_build "$phase" || built=no
    # The next phase is built alongside this one's tests, with the cores that these leave free.
    [ $# = 0 ] || start_build "$1" nice -n 4
    # Tests of this phase use what setup downloads.
    [[ $phase != @(plain|system) ]] || wait "$fetching"
    case $built:$phase in
    yes:fuzz) fuzzers ;;
    yes:*) suite "$phase" ;;
    esac
done
printf '\n%d s in all; logs are in build/results\n' $((SECONDS - start))
long=${LONG-all}
[ -z "$fetching" ] || echo "suites of tests/long_suites in full: ${long:-none}"
for failure in ${failures[@]+"${failures[@]}"}; do
    echo "failed: $failure"
done
[ -x "$mooncake" ] || [ -z "$fetching" ] ||
    echo "not run: Mooncake's real master, which \`make setup\` downloads from PyPI; its client was played"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
