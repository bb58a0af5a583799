#!/usr/bin/env python3
"""An operator's day as one script, with the packages of `make deb` under a real systemd: `make check-system`.

Install, configure, start, connect two tenants, watch, add a tenant, fill a disk, lose an NFS server, upgrade, roll back,
remove. docs/operations.md has the same tasks.
"""

import json
import sys
import unittest

import check_deb
import machine
from check_system import NFS

CONFIG = f"""
tenants: [{{tenants}}]
arena:
  size: 64MiB
  slab: 1MiB
nvme:
  paths: [/disk/nvme]
  size: 64MiB
  segment: 4MiB
shared:
  placement: hashed
  roots: ["{NFS}", /mnt/kv]
"""
SCRAPE = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect("/run/ucmd/metrics.sock")
s.sendall(f"GET {sys.argv[1]} HTTP/1.0\\r\\n\\r\\n".encode())
while data := s.recv(65536):
    sys.stdout.write(data.decode())
"""


class Day(check_deb.Packages):
    def user(self, name):
        """An account for an engine; its processes may connect."""
        self.m.sh(f"useradd -r {name} && usermod -aG ucmd {name}")
        return int(self.m.run("id", "-u", name).stdout)

    def get(self, path):
        return self.m.run("python3", "-c", SCRAPE, path).stdout

    def exits(self):
        return [self.m.run("ucmctl", "health", *how, check=False).returncode for how in ([], ["--live"], ["--ready"])]

    def configured(self):
        self.uids = {name: self.user(name) for name in ("alice", "bob", "carol")}
        self.directory("/disk/nvme")
        self.m.sh("mkdir /mnt/kv; mount -t tmpfs -o size=2M,mode=700,uid=ucmd,gid=ucmd kv /mnt/kv")
        self.nfs_server()
        self.tenants("alice", "bob")
        self.m.run("ucmd", "--check", "--config", "/etc/ucmd/ucmd.yaml", user="ucmd")

    def tenants(self, *names):
        members = ", ".join(f'"team-{name} uid:{self.uids[name]}"' for name in names)
        self.m.write("/etc/ucmd/ucmd.yaml", CONFIG.format(tenants=members))

    def started(self):
        self.m.run("systemctl", "daemon-reload")
        self.m.run("systemctl", "start", "ucmd")
        self.until_health("ok")
        self.assertEqual(self.exits(), [0, 0, 0])

    def two_tenants(self):
        self.dump(user="alice")
        self.assertEqual(self.worker("lookup", user="bob")["hits"], 0, "another tenant's blocks are misses")
        self.dump(user="bob")
        self.load(user="alice")
        self.load(user="bob")
        self.m.run("python3", "-c", "open('/run/ucmd/x', 'w')", user="alice", check=False)
        listed = json.loads(self.m.run("ucmctl", "--json", "tenant", "list").stdout)["tenants"]
        self.assertEqual({t["tenant"] for t in listed}, {"team-alice", "team-bob"})

    def watched(self):
        self.assertIn("health     ok", self.m.run("ucmctl", "status").stdout)
        self.assertIn("200", self.get("/ready").splitlines()[0])
        text = self.get("/metrics")
        self.assertIn('ucmd_health{state="ok"} 1', text)
        self.assertIn('tenant="team-bob"', text)

    def a_tenant_added(self):
        pid = self.property("MainPID")
        self.assertEqual(self.worker("lookup", user="carol")["hits"], 0)
        self.tenants("alice", "bob", "carol")
        self.assertIn("tenants", self.m.run("ucmctl", "config", "reload").stdout)
        self.dump(user="carol")
        listed = json.loads(self.m.run("ucmctl", "--json", "tenant", "list").stdout)["tenants"]
        self.assertIn("team-carol", {t["tenant"] for t in listed})
        self.assertEqual(self.property("MainPID"), pid, "without a restart")

    def a_full_disk(self):
        self.dump(user="alice", model="big", count=128)
        self.m.wait_until(lambda: "/mnt/kv takes no writes: No space left" in self.health()[1], lambda: str(self.health()))
        self.assertEqual(self.exits(), [0, 0, 0], "collections make space")
        self.load(user="alice", model="big", count=128)
        self.m.sh("mount -o remount,size=64M /mnt/kv")

        def well():
            self.dump(user="alice", model="more", first=next(self.names), count=16)
            return self.health() == ("ok", "")
        self.names = iter(range(0, 16000, 16))
        self.m.wait_until(well, lambda: f"{self.health()} {self.m.journal()[-2000:]}")

    def a_lost_server(self):
        self.m.sh("systemctl kill -s KILL nfs-test")
        self.dump(user="bob", first=1000)
        self.until_health("degraded", "shared root nfs://127.0.0.1/kv: ")
        self.assertEqual(self.exits(), [4, 0, 0], "no host restarts")
        self.load(user="bob", first=1000)
        self.m.sh("systemctl reset-failed nfs-test", check=False)
        self.serve_nfs()
        self.until_health("ok")

    def upgraded_and_rolled_back(self):
        config = self.m.read("/etc/ucmd/ucmd.yaml")
        for version in ("second", "first"):
            before = self.property("MainPID")
            self.m.sh(f"dpkg -i /opt/{version}/*.deb")
            self.until_health("ok")
            self.assertNotEqual(self.property("MainPID"), before, "the new program runs")
            self.assertEqual(self.m.read("/etc/ucmd/ucmd.yaml"), config)
            self.load(user="alice")
            self.load(user="carol")

    def removed(self):
        self.m.run("systemctl", "stop", "ucmd")
        self.assertEqual(self.m.run("ucmctl", "health", check=False).returncode, 3)
        self.m.sh("dpkg -P ucmd libucmclient0 python3-ucmclient")
        self.assertEqual(self.m.sh("ls /usr/bin/ucm* /run/ucmd /etc/ucmd 2>/dev/null", check=False).stdout, "")
        self.assertNotEqual(self.m.sh("ls /disk/nvme").stdout, "", "a disk is the operator's")

    def test_the_day(self):
        for part in (self.configured, self.started, self.two_tenants, self.watched, self.a_tenant_added, self.a_full_disk,
                     self.a_lost_server, self.upgraded_and_rolled_back, self.removed):
            part()
            print(f"    {part.__name__.replace('_', ' ')}", file=sys.stderr)


if __name__ == "__main__":
    missing = machine.why_not()
    if missing:
        print(f"check_day: {missing}; not tried", file=sys.stderr)
        sys.exit(77)
    unittest.main(defaultTest="Day.test_the_day", verbosity=2)
