#!/bin/bash
# changed.sh: prints the topics of tests/long_suites that concern files changed since the commit
# BASE. By default BASE is trunk, or on trunk the commit before. Uncommitted files count. Without
# git, all topics.
set -u
cd "$(dirname "$0")/.." || exit 1

topics='encoding|encod|forms|lossless|fp8|int8|q4|kernels/(arith|simd)
sparse|kernels/(sparse|attend|entries|arith|simd)|sparse|summar(y|ies)|retriev|select|decode|attend|entries|slots|sequence
blend|kernels/rope|blend|chunk|shift
connector|ucmclient/(engine/|[a-z_]+\.py)|tests/integration/(vllm_|test_vllm_)|tests/engines/|client/lib/
gate|tests/gate/|test_bench_gate|tests/inject/delay|client/bench/figure'

base() {
    local trunk
    trunk=$(git merge-base HEAD origin/HEAD 2>/dev/null || git merge-base HEAD origin/main 2>/dev/null)
    [ "$trunk" != "$(git rev-parse HEAD)" ] || trunk=
    echo "${trunk:-HEAD~1}"
}

files=$(git diff --name-only "${BASE:-$(base)}" 2>/dev/null && git ls-files -o --exclude-standard) || files=all
while IFS='|' read -r topic paths; do
    [ "$files" != all ] && ! grep -v '^docs/' <<<"$files" | grep -qE "$paths" || echo "$topic"
done <<<"$topics" | paste -sd' '
