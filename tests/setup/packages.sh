#!/bin/sh
# packages.sh [--missing] PACKAGE...: installs those of these Debian packages that are missing, or
# with --missing only names them. Prints nothing when none is missing.
set -eu

only_name=no
if [ "$1" = --missing ]; then
    shift
    only_name=yes
    command -v dpkg-query >/dev/null || exit 0
fi

sentence() {
    echo "ucmd: $1: install these packages, or what your system calls them, then run make again" \
         "(make SETUP=no skips this step):" >&2
    echo "  $2" >&2
    exit 1
}

if ! command -v dpkg-query >/dev/null; then
    sentence "this is no Debian-like system, so nothing can be installed here" "$*"
fi
missing=
known=$(dpkg-query -W -f '${Package}:${db:Status-Status} ' "$@" 2>/dev/null) || : "some are not known at all"
for package in "$@"; do
    case " $known" in *" $package:installed "*) ;; *) missing="$missing $package" ;; esac
done
[ -n "$missing" ] || exit 0
if [ $only_name = yes ]; then
    echo "ucmd: not installed:$missing (make setup installs them)"
    exit 0
fi

if ! command -v apt-get >/dev/null; then
    sentence "apt-get is missing" "${missing# }"
elif [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
    as_root="sudo"
else
    sentence "installing packages needs root or sudo, and neither is at hand" "${missing# }"
fi

echo "ucmd: installing$missing"
log=$(mktemp)
policy=${UCM_POLICY:-/usr/sbin/policy-rc.d}
made=no
clean() {
    [ $made = no ] || $as_root rm -f "$policy"
    rm -f "$log"
}
trap clean EXIT
trap 'exit 1' INT TERM HUP
# prometheus, nfs-ganesha and Swift are for tests, which start their own. Debian's services of them
# start neither now (policy-rc.d, 101: not allowed) nor at the next boot.
if [ ! -e "$policy" ]; then
    made=yes
    printf '#!/bin/sh\nexit 101\n' >"$log"
    $as_root install -m 755 "$log" "$policy"
fi
: >"$log"
# Waits for another apt that may be at work, such as unattended upgrades. Uses the list of packages
# that is there, and downloads a new one only if that fails.
install="env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=120"
# shellcheck disable=SC2086
if ! $as_root $install $missing >"$log" 2>&1; then
    if ! { $as_root apt-get update && $as_root $install $missing; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        sentence "apt-get failed" "${missing# }"
    fi
fi
command -v systemctl >/dev/null || exit 0
for package in $missing; do
    for unit in $(dpkg-query -L "$package" 2>/dev/null | sed -n 's|.*/systemd/system/\([^/]*\.service\)$|\1|p'); do
        case $unit in *@.service) ;; *) $as_root systemctl disable "$unit" >/dev/null 2>&1 || true ;; esac
    done
done
