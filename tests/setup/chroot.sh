#!/bin/bash
# chroot.sh [--worktree]: proves that a bare Debian 12 with only git and make is enough for `make
# demo` and `make check`. debootstrap makes a chroot from this host's apt sources. Clones HEAD, or
# with --worktree copies the tree as it is. Needs root. Exits 77 where it can't be tried.
set -euo pipefail

top=$(cd "$(dirname "$0")/../.." && pwd)
. "$top/tests/setup/debian.sh"
root='' mounts=()

not_here() {
    echo "chroot.sh: $1; not tried" >&2
    exit 77
}

cleanup() {
    local i
    for ((i = ${#mounts[@]} - 1; i >= 0; i--)); do
        umount -l "${mounts[i]}" || true
    done
    [ -z "$root" ] || umount -l "$root/run/netns" 2>/dev/null || true # ip's, of the tests
    [ -z "$root" ] || rm -rf --one-file-system "$root"
}

mount_at() {
    local target=${!#}
    mkdir -p "$target"
    mount "$@"
    mounts+=("$target")
}

# inside SECONDS COMMAND...: runs it within that time, with a clean environment except for a proxy.
inside() {
    local limit=$1 start=$SECONDS variables=() name
    shift
    for name in http_proxy https_proxy no_proxy; do
        [ -z "${!name:-}" ] || variables+=("$name=${!name}")
    done
    echo "== $*"
    timeout -k 30 "$limit" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 CI="${CI:-}" \
        ${variables[@]+"${variables[@]}"} chroot "$root" "$@" </dev/null
    echo "== $*: $((SECONDS - start)) s"
}

[ "$(id -u)" = 0 ] || not_here "this needs root"
command -v debootstrap >/dev/null || not_here "debootstrap is not installed"
[ -n "$(mirror)" ] || not_here "apt's sources name no archive of Debian $release"

trap cleanup EXIT
trap 'exit 1' INT TERM
root=$(mktemp -d /var/tmp/ucmd-chroot.XXXXXX)
chmod 755 "$root"

start=$SECONDS
debian_make "$root" git,make
echo "== debootstrap: $((SECONDS - start)) s"

mount_at -t proc proc "$root/proc"
mount_at -t sysfs -o ro sysfs "$root/sys"
mount_at -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount_at -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"

if [ "${1:-}" = --worktree ]; then
    mkdir "$root/ucmd"
    git -C "$top" ls-files -co --exclude-standard -z |
        (cd "$top" && xargs -0 ls -d 2>/dev/null | tar -cf - --no-recursion -T -) | tar -C "$root/ucmd" -xf -
else
    git clone --quiet --no-hardlinks "$top" "$root/ucmd"
fi

inside 1800 make -C /ucmd demo
inside 3600 make -C /ucmd check
echo "a bare Debian $release with git and make runs both"
