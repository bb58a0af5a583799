#!/usr/bin/env python3
"""The units as they are shipped, under a real systemd: `make check-system`. machine.py has the
machine, which needs root."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import machine
from machine import BUILD, TIMEOUT_S, TOP, Machine, copy_worker

sys.path.insert(0, os.path.join(TOP, "tests/integration"))
import swift_case  # noqa: E402

TREE = "/opt/tree"  # of this repository, as far as worker.py needs it
SMALL = "arena:\n  size: 64MiB\n  slab: 1MiB\ndevice:\n  cuda: off\n"
PATIENT = "  lookup_timeout: 10s\n  timeout: 30s\n"  # of shared: the machine may be busy
# Of `systemd-analyze security`. The network that nfs:// needs costs 0.5 for PrivateNetwork= and 0.2 for the families.
EXPOSURE, EXPOSURE_NFS = 1.0, 1.7
GANESHA = """
NFS_CORE_PARAM { NFS_Protocols = 3; NFS_Port = 22049; MNT_Port = 22048;
                 Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false; mount_path_pseudo = true; }
NFS_KRB5 { Active_krb5 = false; }
EXPORT_DEFAULTS { Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Protocols = 3; }
EXPORT { Export_Id = 1; Path = /disk/export; Pseudo = /kv; FSAL { Name = VFS; } }
LOG { Default_Log_Level = WARN; }
"""
NFS = "nfs://127.0.0.1/kv?nfsport=22049&mountport=22048"


def install(directory):
    """What `make install` puts into a system, as a layer for a machine, and the programs that tests
    call there."""
    shutil.rmtree(directory, ignore_errors=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    subprocess.run(["make", "-s", "-C", TOP, "install", f"DESTDIR={directory}", "PREFIX=/usr"], check=True,
                   env=environment, stdout=subprocess.DEVNULL)
    copy_worker(directory + TREE)
    return directory


class Case(unittest.TestCase):
    """A machine for each test: booting one takes a second."""

    @classmethod
    def setUpClass(cls):
        cls.layer = install(os.path.join(BUILD, "installed"))

    def setUp(self):
        self.m = Machine(self.layer)
        self.addCleanup(self.m.close)
        self.m.sh("systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload")

    def configure(self, text):
        """An operator edits the file and reloads systemd."""
        self.m.write("/etc/ucmd/ucmd.yaml", text)
        self.m.run("systemctl", "daemon-reload")

    def start(self, text=None):
        if text:
            self.configure(text)
        self.m.run("systemctl", "enable", "--now", "ucmd.socket", "ucmd.service")

    def health(self):
        done = self.m.run("ucmctl", "--json", "health", check=False)
        answer = json.loads(done.stdout) if done.stdout else {"status": None, "reasons": []}
        return answer["status"], " ".join(answer["reasons"])

    def until_health(self, status, words=""):
        def ready():
            found = self.health()
            return found[0] == status and words in found[1]
        self.m.wait_until(ready, lambda: f"wanted {status} {words}, is {self.health()}\n{self.m.journal()[-3000:]}")

    def worker(self, verb, model="demo", first=0, count=16, user=None):
        done = self.m.run("python3", "-B", f"{TREE}/tests/system/worker.py", verb, model, str(first), str(count), user=user)
        return json.loads(done.stdout)

    def dump(self, **how):
        answer = self.worker("dump", **how)
        self.assertEqual((answer["ok"], answer["wrong"]), (answer["of"], 0))

    def load(self, **how):
        answer = self.worker("load", **how)
        self.assertEqual((answer["ok"], answer["wrong"]), (answer["of"], 0))

    def files(self, directory):
        return self.m.sh(f"find {directory}/blocks -type f ! -name '.*' 2>/dev/null | wc -l", check=False).stdout.strip()

    def until_files(self, directory, count):
        self.m.wait_until(lambda: int(self.files(directory)) >= count, lambda: f"{self.files(directory)} files in {directory}\n" +
                          self.m.journal()[-3000:])

    def directory(self, path, owner="ucmd"):
        self.m.run("install", "-d", "-o", owner, "-g", owner, "-m", "700", path)

    def nfs_server(self):
        """Starts nfs-ganesha; the export belongs to ucmd."""
        self.directory("/disk/export")
        self.m.write("/etc/ganesha/ganesha.conf", GANESHA)
        self.serve_nfs()

    def serve_nfs(self):
        self.m.sh("mkdir -p /run/ganesha; systemctl start rpcbind.service; "
                  "systemd-run -q --unit nfs-test ganesha.nfsd -F -f /etc/ganesha/ganesha.conf -L /var/log/ganesha.log")
        probe = "import socket; socket.create_connection(('127.0.0.1', 22049), 1).close()"
        self.m.wait_until(lambda: self.m.run("python3", "-c", probe, check=False).returncode == 0,
                          lambda: "nfs-ganesha does not come up\n" + self.m.sh("cat /var/log/ganesha.log").stdout)

    def metric(self, name):
        return json.loads(self.m.run("ucmctl", "--json", "stats").stdout)["metrics"][name]

    def exposure(self):
        done = self.m.run("systemd-analyze", "security", "--no-pager", "ucmd.service", check=False)
        return float(re.search(r"exposure level for ucmd.service: ([\d.]+)", done.stdout).group(1))


class Roots(Case):
    """Wrong 1: the paths that the configuration names work under the shipped unit."""

    def test_the_sandbox_opens_nothing_that_the_configuration_does_not_name(self):
        self.directory("/disk/kv")
        self.start(SMALL)
        self.until_health("ok")
        self.assertLessEqual(self.exposure(), EXPOSURE)
        pid = self.m.sh("systemctl show -P MainPID ucmd").stdout.strip()
        self.assertIn("Read-only file system", self.m.sh(f"nsenter -t {pid} -m touch /disk/kv/x", check=False).stderr)
        self.assertNotEqual(*self.m.sh(f"readlink /proc/1/ns/net /proc/{pid}/ns/net").stdout.split())

    def test_a_configuration_that_the_unit_does_not_fit_is_said(self):
        self.directory("/disk/kv")
        self.start(SMALL)
        self.m.write("/etc/ucmd/ucmd.yaml", SMALL + f"shared:\n  placement: hashed\n  roots: [/disk/kv, \"{NFS}\"]\n")
        warned = self.m.run("systemctl", "restart", "ucmd").stderr
        self.assertIn("Run 'systemctl daemon-reload'", warned)
        journal = self.m.journal()
        self.assertRegex(journal, r"/disk/kv: uid \d+ can't write there: Read-only file system; .*systemctl daemon-reload")
        self.assertRegex(journal, r"nfs://127.*: this process may not use the network; .*systemctl daemon-reload")
        self.until_health("degraded", "shared root /disk/kv takes no writes: Read-only file system")
        self.until_health("degraded", "shared root nfs://127.0.0.1/kv: Address family not supported")
        self.nfs_server()
        self.m.run("systemctl", "daemon-reload")
        self.m.run("systemctl", "restart", "ucmd")
        self.until_health("ok")

    def test_a_file_system_that_is_mounted_later_is_used(self):
        self.directory("/mnt/kv")
        self.start(SMALL + "shared:\n  roots: [/mnt/kv]\n")
        self.until_health("ok")
        self.m.sh("mount -t tmpfs -o size=64M,mode=700,uid=ucmd,gid=ucmd kv /mnt/kv")
        self.dump()
        self.until_files("/mnt/kv", 16)
        self.m.sh("umount -l /mnt/kv")
        self.assertEqual(self.files("/mnt/kv"), "0")

    def test_directories_below_home_and_tmp(self):
        for directory in ("/home/kv", "/var/tmp/kv"):
            self.directory(directory)
        self.start(SMALL + "shared:\n  placement: hashed\n  roots: [/home/kv, /var/tmp/kv]\n")
        self.until_health("ok")
        self.dump(count=64)
        self.until_files("/home/kv", 8)
        self.until_files("/var/tmp/kv", 8)


MOONCAKE = os.environ.get("UCM_MOONCAKE_PYTHON", os.path.join(TOP, "build/mooncake-venv/bin/mooncake-python"))


class Beside(Case):
    """Each kind of root that is a process. The unit starts it, it stores, and a daemon with nothing
    of its own loads from it. Servers that Debian's root lacks run alongside the machine, in its
    network."""

    def beside(self, *argv):
        return ["nsenter", "--target", self.m.pid, "--net", *argv]

    def stores_and_finds(self, root, exposure=EXPOSURE_NFS):
        self.start(SMALL + f"shared:\n{PATIENT}  roots: [\"{root}\"]\n")
        self.until_health("ok")
        self.dump()
        self.m.wait_until(lambda: self.metric("shared_writes") == 16, lambda: self.m.journal()[-3000:])
        self.m.sh("systemctl stop ucmd && rm -rf /dev/shm/ucmd* && systemctl start ucmd")
        self.until_health("ok")
        self.load()
        self.assertEqual(self.metric("load_blocks_shared"), 16)
        share = json.loads(self.m.run("ucmctl", "--json", "status").stdout)["shared_roots"][0]
        self.assertEqual((share["health"], share["backend_ends"]), ("up", 0))
        status = self.m.read(f"/proc/{share['pid']}/status")
        self.assertIn("Seccomp:\t2\n", status)
        self.assertIn("NoNewPrivs:\t1\n", status)
        self.assertNotIn("can't be bound by Landlock", self.m.journal())
        self.assertLessEqual(self.exposure(), exposure)


class Kinds(Beside):
    def test_a_directory(self):
        self.directory("/disk/kv")
        self.stores_and_finds("/disk/kv", EXPOSURE)
        self.assertEqual(self.files("/disk/kv"), "16")

    def test_a_backends_process(self):
        self.directory("/disk/kv")
        self.stores_and_finds("process:kv write=/disk/kv buffer=4MiB -- /usr/libexec/ucmd/ucmd-backend-directory /disk/kv", EXPOSURE)
        self.assertEqual(self.files("/disk/kv"), "16")

    def test_an_nfs_server(self):
        self.nfs_server()
        self.stores_and_finds(NFS)
        self.assertEqual(self.files("/disk/export"), "16")

    def test_a_bucket(self):
        """With the key at the place that docs/shared-tier.md names."""
        try:
            server = swift_case.Swift(self.beside())
        except RuntimeError as e:
            self.skipTest(str(e))
        self.addCleanup(server.close)
        self.assertEqual(server.bucket("kv-cache"), 200)
        self.m.write("/etc/ucmd/s3/credentials", "[default]\naws_access_key_id = test:tester\naws_secret_access_key = testing\n")
        self.m.sh("chown -R root:ucmd /etc/ucmd/s3; chmod 750 /etc/ucmd/s3; chmod 640 /etc/ucmd/s3/credentials")
        self.stores_and_finds(f"s3://kv-cache/prod?endpoint=http://127.0.0.1:{server.port}")


@unittest.skipUnless(os.path.isdir(os.path.join(os.path.dirname(MOONCAKE), "../lib/python3.11/site-packages/mooncake")),
                     "no Mooncake client for the machine's Python: "
                     "`make setup` downloads it from PyPI")
class Mooncake(Beside):
    """Its client lies where docs/shared-tier.md has users install it."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        to = os.path.join(cls.layer, "opt/mooncake")
        shutil.copytree(os.path.dirname(os.path.dirname(MOONCAKE)), to, symlinks=True, copy_function=os.link,
                        ignore=shutil.ignore_patterns("rdma", "__pycache__"))

    def test_a_store(self):
        directory = tempfile.mkdtemp(prefix="ucm-mooncake-")
        self.addCleanup(shutil.rmtree, directory)
        argv = self.beside(MOONCAKE, "-B", os.path.join(TOP, "tests/integration/mooncake_server.py"), directory, MOONCAKE)
        with open(os.path.join(directory, "log"), "w", encoding="utf-8") as log:
            server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.addCleanup(server.stdout.close)
        self.addCleanup(server.wait, TIMEOUT_S)
        self.addCleanup(server.stdin.close)
        self.stores_and_finds(server.stdout.readline().split()[1])


class Service(Case):
    """Wrong 2, 3, 4 and 10."""

    def active(self):
        return self.m.sh("systemctl is-active ucmd.service ucmd.socket", check=False).stdout.split()

    def test_stop_means_stop_and_a_restart_keeps_clients_waiting(self):
        self.start(SMALL)
        self.until_health("ok")
        self.m.sh("(while :; do ucmctl --timeout 1 status; done) >/dev/null 2>&1 & echo $! >/run/hammer")
        # systemctl may warn that the socket can still activate it, because the socket stops a
        # moment after the service.
        self.m.run("systemctl", "stop", "ucmd")
        self.m.wait_until(lambda: self.active() == ["inactive", "inactive"], "the socket stays")
        self.m.sh("sleep 1; kill $(cat /run/hammer)")
        self.assertEqual(self.active(), ["inactive", "inactive"])
        self.assertEqual(self.m.run("ucmctl", "health", check=False).returncode, 3)
        self.m.run("systemctl", "start", "ucmd")
        self.assertEqual(self.active(), ["active", "active"])
        inode = self.m.sh("stat -c %i /run/ucmd/ucmd.sock").stdout
        self.m.run("systemctl", "restart", "ucmd")
        self.assertEqual(self.m.sh("stat -c %i /run/ucmd/ucmd.sock").stdout, inode)
        self.until_health("ok")

    def exits(self):
        return [self.m.run("ucmctl", "health", *how, check=False).returncode for how in ([], ["--live"], ["--ready"])]

    def test_health_for_supervisors(self):
        self.start(SMALL + f"shared:\n  roots: [\"{NFS}\"]\n")
        self.until_health("degraded")
        self.assertEqual(self.exits(), [4, 0, 0], "one server that is gone restarts no host")
        pid = self.m.sh("systemctl show -P MainPID ucmd").stdout.strip()
        self.m.sh(f"kill -STOP {pid}")
        self.assertEqual(self.m.run("ucmctl", "health", "--live", "--timeout", "1", check=False).returncode, 3)
        self.m.sh(f"kill -CONT {pid}")
        self.m.run("systemctl", "stop", "ucmd")
        self.assertEqual(self.exits(), [3, 3, 3])

    def test_more_memory_than_there_is(self):
        self.configure(SMALL.replace("64MiB", "14TiB"))
        self.m.run("systemctl", "enable", "--now", "ucmd.socket")
        self.assertNotEqual(self.m.run("systemctl", "start", "ucmd.service", check=False).returncode, 0)
        self.assertRegex(self.m.journal(), r"ucmd.yaml:2: arena.size is 14TiB, .* \d+ MiB of memory available, .* at most \d+MiB fit")
        self.configure(SMALL)
        self.m.sh("systemctl reset-failed; systemctl start ucmd")
        self.until_health("ok")
        pid = self.m.sh("systemctl show -P MainPID ucmd").stdout.strip()
        self.assertEqual(self.m.read(f"/proc/{pid}/oom_score_adj").strip(), "500")
        self.m.sh("setpriv --reuid ucmd --regid ucmd --clear-groups ucmd --check --config /etc/ucmd/ucmd.yaml")

    def test_a_shared_tier_says_after_a_restart_what_it_holds(self):
        self.directory("/disk/kv")
        self.start(SMALL + "shared:\n  roots: [/disk/kv]\n  gc_interval: 10s\n")
        self.dump()
        self.until_files("/disk/kv", 16)

        def used():
            return json.loads(self.m.run("ucmctl", "--json", "status").stdout)["shared_roots"][0]["used_bytes"]
        self.m.wait_until(used, "no collection")
        self.m.run("systemctl", "restart", "ucmd")
        self.m.sh("sleep 0.5")
        self.assertGreater(used(), 0)

    def test_memory_that_may_not_be_locked_is_said_once(self):
        self.directory("/disk/nvme")
        self.m.write("/etc/systemd/system/ucmd.service.d/memlock.conf", "[Service]\nLimitMEMLOCK=1M\n")
        self.start(SMALL + "nvme:\n  paths: [/disk/nvme]\n  size: 64MiB\n  segment: 4MiB\n")
        self.until_health("ok")
        said = re.findall(r"buffers-not-registered .*", self.m.journal())
        self.assertEqual(len(said), 1, said)
        self.assertIn("LimitMEMLOCK=infinity", said[0])


class Nvme(Case):
    def test_directories_anywhere_and_io_uring(self):
        self.directory("/disk/nvme")
        self.start(SMALL + "nvme:\n  paths: [/disk/nvme]\n  size: 64MiB\n  segment: 4MiB\n")
        self.until_health("ok")
        self.dump()
        status = json.loads(self.m.run("ucmctl", "--json", "status").stdout)
        self.assertEqual(status["tiers"][0]["engine"], "io_uring", self.m.journal())
        self.m.run("systemctl", "restart", "ucmd")
        self.until_health("ok")
        self.load()


if __name__ == "__main__":
    missing = machine.why_not()
    if missing:
        print(f"check_system: {missing}; not tried", file=sys.stderr)
        sys.exit(77)
    unittest.main(verbosity=2)
