#!/bin/sh
# Runs the GPU tests of this folder with the libraries beside them; what copies, once for each
# strategy. Exit status: 0 when all passed.
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
status=0
for test in "$here"/test_*; do
    case $test in
    */test_copy | */test_speed) strategies='sm dma auto' ;;
    */test_faults) strategies='sm auto' ;;
    *) strategies=auto ;;
    esac
    for strategy in $strategies; do
        echo "== $(basename "$test") $strategy"
        UCM_TEST_STRATEGY=$strategy timeout "${TEST_SECONDS:-100}" "$test" || status=1
    done
done
exit $status
