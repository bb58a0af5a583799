#!/bin/sh
# Runs the GPU tests of this folder with the libraries beside them. Exit status: 0 when all passed.
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
status=0
for test in "$here"/test_*; do
    echo "== $(basename "$test")"
    timeout "${TEST_SECONDS:-100}" "$test" || status=1
done
exit $status
