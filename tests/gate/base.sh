#!/bin/sh
# Builds the daemon and the client library of the commit that `make bench-gate` compares with. It
# does so once, as make would here, in a directory of its own. Prints the directory that holds them.
#   base.sh MAKE DIRECTORY [COMMIT] Without COMMIT: the commit that the file base names. If the
# checkout lacks that (a shallow clone, an export of one commit): the last commit's parent.
set -eu
make=$1 directory=$2 name=${3:-}
here=$(dirname "$0")

say() {
    echo "bench-gate: $*" >&2
}

if [ -z "$name" ]; then
    name=$(sed -n '/^[0-9a-f]/{p;q}' "$here/base")
    if ! git cat-file -e "$name^{commit}" 2>/dev/null; then
        say "this checkout has no commit $name, which tests/gate/base names; comparing with the last commit's parent"
        name=HEAD~1
    fi
fi
commit=$(git rev-parse --verify --quiet "$name^{commit}") ||
    { say "there is no commit $name; name one with BASE=COMMIT"; exit 1; }
base=$directory/$commit
say "the baseline is $(git log -1 --format='%h of %cs, %s' "$commit")"
if [ ! -e "$base/ucmd" ]; then
    say "building it in $base"
    rm -rf "$base.new" && mkdir -p "$base.new/src"
    git archive "$commit" | tar -x -C "$base.new/src"
    $make -C "$base.new/src" -s BUILD=build SAN= COMMIT="$commit" build/ucmd build/libucmclient.so >"$base.log" 2>&1 ||
        { tail -n 20 "$base.log" >&2; say "$commit could not be built; $base.log has all of it"; exit 1; }
    cp -a "$base.new"/src/build/ucmd "$base.new"/src/build/libucmclient.so* "$base.new"
    rm -rf "$base.new/src" "$base"
    mv "$base.new" "$base"
fi
echo "$base"
