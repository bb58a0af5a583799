#!/bin/bash
# build.sh DIRECTORY VERSION COMMIT NVCC [FATBINS]: builds the Debian packages of this tree, as it is, in DIRECTORY.
# NVCC empty: without the CUDA packages. FATBINS: kernels that are compiled already.
set -euo pipefail

directory=$1 version=$2 commit=$3 nvcc=$4 fatbins=${5:-}
top=$(cd "$(dirname "$0")/../.." && pwd)
release="A release: /usr/share/doc/ucmd/changelog.gz has what changed."

# Releases are tagged; what lies before the next one sorts below it, and in the order of its commits.
if ! git -C "$top" describe --exact-match --tags --match "v$version" >/dev/null 2>&1; then
    count=$(git -C "$top" rev-list --count HEAD 2>/dev/null || echo 0)
    release="Built from commit $commit, before the release."
    version="$version~$count.g${commit//-/.}"
fi
when=$(git -C "$top" log -1 --format=%cD 2>/dev/null || date -R)

rm -rf "$directory"
mkdir -p "$directory/ucmd"
if git -C "$top" rev-parse >/dev/null 2>&1; then
    git -C "$top" ls-files -z -co --exclude-standard
else
    (cd "$top" && find . -path ./build -prune -o -type f -print0)
fi | tar -C "$top" --null -T - --ignore-failed-read -c | tar -C "$directory/ucmd" -x
cd "$directory/ucmd"
cp -r config/debian debian
printf 'ucmd (%s) unstable; urgency=medium\n\n  * %s\n\n -- %s  %s\n' "$version" "$release" \
    "$(sed -n 's/^Maintainer: //p' debian/control)" "$when" >debian/changelog

export COMMIT=$commit NVCC=$nvcc CUDA_HOME=${nvcc:+$(dirname "$(dirname "$(realpath "$nvcc")")")}
[ -z "$fatbins" ] || export FATBINS=$fatbins
profiles=()
[ -n "$nvcc" ] || profiles=(-Ppkg.ucmd.nocuda)
dpkg-buildpackage -b -us -uc "${profiles[@]}"
