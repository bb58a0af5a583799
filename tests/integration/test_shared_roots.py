#!/usr/bin/python3
"""Roots of the shared tier that are missing, full, read-only, damaged or hung, through real
daemons. A root costs its own hits only, and comes back by itself. No byte is ever loaded that was
not written. Tests are skipped if the machine lacks what they need.
"""

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import time
import unittest

import hosts
from daemon import until
from hung_mount import HungMount
from second_client import (DEMO, DENIED, EXISTS, MISS, NOT_FOUND, OK, OTHER_UID, TIMEOUT_S, TOP, UNSUPPORTED, Client,
                           Region, keys)
from shared_case import HEADER, Host, SharedCase

SUITE_TIMEOUT_S = 300
DEADLINE_S = 4  # shared.timeout where a server hangs
FILE = re.compile(r"[0-9a-f]+-[0-9a-f]{32}-[0-9a-f]{2}$")
BIG = dict(DEMO, layer_bytes=262144)


def block_files(directory):
    return sorted(os.path.join(at, name) for at, _, names in os.walk(directory) for name in names
                  if FILE.match(name) and name.strip("0-"))  # the garbage collection's marker is all zeros


class RootsCase(SharedCase):
    def setUp(self):
        super().setUp()
        self.roots = [os.path.join(self.directory, name) for name in ("a", "b", "c")]
        for root in self.roots:
            os.mkdir(root)

    def over(self, roots, blocks=64, **options):
        """A host over these words of shared.roots. No storage hangs here, so a busy machine can
        meet the deadlines. A write that misses its deadline is dropped."""
        words = {"shared.roots": ",".join(roots)} if isinstance(roots, list) else roots
        options = {"shared.lookup_timeout": "10s", "shared.timeout": "30s", "shutdown.drain": "2s", **options}
        self.hosts.append(Host("", self.identity, blocks, **{**words, **options}))
        return self.hosts[-1]

    def health(self, host, number=0):
        return host.root(number)["health"]

    def dumped(self, host, names):
        """Their bytes, by name."""
        region, bytes_of = host.regions[0], {}
        for block, name in enumerate(names):
            bytes_of[name] = region.fill(block)
        self.assertLessEqual(set(region.dump(names, range(len(names)))), {OK, EXISTS})
        return bytes_of

    def written(self, host, names):
        self.until(lambda: all(host.shared(name) == "ready" for name in names), "their writing")

    def good(self, host, bytes_of):
        """Returns the names that it loads. Checks that those have no wrong byte, and that no byte
        of the others came."""
        region, found = host.regions[0], []
        for name, right in bytes_of.items():
            before = region.fill(0)
            host.look(name)
            status = region.load([name], [0])[0]
            self.assertIn(status, (OK, MISS))
            self.assertEqual(region.bytes(0), right if status == OK else before, name)
            found += [name] * (status == OK)
        return found


class Policies(RootsCase):
    def spread(self, policy, roots, count=12):
        one, names = self.over(roots, **{"shared.placement": policy}), list(range(count))
        bytes_of = self.dumped(one, names)
        self.written(one, names)
        other = self.over(roots, **{"shared.placement": policy})
        self.assertEqual(other.look(*names)["hits"], count)
        self.assertEqual(self.good(other, bytes_of), names)
        return [len(block_files(root)) for root in self.roots]

    def test_tiered_writes_to_the_first(self):
        self.assertEqual(self.spread("tiered", self.roots), [12, 0, 0])

    def test_hashed_has_a_root_for_each_block(self):
        counts = self.spread("hashed", self.roots, count=36)
        self.assertEqual(sum(counts), 36)
        self.assertTrue(all(counts), counts)


class Missing(RootsCase):
    def test_missing_at_the_start_shows_at_once_and_comes_by_itself(self):
        os.rmdir(self.roots[0])
        one = self.over(self.roots[:2], **{"shared.placement": "tiered"})
        self.until(lambda: self.health(one) == "down", "its health")
        self.until(lambda: "does not exist" in one.root()["reason"], "why")
        self.assertEqual(one.client.call("health")["status"], "degraded")
        os.mkdir(self.roots[0])
        self.until(lambda: self.health(one) == "up", "its return")

    def checked(self, *words):
        argv = [os.environ.get("UCMD", os.path.join(TOP, "build/ucmd")), "--check", "--set", "socket=/tmp/ucmd-check.sock"]
        for word in words:
            argv += ["--set", word]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)

    def test_a_check_refuses_a_file_and_warns_of_what_is_missing(self):
        with open(os.path.join(self.directory, "file"), "w"):
            done = self.checked("shared.roots=" + os.path.join(self.directory, "file"))
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("is not a directory", done.stderr)
        done = self.checked("shared.roots=" + os.path.join(self.directory, "later"))
        self.assertEqual(done.returncode, 0, done)
        self.assertIn("warning: --set: shared.roots: ", done.stderr)
        self.assertEqual(self.checked("shared.roots=nfs://h/x?version=4").returncode, 1)

    def test_removed_it_is_missed_and_comes_back_by_itself(self):
        one, away = self.over(self.roots[:1]), self.roots[0] + ".away"
        bytes_of = self.dumped(one, range(4))
        self.written(one, range(4))
        other = self.over(self.roots[:1])
        os.rename(self.roots[0], away)
        for turn in range(40):
            other.look(f"none {turn}", f"none {turn} more")
            if self.health(other) == "down":
                break
        self.assertEqual(self.health(other), "down")
        health = other.client.call("health")
        self.assertEqual(health["status"], "degraded")
        self.assertIn(self.roots[0], str(health["reasons"]))
        began = time.monotonic()
        self.assertEqual(self.good(other, bytes_of), [])
        self.assertLess(time.monotonic() - began, 4, "nobody is asked")
        self.assertEqual(self.good(one, bytes_of), [0, 1, 2, 3], "DRAM goes on")
        self.assertFalse(os.path.exists(self.roots[0]), "nobody makes it")
        os.rename(away, self.roots[0])
        self.until(lambda: other.look(0) and self.health(other) == "up", "its return")
        self.until(lambda: self.good(other, bytes_of) == [0, 1, 2, 3], "the end of shared.negative")

    def test_of_two_the_other_one_goes_on(self):
        one = self.over(self.roots[:2], **{"shared.placement": "hashed"})
        bytes_of = self.dumped(one, range(24))
        self.written(one, range(24))
        left = len(block_files(self.roots[1]))
        os.rename(self.roots[0], self.roots[0] + ".away")
        other = self.over(self.roots[:2], **{"shared.placement": "hashed"})
        for name in range(24):
            other.look(name)
        self.assertEqual(self.health(other), "down")
        self.assertEqual(len(self.good(other, bytes_of)), left)
        more = self.dumped(other, ["y0", "y1"])
        self.written(other, more)
        self.assertEqual(len(block_files(self.roots[1])), left + 2)

    def test_a_purge_says_what_it_did_not_reach(self):
        one = self.over(self.roots[:2], **{"shared.placement": "hashed"})
        self.dumped(one, range(24))
        self.written(one, range(24))
        first = len(block_files(self.roots[0]))
        self.assertTrue(0 < first < 24)
        os.rename(self.roots[0], self.roots[0] + ".away")
        done = one.daemon.ctl("purge", one.ns, "--yes")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "gone from this host.*left on the shared tier.*try again")
        self.assertEqual((block_files(self.roots[1]), len(block_files(self.roots[0] + ".away"))), ([], first))
        os.rename(self.roots[0] + ".away", self.roots[0])
        self.until(lambda: one.daemon.ctl("purge", one.ns, "--yes").returncode == 0, "a purge that is whole")
        self.assertEqual(block_files(self.roots[0]), [])
        self.assertEqual(one.look(0, 1, 2, 3)["hits"], 0)

    def test_killed_while_it_stores_it_leaves_nothing_that_is_half(self):
        self.identity.update(BIG, model="killed")
        one, bytes_of = self.over(self.roots[:1], blocks=48), {}
        region = one.regions[0]
        for block in range(24):
            bytes_of[block] = region.fill(block)
        region.begin("dump", range(24), range(24))
        self.until(lambda: len(block_files(self.roots[0])) >= 5, "some of them")
        one.daemon.kill()
        shutil.rmtree(one.daemon.directory, ignore_errors=True)
        self.hosts.remove(one)
        whole = block_files(self.roots[0])
        self.assertEqual({os.path.getsize(path) for path in whole}, {HEADER + region.size})
        for path in (os.path.join(at, name) for at, _, names in os.walk(self.roots[0]) for name in names):
            self.assertTrue(path in whole or os.path.basename(path).startswith((".tmp-", ".tenant-")), path)
            self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
        self.assertEqual(len(self.good(self.over(self.roots[:1], blocks=4), bytes_of)), len(whole))


class Trusted(RootsCase):
    def spoiled(self, how, path, other):
        with open(other if how == "swapped" else path, "rb") as file:  # swapped: a whole file, of another block
            data = file.read()
        return {"flipped": data[:HEADER + 99] + bytes([data[HEADER + 99] ^ 4]) + data[HEADER + 100:],
                "header": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "empty": b"", "longer": data + b"x",
                "zeros": bytes(len(data)), "swapped": data}[how]

    def test_spoiled_files_are_misses_and_replaced(self):
        ways = ["flipped", "header", "cut", "empty", "longer", "zeros", "swapped"]
        one, other = self.over(self.roots[:1]), self.over(self.roots[:1])
        old = self.dumped(one, ways)
        self.written(one, ways)
        files = block_files(self.roots[0])
        paths = {name: next(path for path in files if keys(name).hex() in path) for name in ways}
        changed = {path: self.spoiled(name, path, paths["cut"]) for name, path in paths.items()}
        for path, data in changed.items():
            with open(path, "wb") as file:
                file.write(data)
        self.assertEqual(self.good(other, old), [])
        self.assertGreater(other.metrics()["shared_damaged"], 0)
        # files of wrong lengths go when a write finds them
        removed = [paths[name] for name in ("flipped", "header", "zeros", "swapped")]
        self.until(lambda: not any(map(os.path.exists, removed)), "their removal")
        new = self.dumped(other, ways)
        third = self.over(self.roots[:1])
        self.until(lambda: self.good(third, new) == ways, "good ones in their places")

    @unittest.skipUnless(os.geteuid() == 0, "takes another uid")
    def test_two_tenants_see_nothing_of_each_other(self):
        one, daemon = self.over(self.roots[:1]), self.over(self.roots[:1]).daemon
        bytes_of = self.dumped(one, range(3))
        self.written(one, range(3))
        mine = block_files(self.roots[0])

        def other():
            client = Client(daemon, uid=OTHER_UID)
            return client, client.open(self.identity)
        client, ns = other()
        region = Region(client, ns, self.identity, 4)
        self.assertEqual(client.call("lookup", ns=ns, keys=keys(0, 1, 2), shared=True)["hits"], 0)
        self.assertEqual(region.load(range(3), range(3)), [MISS] * 3)
        theirs = region.fill(0)
        self.assertEqual(region.dump([0], [0]), [OK])
        self.until(lambda: len(block_files(self.roots[0])) == 4, "its own file")
        path = next(path for path in block_files(self.roots[0]) if path not in mine)
        # The file lies under the name of the other tenant's file, where only that tenant looks.
        # That tenant still gets no byte of it.
        shutil.copy(next(file for file in mine if keys(0).hex() in file), path)
        client.call("evict", ns=ns, keys=keys(0), tier=1)
        client.call("lookup", ns=ns, keys=keys(0), shared=True)
        self.assertEqual(region.load([0], [1]), [MISS])
        self.assertNotIn(bytes_of[0], (region.bytes(0), region.bytes(1)))
        self.assertEqual(region.bytes(0), theirs)
        client.call("namespace.purge", ns=ns)
        self.assertEqual(block_files(self.roots[0]), mine)
        self.assertEqual(self.good(one, bytes_of), [0, 1, 2])


class Room(RootsCase):
    @contextlib.contextmanager
    def mounted(self, *words):
        made = subprocess.run(["mount", *words], capture_output=True, text=True)
        if made.returncode != 0:
            self.skipTest(f"nothing can be mounted here: {made.stderr.strip()}")
        try:
            yield
        finally:
            for host in list(self.hosts):
                self.assertEqual(host.daemon.stop(), 0)
                self.hosts.remove(host)
            subprocess.run(["umount", words[-1]], check=True)

    def test_full_it_takes_no_more_and_is_read_until_there_is_room(self):
        ballast = os.path.join(self.roots[0], "ballast")
        with self.mounted("-t", "tmpfs", "-o", "size=2m", "tmpfs", self.roots[0]):
            one = self.over(self.roots[:1])
            bytes_of = self.dumped(one, range(8))
            self.written(one, range(8))
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            self.dumped(one, [f"no room {i}" for i in range(8)])
            self.until(lambda: self.health(one) == "full", "full")
            other = self.over(self.roots[:1])
            found = self.good(other, bytes_of)
            left = "".join(block_files(self.roots[0]))  # a collection makes room meanwhile
            self.assertTrue(found and all(name in found for name in bytes_of if keys(name).hex() in left), found)
            self.assertEqual(one.client.call("health")["status"], "ok", "a full root is no failure")
            os.remove(ballast)
            names = iter(range(1000))

            def taken():
                self.dumped(one, [f"room {next(names)}"])
                return self.health(one) == "up"
            self.until(taken, "writes")
            self.assertEqual([at for at, _, files in os.walk(self.roots[0]) for name in files if name.startswith(".tmp-")],
                             [], "what had no room is cleared away")

    def test_mounted_read_only_it_is_read(self):
        with self.mounted("--bind", self.roots[0], self.roots[1]):
            subprocess.run(["mount", "-o", "remount,bind,ro", self.roots[1]], check=True)
            one = self.over(self.roots[:1])
            bytes_of = self.dumped(one, range(4))
            self.written(one, range(4))
            other = self.over(self.roots[1:2])
            self.assertEqual(self.good(other, bytes_of), [0, 1, 2, 3])
            self.dumped(other, ["z"])
            self.until(lambda: self.health(other) == "read-only", "read-only")
            self.assertEqual(self.good(other, dict(bytes_of)), [0, 1, 2, 3])

    def test_read_only_by_its_words_nothing_of_it_is_changed(self):
        one = self.over(self.roots[:1])
        bytes_of = self.dumped(one, range(4))
        self.written(one, range(4))
        before = {path: os.stat(path).st_mtime_ns for path in block_files(self.roots[0])}
        other = self.over([self.roots[0] + " ro"], **{"shared.touch": "0s"})
        self.assertEqual(self.health(other), "read-only")
        self.assertEqual(self.good(other, bytes_of), [0, 1, 2, 3])
        self.dumped(other, ["z"])
        other.client.call("evict", ns=other.ns, keys=keys(0))
        self.assertNotEqual(other.daemon.ctl("purge", other.ns, "--yes").returncode, 0, "files are left")
        self.assertEqual({path: os.stat(path).st_mtime_ns for path in block_files(self.roots[0])}, before)
        refused = self.refused(UNSUPPORTED, other.client.call, "shared.gc", root=1)
        self.assertIn("read-only", str(refused))
        self.assertEqual(other.client.call("shared.gc"), {"roots": 0})

    def test_capacity_is_kept_and_the_oldest_go(self):
        one = self.over([self.roots[0] + " capacity=256KiB"], **{"shared.gc_interval": "1s"})
        bytes_of = self.dumped(one, range(20))
        self.written(one, range(20))
        for name in range(20):  # 0 is the oldest
            path = next(path for path in block_files(self.roots[0]) if keys(name).hex() in path)
            hours = 40 - name
            os.utime(path, (time.time() - 3600 * hours,) * 2)
        more = self.dumped(one, [f"new {i}" for i in range(30)])

        def within():
            return 0 < len(block_files(self.roots[0])) * (HEADER + one.regions[0].size) <= 256 << 10
        self.until(lambda: within() and one.root().get("files", 0) > 0, "its capacity")
        other = self.over(self.roots[:1])
        self.assertEqual(self.good(other, {name: bytes_of[name] for name in range(15)}), [], "older than all that stay")
        self.assertGreaterEqual(len(self.good(other, more)), 20)
        self.assertGreater(one.metrics()["shared_gc_passes"], 0)

    def test_a_collection_begins_when_an_operator_wants_it(self):
        one = self.over([self.roots[0] + " capacity=1MiB", self.roots[1]])
        self.dumped(one, range(4))
        self.written(one, range(4))
        dead = os.path.join(os.path.dirname(block_files(self.roots[0])[0]), ".tmp-dead-00000000-" + "0" * 16 + "-" + "1" * 16)
        with open(dead, "wb") as file:
            file.write(b"half")
        os.utime(dead, (time.time() - 7200,) * 2)
        self.assertEqual(json.loads(one.daemon.ctl("--json", "shared", "gc").stdout), {"roots": 2, "busy": 0})
        self.until(lambda: not os.path.exists(dead), "the dead host's file")
        self.until(lambda: one.root().get("files") == 4 and one.metrics()["shared_gc_passes"] == 2, "both roots' end")
        begins = "garbage collection begins on 1 root\n"
        self.until(lambda: one.daemon.ctl("shared", "gc", self.roots[1]).stdout == begins, "the end of the pass after its marker")
        shown = one.daemon.ctl("shared").stdout.splitlines()
        self.assertEqual(shown[0].split()[:3], ["ROOT", "KIND", "HEALTH"])
        self.assertRegex(shown[1], rf"^{self.roots[0]} +directory +up +32\.\d KiB +1\.0 MiB +4 ")
        self.assertRegex(shown[2], rf"^{self.roots[1]} +directory +up .* - ")
        self.assertIn("has no root 3", one.daemon.ctl("shared", "gc", 3).stderr)
        self.assertIn("no root is called /x", one.daemon.ctl("shared", "gc", "/x").stderr)
        self.assertIn("no root is called 100", one.daemon.ctl("shared", "gc", 100).stderr)
        self.assertEqual(one.daemon.ctl("shared", "sweep").returncode, 2)
        self.refused(NOT_FOUND, one.client.call, "shared.gc", root=3)
        if os.geteuid() == 0:
            other = Client(one.daemon, uid=OTHER_UID)
            self.refused(DENIED, other.call, "shared.gc")


class HungDirectory(RootsCase):
    """A mount over the root answers nothing. Blocks in DRAM are served, health says why, and the
    daemon ends."""

    def hung(self, takes):
        try:
            mount = HungMount(self.roots[0], takes)
        except OSError as e:
            self.skipTest(str(e))
        self.mounts.append(mount)
        return mount

    def setUp(self):
        super().setUp()
        self.mounts = []

    def tearDown(self):
        for mount in self.mounts:
            mount.close()
        super().tearDown()

    def serves_beside(self, host, bytes_of):
        self.dumped(host, [f"hangs {i}" for i in range(8)])  # their writes find that the root hangs
        self.until(lambda: self.health(host) == "down", "its health")
        health = host.client.call("health")
        self.assertEqual(health["status"], "degraded")
        self.assertIn(self.roots[0], str(health["reasons"]))
        self.assertEqual(self.good(host, bytes_of), list(bytes_of), "DRAM goes on")
        more = self.dumped(host, ["dumped alongside it"])
        self.assertEqual(self.good(host, more), list(more))

    def begun(self):
        host = self.over(self.roots[:1], **{"shared.timeout": "1s", "shared.lookup_timeout": "100ms", "shared.threads": "4"})
        # A write that takes longer than shared.timeout on a busy disk is given up.
        for first in range(0, 400, 4):
            names = range(first, first + 4)
            bytes_of = self.dumped(host, names)
            self.until(lambda: self.settled(host), "the end of their writing")
            if all(host.shared(name) == "ready" for name in names):
                return host, bytes_of
        self.fail("the disk writes no four blocks within shared.timeout")

    def settled(self, host):
        root = host.root()
        return root["health"] == "up" and root["queued"] == root["in_flight"] == 0

    def ended(self, host):
        self.hosts.remove(host)
        self.assertEqual(host.daemon.stop(), 0)

    def test_a_kill_ends_it(self):
        host, bytes_of = self.begun()
        self.hung(takes=False)
        self.serves_beside(host, bytes_of)
        self.ended(host)

    def test_no_kill_ends_it(self):
        host, bytes_of = self.begun()
        mount = self.hung(takes=True)
        self.serves_beside(host, bytes_of)
        pid = host.root()["pid"]
        self.assertEqual(host.root()["backend"], "directory")
        host.daemon.process.send_signal(signal.SIGTERM)
        self.assertEqual(host.daemon.process.wait(TIMEOUT_S), 0, "it ends while the mount hangs")
        self.assertIn("backend-left", host.daemon.log())
        self.assertTrue(os.path.exists(f"/proc/{pid}"))
        mount.close()
        self.until(lambda: not os.path.exists(f"/proc/{pid}"), "the process's end")
        self.ended(host)
        self.assertEqual(len(self.good(self.over(self.roots[:1]), bytes_of)), 4)


@unittest.skipIf(hosts.why_not(), hosts.why_not())
class Hung(unittest.TestCase):
    """A stopped nfs-ganesha is a server that hangs: connections stay, and nothing is answered."""

    def setUp(self):
        self.identity = dict(DEMO, model=self.id())
        self.fleet = hosts.Fleet(2, **{"shared.lookup_timeout": "50ms", "shared.timeout": f"{DEADLINE_S}s", "shutdown.drain": "2s",
                                       "arena.size": "16MiB"})
        self.addCleanup(self.fleet.close)

    def join(self, host):
        client = host.client()
        ns = client.open(self.identity)
        return client, ns, Region(client, ns, self.identity, 16)

    until = staticmethod(until)

    def timed(self, client, ns, *names):
        began = time.monotonic()
        answer = client.call("lookup", ns=ns, keys=keys(*names), shared=True)
        return answer, time.monotonic() - began

    def written(self, client, ns, region):
        """Names of eight blocks on the root, and their bytes. On a busy machine a write may take
        longer than shared.timeout and be given up. Then other blocks are dumped."""
        def ready(names):
            return all(client.call("inspect", ns=ns, key=keys(name))["parts"][0]["shared"] == "ready" for name in names)

        def given_up():
            return client.metrics()["shared_write_dropped"]
        for turn in range(20):
            names, before = [f"{turn}: {i}" for i in range(8)], given_up()
            bytes_of = [region.fill(block) for block in range(8)]
            self.assertEqual(set(region.dump(names, range(8))), {OK})
            self.until(lambda: ready(names) or given_up() > before, "the end of their writing")
            if ready(names):
                return names, bytes_of
        self.fail("the server writes no eight blocks within shared.timeout")

    def test_it_costs_its_own_hits_only(self):
        one, other = self.fleet.hosts
        client, ns, region = self.join(one)
        names, bytes_of = self.written(client, ns, region)
        there, there_ns, there_region = self.join(other)
        self.until(lambda: self.timed(there, there_ns, *names[:4])[0]["hits"] == 4, "what the other host wrote")
        self.until(lambda: set(there_region.load(names[:4], range(4))) == {OK}, "their loads")
        self.fleet.server.halt()
        try:
            waits = [self.timed(there, there_ns, *names[:4], *(f"{turn}/{i}" for i in range(50))) for turn in range(20)]
            self.assertEqual([answer["hits"] for answer, _ in waits], [4] * 20)
            self.assertLess(sorted(seconds for _, seconds in waits)[10], DEADLINE_S, "shared.lookup_timeout is 50 ms")
            began = time.monotonic()
            for _ in range(20):
                self.assertEqual(set(there_region.load(names[:4], range(4))), {OK})
            self.assertLess(time.monotonic() - began, 20 * DEADLINE_S, "none waits for the root")
            self.assertEqual([there_region.bytes(block) for block in range(4)], bytes_of[:4])
            self.assertEqual(set(there_region.load(names[4:], range(4, 8))), {MISS})
            there_region.dump([f"n{i}" for i in range(16)], range(16))
            self.assertEqual(other.stop(), 0)
        finally:
            self.fleet.server.go_on()
        self.until(lambda: client.call("stats")["shared_roots"][0]["health"] == "up", "its return")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
