#!/bin/bash
# boot.sh LOWER SCRATCH: becomes systemd, as PID 1 of the namespaces that machine.py has made. Its
# root is a copy-on-write view of the directories LOWER (as overlayfs lists them). Its writes lie in
# SCRATCH. Its mounts end with it.
set -euo pipefail

lower=$1 scratch=$2 root=$2/root
mkdir -p "$scratch/upper" "$scratch/work" "$root"
mount --make-rprivate /
mount -t overlay -o "lowerdir=$lower,upperdir=$scratch/upper,workdir=$scratch/work" overlay "$root"
# Not on the overlay, because an NFS server needs handles, and a cache O_DIRECT.
mkdir -p "$scratch/disk" "$root/disk"
mount --bind "$scratch/disk" "$root/disk"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev"
for node in null zero full random urandom tty; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755,nosuid,nodev tmpfs "$root/run"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/tmp"
cd "$root"
mkdir -p .host
pivot_root . .host
umount -l .host
mount --make-rshared / # as systemd does it where it does not think itself in a container
exec /usr/bin/env -i container=ucmd-test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=journal
