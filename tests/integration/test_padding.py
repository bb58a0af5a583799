#!/usr/bin/python3
"""After a part's bytes, disks and shared roots have nothing that the slot held before, when it was
another tenant's."""

import faulthandler
import os
import shutil
import tempfile
import unittest

from second_client import DEMO, OK, OTHER_UID, Case, Client, Daemon, OwnDaemons, Region, keys

SUITE_TIMEOUT_S = 120
PAGE, BLOCKS = 4096, 48
LAYERS, LAYER = 3, 4099  # a part ends 9 bytes after a page
PART = LAYERS * LAYER
FULL = 5461  # and this one a byte before the same page's end
MARK = b"the other one's!"


class Padding(OwnDaemons, Case):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="padding.")
        self.root = os.path.join(self.directory, "root")
        os.mkdir(self.root)
        self.addCleanup(shutil.rmtree, self.directory, True)
        self.daemon = None
        self.addCleanup(lambda: self.daemon and self.daemon.stop())

    def start(self, nvme, **options):
        self.daemon = Daemon(nvme=nvme, directory=self.directory, **{"arena.size": "1MiB", "arena.slab": "1MiB", "nvme.size": "32MiB", **options})
        return self.open(None)

    def open(self, uid):
        identity = dict(DEMO, model=f"{self.id()} {uid}", layers=[LAYERS], layer_bytes=LAYER if uid is None else FULL)
        client = Client(self.daemon, uid=uid)
        self.daemon.clients.append(client)
        ns = client.open(identity)
        return client, ns, Region(client, ns, identity, BLOCKS)

    def soil(self):
        """Fills every slot of the arena to its end with another tenant's bytes, and leaves no block
        there."""
        client, ns, region = self.open(OTHER_UID)
        self.assertEqual(-(-region.size // PAGE), -(-PART // PAGE), "the same slots")
        region.memory[:] = MARK * (len(region.memory) // len(MARK)) + MARK[:len(region.memory) % len(MARK)]
        self.assertEqual(set(region.dump(range(BLOCKS), range(BLOCKS))), {OK})
        self.until(lambda: client.call("evict", ns=ns, keys=keys(*range(BLOCKS))).get("busy", 0) == 0, "an eviction")
        client.close()

    def stored(self, region):
        kv = [region.fill(i) for i in range(BLOCKS)]
        self.assertEqual(set(region.dump(range(BLOCKS), range(BLOCKS))), {OK})
        return kv

    def padded(self, kv):
        """Each part is on the disk, and nothing after it."""
        with open(os.path.join(self.daemon.store, "ucmd.cache"), "rb") as file:
            data = file.read()
        for part in kv:
            at, found = data.find(part), 0
            while at >= 0:
                found, behind = found + 1, data[at + PART:at + -(-PART // PAGE) * PAGE]
                self.assertEqual(behind, bytes(len(behind)))
                at = data.find(part, at + 1)
            self.assertGreater(found, 0, "it was not written")

    def files(self):
        return [os.path.join(at, name) for at, _, names in os.walk(self.root) for name in names
                if os.path.basename(os.path.dirname(at)) == "blocks" and name.strip("0-") and not name.startswith(".")]

    def ends(self, kv):
        """A file ends with its part."""
        self.until(lambda: len(self.files()) == BLOCKS, "their writing")
        held = []
        for path in self.files():
            with open(path, "rb") as file:
                data = file.read()
            self.assertNotIn(MARK, data)
            held.append(data[-PART:])
            self.assertLess(len(data) - PART, PAGE, "the header")
        self.assertEqual(sorted(held), sorted(kv))

    def test_records(self):
        client, ns, region = self.start(True)
        self.soil()
        kv = self.stored(region)
        self.settled(client, ns)
        self.padded(kv)

    def test_records_of_what_was_read_from_a_root(self):
        client, ns, region = self.start(False, **{"shared.roots": self.root})
        self.soil()
        kv = self.stored(region)
        self.ends(kv)
        self.daemon.stop()
        client, ns, region = self.start(True, **{"shared.roots": self.root})
        self.soil()
        self.until(lambda: client.call("lookup", ns=ns, keys=keys(*range(BLOCKS)), shared=True)["hits"] == BLOCKS, "a lookup of all")
        self.assertEqual(set(region.load(range(BLOCKS), range(BLOCKS))), {OK})
        self.settled(client, ns)
        self.padded(kv)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main(verbosity=2)
