#!/bin/sh
# Runs the GPU tests of this folder with the libraries beside them, what copies once for each strategy,
# and then measures (UCM_TEST_BENCH=no: does not). Exit status: 0 when all tests passed.
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
status=0
for test in "$here"/test_*; do
    case $test in
    */test_copy | */test_faults) strategies='sm dma staged auto auto+ring' ;;
    */test_serve) strategies='auto staged auto+ring' ;;
    *) strategies=auto ;;
    esac
    for strategy in $strategies; do
        echo "== $(basename "$test") $strategy"
        UCM_TEST_STRATEGY=$strategy timeout "${TEST_SECONDS:-100}" "$test" || status=1
    done
done
if [ "${UCM_TEST_BENCH:-yes}" != no ]; then
    echo '== ucm-bench copy'
    "$here/ucm-bench" copy --ucmd "$here/ucmd" --nvme-dir "${BENCH_DIR:-/var/tmp}" || status=1
fi
exit $status
