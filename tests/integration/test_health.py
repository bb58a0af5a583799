#!/usr/bin/python3
"""What `health` says of blocks that will be lost at the daemon's end, or are not served: path,
error and what to do. When the cause is mended, it says nothing."""

import faulthandler
import os
import shutil
import tempfile
import unittest

from second_client import DEMO, OK, Case, Client, Daemon, OwnDaemons, Region, keys
from test_trace import injected

SUITE_TIMEOUT_S = 240
ON, OFF = 1, 2
BLOCKS = 16


class Health(OwnDaemons, Case):
    def start(self, **options):
        self.daemon = Daemon(directory=self.directory, **options)
        self.addCleanup(self.daemon.stop)
        client = Client(self.daemon)
        return client

    def region(self, client, model="x"):
        identity = dict(DEMO, model=model)
        ns = client.open(identity)
        return ns, Region(client, ns, identity, BLOCKS)

    def stored(self, client, names, model="x", **more):
        ns, region = self.region(client, model)
        for block in range(len(names)):
            region.fill(block)
        status = region.dump(names, range(len(names)), **more)
        return ns, status

    def health(self, client):
        answer = client.call("health")
        return answer["status"], " | ".join(answer["reasons"])

    def comes(self, client, status, *words):
        """Returns the reasons."""
        said = None

        def says():
            nonlocal said
            now, said = self.health(client)
            return now == status and all(word in said for word in words)
        self.until(says, f"{status} {words}")
        return said

    # ---- namespaces' records ----

    def records_refused(self):
        """A directory stands in the file's place."""
        client = self.start()
        self.path = os.path.join(self.daemon.store, "ucmd.namespaces")
        os.mkdir(self.path)
        ns, status = self.stored(client, range(8))
        self.assertEqual(status, [OK] * 8)
        self.comes(client, "degraded", self.path, "Is a directory", "1 namespaces", "lost when the daemon ends")
        self.until(lambda: "65536 bytes" in self.health(client)[1], "the parts' writing")
        tier = client.call("stats")["tiers"][0]
        self.assertTrue(tier["degraded"])
        self.assertIn(self.path, tier["reason"])
        return client, ns

    def again(self):
        client = self.start()
        ns, _ = self.region(client)
        return client.call("lookup", ns=ns, keys=keys(*range(8)), per_key=True)["hits"]

    def test_records_are_written_when_they_can_be(self):
        """Meanwhile no client opens or dumps anything. Then the daemon is killed."""
        client, _ = self.records_refused()
        os.rmdir(self.path)
        self.comes(client, "ok")
        self.daemon.kill()
        self.assertEqual(self.again(), 8)

    def test_an_orderly_stop_tries_once_more(self):
        self.records_refused()
        os.rmdir(self.path)
        self.assertEqual(self.daemon.stop(), 0)
        self.assertEqual(self.again(), 8)

    def test_an_orderly_stop_says_what_it_loses(self):
        self.records_refused()
        self.assertEqual(self.daemon.stop(), 1)
        self.assertIn("namespaces-not-recorded namespaces=1 bytes=65536", self.daemon.log())

    def test_the_other_namespaces_follow(self):
        client, _ = self.records_refused()
        for i in range(5):
            self.stored(client, range(4), f"other {i}")
        self.until(lambda: f"6 namespaces ({65536 + 5 * 32768} bytes)" in self.health(client)[1], "the parts' writing")
        os.rmdir(self.path)
        self.comes(client, "ok")
        self.daemon.kill()
        client = self.start()
        for i in range(5):
            ns, _ = self.region(client, f"other {i}")
            self.assertEqual(client.hits(ns, *range(4)), 4)

    # ---- files that are removed ----

    def test_the_cache_file_is_removed(self):
        client = self.start()
        self.stored(client, range(8))
        path = os.path.join(self.daemon.store, "ucmd.cache")
        os.unlink(path)
        self.comes(client, "degraded", path, "removed or replaced while in use: restart ucmd")

    def test_the_file_of_namespaces_is_removed(self):
        """The daemon has the file's content in memory, so it writes the file again."""
        client = self.start()
        ns, _ = self.stored(client, range(8))
        self.settled(client, ns)
        path = os.path.join(self.daemon.store, "ucmd.namespaces")
        os.unlink(path)
        self.until(lambda: os.path.exists(path), "the file")
        self.daemon.kill()
        self.assertEqual(self.again(), 8)

    @unittest.skipUnless(os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK), "needs a tmpfs at /dev/shm")
    def test_the_kept_arena_is_removed(self):
        kept = tempfile.mkdtemp(dir="/dev/shm")
        self.addCleanup(shutil.rmtree, kept, True)
        client = self.start(**{"arena.persist_dir": kept})
        self.comes(client, "ok")
        os.unlink(os.path.join(kept, "ucmd.arena"))
        self.comes(client, "degraded", kept, "lost when the daemon ends; restart ucmd")

    def test_the_socket_is_removed(self):
        client = self.start()
        os.unlink(self.daemon.socket)
        self.comes(client, "degraded", self.daemon.socket, "can't connect; restart ucmd")

    # ---- what is not served ----

    def ctl(self, *words):
        done = self.daemon.ctl(*words)
        return done.returncode, done.stdout

    def test_a_bypass_for_all(self):
        client = self.start()
        ns, _ = self.stored(client, range(2))
        for word, effect in (("load", "loads find nothing"), ("store", "dumps store nothing")):
            self.assertEqual(self.ctl("bypass", word, "on")[0], 0)
            self.comes(client, "degraded", effect, f"'ucmctl bypass {word} off' ends it")
            self.assertEqual(self.ctl("health")[0], 4)
            self.assertEqual(self.ctl("bypass", word, "off")[0], 0)
            self.assertEqual(self.health(client), ("ok", ""))
        client.call("bypass", ns=ns, load=ON)
        status, said = self.health(client)
        self.assertEqual(status, "ok", "that is one's own affair")
        self.assertIn("1 tenants or namespaces", said)
        client.call("bypass", ns=ns, load=OFF)
        self.assertEqual(self.health(client), ("ok", ""))

    # ---- degraded and recovering ----

    def test_it_recovers_alongside_what_else_is_wrong(self):
        client = self.start()
        ns, _ = self.stored(client, range(8))
        self.settled(client, ns)
        self.daemon.kill()
        fault, before = injected(self.addCleanup)
        fault.read_delay_ms = 2000
        client = self.start(recovered=False, before=before,
                            **{"nvme.io": "threads", "shared.roots": os.path.join(self.directory, "not-there")})
        self.until(lambda: self.health(client)[0] == "degraded", "the root's health check")
        answer = client.call("health")
        self.assertTrue(answer["recovering"])
        self.assertIn("recovering", " ".join(answer["reasons"]))
        stats = client.call("stats")
        self.assertEqual((stats["health"], stats["recovering"], stats["tiers"][0]["recovering"]), ("degraded", True, True))
        self.assertEqual(self.ctl("health")[1].splitlines()[0], "degraded, recovering")
        self.assertIn("degraded, recovering", self.ctl("status")[1])
        fault.read_delay_ms = 0
        self.until(lambda: "recovering" not in client.call("health"), "its end")
        self.assertEqual(self.ctl("health")[1].splitlines()[0], "degraded")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
