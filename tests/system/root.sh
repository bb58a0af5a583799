#!/bin/bash
# root.sh DIRECTORY: a Debian 12 with systemd and what ucmd's programs need at run time, for machine.py to boot. Made once:
# it stays in DIRECTORY until this list changes. Needs root, debootstrap, and an archive that apt's sources name.
set -euo pipefail

top=$(cd "$(dirname "$0")/../.." && pwd)
. "$top/tests/setup/debian.sh"
directory=$1 root=$1/root
base=systemd,systemd-sysv,dbus,iproute2
packages="libuv1 liburing2 libmsgpackc2 libssl3 libxxhash0 libyaml-0-2 libcjson1 libsystemd0 libnfs13 libmicrohttpd12 libcurl4 libexpat1 libibverbs1 libnuma1
          python3-minimal libpython3-stdlib python3-msgpack nfs-ganesha nfs-ganesha-vfs rpcbind"
list="$release $base $packages"

[ "$(cat "$directory/made-of" 2>/dev/null)" != "$list" ] || exit 0
mkdir -p "$directory"
rm -rf --one-file-system "$root"
echo "ucmd: making a Debian $release in $root"
debian_make "$root" "$base"
# Daemons of these packages are started by tests that want them.
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod +x "$root/usr/sbin/policy-rc.d"
if ! env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive chroot "$root" sh -c \
    "apt-get update && apt-get install -y --no-install-recommends ${packages//$'\n'/ } && apt-get clean" \
    >"$directory/log" 2>&1 </dev/null; then
    tail -n 20 "$directory/log" >&2
    exit 1
fi
chroot "$root" systemctl -q disable nfs-ganesha.service rpcbind.service rpcbind.socket
chroot "$root" systemctl -q mask run-rpc_pipefs.mount # the kernel's NFS client, which nobody here is
echo ucmd-test >"$root/etc/hostname"
echo "$list" >"$directory/made-of"
