#!/bin/bash
# check.sh MAKE PHASE...: builds and runs every test of the phases plain (gcc), asan (clang), tsan (gcc)
# and fuzz (clang).
# One line a program; what failed is shown with its output. The last line sums up, and the exit status
# is 0 only when nothing failed. `make check` and its relatives call it, from the top folder.
set -u
read -ra make <<<"$1"
shift

results=$PWD/build/results
# Debian's, which has the packages of `make setup`; another Python may be first in PATH.
python3=/usr/bin/python3
[ -x "$python3" ] || python3=python3
passed=0 failed=0 skipped=0
failures=()

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

# build LABEL MAKE-ARGUMENT...: a build that fails is one failure, and its phase is over.
build() {
    local label=$1 start=$SECONDS log=$results/$1/build.log
    shift
    mkdir -p "$(dirname "$log")"
    if ! "${make[@]}" -k "$@" >"$log" 2>&1; then
        report "$label" build $((SECONDS - start)) 0 1 0
        printf -- '---- %s, its errors:\n' "$log"
        grep -E 'error|warning|Error|undefined|multiple' "$log" | head -n 40
        printf -- '----\n'
        return 1
    fi
    printf '%-6s %-28s %4s         %4d s\n' "$label" build "done" $((SECONDS - start))
}

# What a sanitizer wrote about any process of the test, also those that the test started, fails it.
sanitizer_reports() {
    local found=0 file
    for file in "$1".san.*; do
        [ -e "$file" ] || continue
        # Tests of lack of memory ask for more than there is.
        grep -qvE '^(==[0-9]+==WARNING: [A-Za-z]+ failed to allocate .*)?$' "$file" || continue
        show "$file"
        found=1
    done
    return $found
}

# ---- one program ----

# criterion LABEL PROGRAM
criterion() {
    local label=$1 name=${2##*/} start=$SECONDS rc ok bad skip
    local log=$results/$label/$name
    timeout -k 10 "${TEST_SECONDS:-300}" "$2" "--tap=$log.tap" -j"$(nproc)" >"$log.log" 2>&1 </dev/null
    rc=$?
    skip=$(count '^ok .*# SKIP' "$log.tap")
    ok=$(($(count '^ok ' "$log.tap") - skip))
    bad=$(count '^not ok ' "$log.tap")
    finish "$label" "$name" "$start" "$rc" "${ok:-0}" "${bad:-0}" "${skip:-0}"
}

# python LABEL FILE: unittest's closing lines tell.
python() {
    local label=$1 name=${2##*/} start=$SECONDS rc ran bad=0 skip n
    local log=$results/$label/$name
    timeout -k 10 "${TEST_SECONDS:-300}" "$python3" -B "$2" >"$log.log" 2>&1 </dev/null
    rc=$?
    ran=$(sed -nE 's/^Ran ([0-9]+) tests?.*/\1/p' "$log.log" | tail -n 1)
    skip=$(sed -nE 's/^(OK|FAILED) \(.*skipped=([0-9]+).*/\2/p' "$log.log" | tail -n 1)
    for n in $(tail -n 1 "$log.log" | grep -oE '(failures|errors)=[0-9]+' | cut -d= -f2); do
        bad=$((bad + n))
    done
    finish "$label" "$name" "$start" "$rc" $((${ran:-0} - bad - ${skip:-0})) "$bad" "${skip:-0}"
}

# finish LABEL NAME START STATUS PASSED FAILED SKIPPED: a program that ended badly, or ran nothing,
# failed, whatever it counted.
finish() {
    local label=$1 name=$2 log=$results/$1/$2 rc=$4 ok=$5 bad=$6 skip=$7
    [ "$rc" = 0 ] && [ $((ok + skip)) = 0 ] && [ "$bad" = 0 ] && rc=no-test
    sanitizer_reports "$log" || rc=sanitizer
    [ "$rc" != 0 ] && [ "$bad" = 0 ] && bad=1
    report "$label" "$name" $((SECONDS - $3)) "$ok" "$bad" "$skip"
    [ "$bad" = 0 ] || { echo "       exit status $rc"; show "$log.log"; }
}

# ---- beside each other ----

# worker NAME COMMAND...: runs COMMAND with each line that it gets of descriptor 8, where other workers
# read, too. What it reported is in NAME.counts.
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
    local name=$1 workers=$2 command i counts
    read -ra command <<<"$3"
    shift 3
    mkdir -p "$results/$name"
    exec 8< <(printf '%s\n' "$@")
    for ((i = 0; i < workers; i++)); do
        worker "$name/$i" "${command[@]}" &
    done
    wait
    exec 8<&-
    for ((i = 0; i < workers; i++)); do
        counts=(0 1 0 "$name: one of its workers died")
        [ ! -s "$results/$name/$i.counts" ] || mapfile -t counts <"$results/$name/$i.counts"
        passed=$((passed + counts[0])) failed=$((failed + counts[1])) skipped=$((skipped + counts[2]))
        failures+=("${counts[@]:3}")
    done
}

# ---- phases ----

# environment LABEL FOLDER NAME: what a test knows of the build that it belongs to.
environment() {
    local label=$1 o=$PWD/$2 log=$results/$1/$3.san
    export UCMD=$o/ucmd UCMCTL=$o/ucmctl UCM_BENCH=$o/ucm-bench UCM_PHASE=$label
    export UCMCLIENT_LIB=$PWD/build/libucmclient.so PYTHONPATH=$PWD/client/python
    export ASAN_OPTIONS="strict_string_checks=1:detect_leaks=1:log_path=$log"
    export UBSAN_OPTIONS="print_stacktrace=1:log_path=$log"
    export TSAN_OPTIONS="second_deadlock_stack=1:log_path=$log"
    [ ! -e tests/runner/tsan.supp ] || TSAN_OPTIONS+=":suppressions=$PWD/tests/runner/tsan.supp"
}

# pythons LABEL: those of this build, the longest first.
pythons() {
    local label=$1 file
    for file in tests/integration/test_vllm_{trouble,connector}.py tests/integration/*.py tests/fault/*.py; do
        grep -qs 'unittest\.main' "$file" || continue
        case ${file##*/}:$label in
        # What is installed and what is measured is the plain build; and a client's behaviour, and what needs no daemon: once.
        test_install.py:* | test_bench_gate.py:* | test_vllm_connector.py:* | test_vllm_trouble.py:* | test_vllm_companion.py:* | \
            test_proxy.py:* | test_sparse_methods.py:* | test_*_numpy.py:*)
            [ "$label" = plain ] || continue ;;
        # These load into the same blocks twice at once, which races in the worker's memory by design.
        test_protocol*:tsan) continue ;;
        esac
        echo "$file"
    done | awk '!seen[$0]++'
}

# one LABEL FOLDER TEST
one() {
    environment "$1" "$2" "${3##*/}"
    case $3 in
    *.py) python "$1" "$3" ;;
    *) criterion "$1" "$3" ;;
    esac
}

# mix WAITING...: the lines of standard input, and behind each third of them one of those that wait.
mix() {
    local line n=0
    while read -r line; do
        echo "$line"
        [ $((++n % 3)) = 0 ] && [ $# -gt 0 ] && echo "$1" && shift
    done
    [ $# = 0 ] || printf '%s\n' "$@"
}

# suite LABEL FOLDER MAKE-ARGUMENT...
suite() {
    local label=$1 o=$2 program work=() waits=() tests
    shift 2
    # Python loads the plain client library.
    "${make[@]}" -s build/libucmclient.so || failures+=("$label libucmclient.so") failed=$((failed + 1))
    build "$label" "$@" all build-tests || return
    mapfile -t waits < <(pythons "$label")
    # The short ones, of units, come first in the list and last here.
    for program in $("${make[@]}" -s "$@" list-tests | tr ' ' '\n' | tac); do
        case ${program##*/} in
        # Its library goes beneath the plain daemon only; sanitizers keep what was freed for a while.
        test_power | test_memory) [ "$label" != plain ] || work+=("$program") ;;
        # Long, and of one thread.
        test_cache_random | test_index | test_index_full | test_plan) [ "$label" = tsan ] || work+=("$program") ;;
        # Of disks, deadlines and starts.
        test_entries | test_place | test_keep | test_damage | test_salvage | test_restart | test_disk | \
            test_durability | test_share_gc)
            waits+=("$program") ;;
        *) work+=("$program") ;;
        esac
    done
    mapfile -t tests < <(printf '%s\n' "${work[@]}" | mix "${waits[@]}")
    together "$label/workers" 3 "one $label $o" "${tests[@]}"
}

phase_plain() {
    suite plain build build-bench build-demo
}

# clang, with its warnings, compiles everything here.
phase_asan() {
    suite asan build/clang/san-address BUILD=build/clang FATBINS=build/fatbin CC="${CLANG:-clang}" SAN=address,undefined \
        build-bench build-demo
}

phase_tsan() {
    suite tsan build/san-thread SAN=thread
}

# fuzz PROGRAM
fuzz() {
    local seconds=${FUZZ_SECONDS:-10} name=${1##*/} start=$SECONDS corpus seeds log rc
    corpus=build/fuzz/corpus/$name log=$results/fuzz/$name
    seeds=tests/fuzz/corpus/${name#fuzz_}
    [ -d "$seeds" ] || seeds=
    mkdir -p "$corpus"
    environment fuzz build/fuzz "$name"
    unset ASAN_OPTIONS UBSAN_OPTIONS
    timeout -k 10 $((seconds + 60)) "$1" -max_total_time="$seconds" -timeout=10 \
        -rss_limit_mb=2048 -artifact_prefix="$results/fuzz/" "$corpus" \
        ${seeds:+"$seeds"} >"$log.log" 2>&1 </dev/null
    rc=$?
    finish fuzz "$name" "$start" $rc $((rc == 0)) 0 0
}

phase_fuzz() {
    local names
    # shellcheck disable=SC2054
    local arguments=(BUILD=build/fuzz FATBINS=build/fatbin CC="${CLANG:-clang}" SAN=address,undefined
        CFLAGS='-O1 -g -fsanitize=fuzzer-no-link')
    build fuzz "${arguments[@]}" build-fuzz || return
    read -ra names < <("${make[@]}" -s "${arguments[@]}" list-fuzz)
    together fuzz/workers 2 fuzz "${names[@]}"
}

rm -rf "$results"
mkdir -p "$results"
start=$SECONDS
for phase in "$@"; do
    mkdir -p "$results/$phase"
    "phase_$phase"
done
printf '\n%d s in all; logs are in build/results\n' $((SECONDS - start))
for failure in ${failures[@]+"${failures[@]}"}; do
    echo "failed: $failure"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
