"""Hosts of a test over directories that they share: daemons on this machine, each with a client, a namespace and regions."""

import os
import shutil
import tempfile

from second_client import DEMO, MISS, OK, Case, Client, Daemon, OwnDaemons, Region, keys, until

ABSENT, IN_DRAM, ON_NVME, ON_SHARED = 0, 1, 2, 3
HEADER = 64
SMALL = {"arena.size": "8MiB", "arena.slab": "1MiB"}


class Host:
    """One daemon, a connection to it, a namespace and a region for each of its parts."""

    def __init__(self, directory, identity, blocks, **options):
        self.daemon = Daemon(nvme=False, **{"shared.roots": directory, "shared.negative": "50ms",
                                            "shared.lookup_timeout": "10s", "shared.timeout": "30s", **options})
        self.client = Client(self.daemon)
        self.ns = self.client.open(identity)
        self.regions = [Region(self.client, self.ns, identity, blocks, part) for part in range(identity["parts"])]

    def look(self, *names, **more):
        return self.client.call("lookup", ns=self.ns, keys=keys(*names), shared=True, **more)

    def tiers(self, *names):
        return list(self.look(*names, per_key=True).get("status", b""))

    def parts(self, name):
        return self.client.call("inspect", ns=self.ns, key=keys(name))["parts"]

    def shared(self, name):
        return self.parts(name)[0]["shared"]

    def metrics(self):
        return self.client.metrics()

    def root(self, number=0):
        return self.client.call("stats")["shared_roots"][number]

    def dumped(self, names):
        """What these blocks of the first region hold."""
        right = {name: self.regions[0].fill(block) for block, name in enumerate(names)}
        status = self.regions[0].dump(names, range(len(right)))
        assert set(status) == {OK}, status
        return right

    def written(self, names):
        right = self.dumped(names)
        until(lambda: all(self.shared(name) == "ready" for name in right), "their writing")
        return right

    def loaded(self, right):
        """How many of these came. Checks the bytes of those."""
        region, n = self.regions[0], 0
        self.look(*right, per_key=True)
        for name, data in right.items():
            region.fill(1)
            status = region.load([name], [1])[0]
            assert status in (OK, MISS), status
            assert status == MISS or region.bytes(1) == data, f"wrong bytes of {name}"
            n += status == OK
        return n


class SharedCase(OwnDaemons, Case):
    """One directory, and hosts over it that end in order."""

    def setUp(self):
        self.directory, self.identity, self.hosts = tempfile.mkdtemp(prefix="shared."), dict(DEMO, model=self.id()), []

    def tearDown(self):
        statuses = [host.daemon.stop() for host in self.hosts]
        shutil.rmtree(self.directory, ignore_errors=True)
        self.assertEqual(statuses, [0] * len(statuses))

    def host(self, blocks=16, **options):
        self.hosts.append(Host(self.directory, self.identity, blocks, **options))
        return self.hosts[-1]

    def files(self):
        """Parts. The marker of garbage collection, whose name is all zeros, comes some seconds after a host's start."""
        return sorted(os.path.join(at, name) for at, _, names in os.walk(self.directory) for name in names
                      if not name.startswith(".") and name.strip("0-") and os.path.basename(os.path.dirname(at)) == "blocks")

    def stored(self, host, count):
        """Blocks 0 to count of every region, dumped and written to the shared tier; what they hold, by part."""
        bytes_of = [[region.fill(block) for block in range(count)] for region in host.regions]
        for region in host.regions:
            self.assertEqual(set(region.dump(range(count), range(count))), {OK})
        self.until(lambda: len(self.files()) == count * len(host.regions), "their writing")
        self.until(lambda: all(part["shared"] == "ready" for name in range(count) for part in host.parts(name)))
        return bytes_of

    def loaded(self, host, count, bytes_of):
        for region, blocks in zip(host.regions, bytes_of):
            region.memory[:] = bytes(len(region.memory))
            self.assertEqual(set(region.load(range(count), range(count))), {OK})
            self.assertEqual([region.bytes(block) for block in range(count)], blocks)
