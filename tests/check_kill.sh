#!/bin/bash
# check_kill.sh DIRECTORY: with the programs of DIRECTORY, runs 2,000 rounds of kills. Alongside
# them it runs 2,000 of power failures, then 400 of kills while parts are moved. ROUNDS=N: N, N and
# N/5. Rounds come in slices of SLICE (100), from SEED on (the time). Prints one line a slice: its
# seed, which runs it again, its seconds, and what the test counted. `make check-kill` calls it. The
# exit status is 0 only when nothing was lost.
set -u
directory=$1
rounds=${ROUNDS:-2000} slice=${SLICE:-100}
results=$directory/results/kill
export UCMD=$directory/ucmd
rm -rf "$results"
mkdir -p "$results"

# slices NAME: the suite of tests/fault/test_NAME.c, which takes UCM_NAME_SEED and UCM_NAME_ROUNDS.
slices() {
    local name=$1 upper=${1^^} done=0 failed=0 start log n seed
    seed=${SEED:-$(($(date +%s) * 1000))}
    while [ "$done" -lt "$rounds" ]; do
        n=$((rounds - done < slice ? rounds - done : slice)) start=$SECONDS log=$results/$name-$seed
        if env "UCM_${upper}_SEED=$seed" "UCM_${upper}_ROUNDS=$n" "UCM_KILL_REPORT=$log.txt" \
            timeout -k 10 "${SLICE_SECONDS:-1200}" "$directory/check/fault" \
            --filter "$name/*survives" >"$log.log" 2>&1 </dev/null; then
            printf '%-5s seed %s, %d s: %s\n' "$name" "$seed" $((SECONDS - start)) "$(cat "$log.txt")"
        else
            failed=$((failed + 1))
            printf '%-5s FAILED, %d s; again with UCM_%s_SEED=SEED UCM_%s_ROUNDS=20, SEED the last one here:\n' \
                "$name" $((SECONDS - start)) "$upper" "$upper"
            tail -n 20 "$log.log"
        fi
        done=$((done + n)) seed=$((seed + slice))
    done
    printf '%s: %d rounds, %d slices failed, %d s\n' "$name" "$done" "$failed" $SECONDS
    [ "$failed" = 0 ]
}

slices kill &
kill_pid=$!
slices power && rounds=$((rounds / 5)) slices move_kill
power_rc=$?
wait "$kill_pid" && [ "$power_rc" = 0 ]
