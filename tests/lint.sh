#!/bin/bash
# lint.sh MAKE CLANG: checks formatting, lines of 100 columns, and what the core may include, and
# builds with clang. Runs cppcheck and shellcheck where they are installed. Exits non-zero at the
# first check that fails.
set -eu
read -ra make <<<"$1"

mapfile -t c_files < <(git ls-files -co --exclude-standard '*.c' '*.h')
if command -v clang-format >/dev/null; then
    clang-format --dry-run -Werror "${c_files[@]}"
    echo "clang-format: ${#c_files[@]} files"
else
    echo "clang-format is not installed: formatting not looked at"
fi

# clang-format leaves comments as they are.
if git grep -nE '^.{101,}' -- 'daemon/*.[ch]' 'proto/*.[ch]' 'client/lib/*.[ch]'; then
    echo "these lines have over 100 columns"
    exit 1
fi

python3 -B tests/shape/includes.py

"${make[@]}" BUILD=build/clang CC="$2" CFLAGS='-O0 -g0' all build-tests build-demo >/dev/null
echo "clang: everything compiles"

if command -v cppcheck >/dev/null; then
    cppcheck --quiet --error-exitcode=1 --std=c11 --enable=warning,performance,portability \
        --inline-suppr --suppress=missingInclude --suppress=missingIncludeSystem \
        --suppress=unknownMacro --suppress=uninitvar -j "$(nproc)" -D_GNU_SOURCE -D__x86_64__ -DUCM_VERSION='"0"' -DUCM_ISA=base -I. -Iclient/include \
        proto client kernels daemon
    echo "cppcheck: nothing"
else
    echo "cppcheck is not installed: skipped"
fi

if command -v shellcheck >/dev/null; then
    git ls-files -co --exclude-standard '*.sh' .ci/run | xargs shellcheck
    echo "shellcheck: nothing"
else
    echo "shellcheck is not installed: skipped"
fi
