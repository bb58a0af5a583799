"""What the tests of encryption share: a daemon whose tenants have their keys in a file of the
test's directory."""

import os
import secrets

from daemon import UCMD, Daemon
from second_client import DEMO, EXISTS, OK, Case, Client, OwnDaemons, Region, keys

KILLED = os.path.join(os.path.dirname(UCMD), "ucmd-kill")
LAYERS, LAYER, BLOCKS, PAGE = 6, 9000, 8, 4096
LAYERED = dict(DEMO, layers=[LAYERS], layer_bytes=LAYER)
STRIDE = PAGE + -(-LAYERS * LAYER // PAGE) * PAGE
MISSING, IN_DRAM, ON_NVME = 0, 1, 2
FIRST_SEGMENT = 1 << 20


def config(*tenants, **more):
    text = "encryption:\n  tenants: [" + ", ".join(f'"{tenant}"' for tenant in tenants) + "]\n"
    return text + "".join(f"  {key}: {value}\n" for key, value in more.items())


NAMES = {keys(name): name for name in range(256)}


def name_at(data, at):
    return NAMES[data[at + 64:at + 80]]


class Encrypted(OwnDaemons, Case):
    """A daemon whose tenants have their keys in a file of the test's directory."""

    identity = LAYERED

    def setUp(self):
        super().setUp()
        os.chmod(self.directory, 0o755)
        self.daemon, self.marks = None, []
        self.addCleanup(lambda: self.daemon and self.daemon.stop())
        self.key_file = os.path.join(self.directory, "keys")
        self.keys = [secrets.token_hex(32)]
        self.write_keys()

    def write_keys(self, *lines):
        fresh = self.key_file + ".new"
        with open(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write("".join(line + "\n" for line in lines or self.keys))
        os.rename(fresh, self.key_file)

    def start(self, tenants=None, more=None, identity=None, **options):
        self.identity = identity or self.identity
        tenants = [f"* file:{self.key_file}"] if tenants is None else tenants
        self.daemon = Daemon(directory=self.directory, config=config(*tenants, **(more or {})),
                             **{"arena.size": "16MiB", "nvme.size": "20MiB", "nvme.segment": "1MiB", **options})
        self.client = Client(self.daemon)
        self.ns = self.client.open(self.identity)
        self.region = Region(self.client, self.ns, self.identity, BLOCKS)

    def restart(self, *args, **options):
        self.assertEqual(self.daemon.stop(), 0)
        self.start(*args, **options)

    def store(self, names=range(BLOCKS)):
        """Dumps blocks with these names. Returns what they hold."""
        kv = {name: self.fill(place, name) for place, name in enumerate(names)}
        self.assertLessEqual(set(self.region.dump(kv, range(len(kv)))), {OK, EXISTS})
        self.settled(self.client, self.ns)
        return kv

    def fill(self, place, name):
        """A text that a thief would know, in every 64 bytes of a block."""
        mark = b"the prompt of block %d is known to me " % name
        size = self.region.size
        self.region.memory[place * size:(place + 1) * size] = (mark.ljust(64, b".") * (size // 64 + 1))[:size]
        self.marks.append(mark)
        return self.region.bytes(place)

    def load(self, names):
        self.region.memory[:] = bytes(len(self.region.memory))
        return self.region.load(names, range(len(names)))

    def loads(self, kv):
        self.assertEqual(self.load(list(kv)), [OK] * len(kv))
        for place, bytes_ in enumerate(kv.values()):
            self.assertEqual(self.region.bytes(place), bytes_, place)

    def forget_dram(self):
        self.client.call("evict", ns=self.ns, keys=keys(*range(256)), tier=1)

    def metrics(self):
        return self.client.metrics()

    def disk(self):
        with open(os.path.join(self.daemon.store, "ucmd.cache"), "rb") as file:
            return file.read()

    def secrets(self):
        """Each page's fingerprint and secret in ucmd.namespaces."""
        with open(os.path.join(self.daemon.store, "ucmd.namespaces"), "rb") as file:
            data = file.read()
        return [(data[at + 32:at + 64], data[at + 4072:at + 4088]) for at in range(0, len(data), PAGE)]

    def reload(self):
        self.client.call("encryption_key.reload")
        self.until(lambda: not any(one["reading"] for one in self.client.call("encryption_key.list")["keys"]), "the keys' reading")

    def records(self):
        """Where the headers of records lie, by the block's name."""
        data = self.disk()
        return {name_at(data, at): at for at in range(0, len(data), PAGE) if data[at:at + 4] in (b"UCME", b"UCMS")}

    def change(self, at, change):
        with open(os.path.join(self.daemon.store, "ucmd.cache"), "r+b") as file:
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(change(old))

    def flip(self, at):
        self.change(at, lambda old: bytes([old[0] ^ 16]))
