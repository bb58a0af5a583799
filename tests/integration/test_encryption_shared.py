#!/usr/bin/python3
"""Encryption on the shared tier (docs/security.md): stored bytes, hosts with one key and with two,
damage, rotation, purges."""

import faulthandler
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import unittest

import daemon
from daemon import UCMCTL, UCMD, Daemon
from encryption_case import KILLED
from second_client import DEMO, MISS, OK, Client, Closed, Region, keys
from shared_case import ABSENT, ON_SHARED, Host, SharedCase

SUITE_TIMEOUT_S = 300
BLOCKS, ENCRYPTED_HEADER = 6, 128
BIG = dict(DEMO, layers=[4], layer_bytes=9000)


class Keyed(Host):
    """A host whose tenants have their keys in a file. opens: its worker opens the namespace."""

    def __init__(self, root, identity, blocks, key_file, secrets=None, nvme=False, opens=True, **options):
        self.key_file = key_file
        tenants = f'encryption:\n  tenants: ["* file:{key_file}"]\n' if key_file else "{}\n"
        if secrets:
            tenants += f"  secrets: {secrets}\n  timeout: 3s\n"
        self.daemon = Daemon(nvme=nvme, config=tenants,
                             **{"shared.roots": root, "shared.negative": "50ms", "shared.lookup_timeout": "10s",
                                "shared.timeout": "30s", **options})
        self.client = Client(self.daemon)
        if not opens:
            return
        self.ns = self.client.open(identity)
        self.regions = [Region(self.client, self.ns, identity, blocks, part) for part in range(identity["parts"])]
        self.region = self.regions[0]

    def fill(self, count):
        """A text that a peer would know, in every 64 bytes."""
        for block in range(count):
            mark = (b"the prompt of block %d is known to me " % block).ljust(64, b".")
            size = self.region.size
            self.region.memory[block * size:(block + 1) * size] = (mark * (size // 64 + 1))[:size]
        return [self.region.bytes(block) for block in range(count)]

    def load(self, *names):
        self.look(*names, per_key=True)
        self.region.memory[:] = bytes(len(self.region.memory))
        return self.region.load(names, range(len(names)))


class Encrypted(SharedCase):
    def setUp(self):
        super().setUp()
        os.chmod(self.directory, 0o755)
        self.identity = dict(BIG, model=self.id())
        self.keys = os.path.join(self.directory, "keys")
        self.root = os.path.join(self.directory, "root")
        os.mkdir(self.root)
        self.one = self.key_file("one")

    def key_file(self, name, *lines):
        path = os.path.join(self.directory, name)
        with open(os.open(path + ".new", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write("".join(line + "\n" for line in lines or [secrets.token_hex(32)]))
        os.rename(path + ".new", path)
        return path

    def host(self, key_file=None, identity=None, **options):
        self.hosts.append(Keyed(self.root, identity or self.identity, 16, key_file, **options))
        return self.hosts[-1]

    def killed_host(self, point):
        """One that will be killed there."""
        os.environ["UCMD_KILL_AT"] = point
        daemon.UCMD = KILLED
        try:
            return self.host(self.one)
        finally:
            daemon.UCMD = UCMD
            del os.environ["UCMD_KILL_AT"]

    def ended(self, host, point):
        self.assertEqual(host.daemon.process.wait(60), -9, point)
        self.hosts.remove(host)
        host.daemon.stop()

    def stored_by(self, host, count=BLOCKS):
        kv, before = host.fill(count), len(self.files())
        self.assertEqual(set(host.region.dump(range(count), range(count))), {OK})
        self.until(lambda: len(self.files()) == before + count, "their writing")
        return kv

    def loads(self, host, kv):
        self.assertEqual(host.tiers(*range(len(kv))), [ON_SHARED] * len(kv))
        self.assertEqual(host.load(*range(len(kv))), [OK] * len(kv))
        for block, bytes_ in enumerate(kv):
            self.assertEqual(host.region.bytes(block), bytes_, block)

    def contents(self):
        found = {}
        for path in self.files():
            with open(path, "rb") as file:
                found[path] = file.read()
        return found


class Shared(Encrypted):
    def test_two_hosts_with_one_key_and_nothing_in_the_clear(self):
        kv = self.stored_by(self.host(self.one))
        with open(self.one, encoding="ascii") as file:
            key = file.read().strip()
        for path, data in self.contents().items():
            self.assertEqual(len(data), ENCRYPTED_HEADER + len(kv[0]))
            for mark in (b"the prompt of block", b"is known to me", key.encode(), bytes.fromhex(key)):
                self.assertNotIn(mark, data, path)
        salts = {data[72:96] for data in self.contents().values()}
        self.assertEqual(len(salts), BLOCKS, "a salt each")
        self.loads(self.host(self.one), kv)

    def test_hosts_with_different_keys_do_not_share_and_delete_nothing(self):
        first = self.host(self.one)
        kv, other = self.stored_by(first), self.host(self.key_file("two"))
        before = self.contents()
        self.assertEqual(set(other.load(*range(BLOCKS))) & {OK}, set())
        self.assertGreaterEqual(other.metrics()["encryption_key_missing"], BLOCKS)
        self.assertEqual(other.metrics()["shared_damaged"], 0)
        own = other.fill(BLOCKS)
        self.assertEqual(set(other.region.dump(range(BLOCKS), range(BLOCKS))), {OK})
        self.assertEqual(other.load(*range(BLOCKS)), [OK] * BLOCKS, "out of its own DRAM")
        self.assertEqual(own, kv)
        self.assertEqual(self.contents(), before)
        self.loads(self.host(self.one), kv)
        plain = self.host()
        self.assertEqual(plain.tiers(*range(BLOCKS)), [ABSENT] * BLOCKS, "without keys they are other files")
        self.stored_by(plain)
        self.assertEqual({path: data for path, data in self.contents().items() if path in before}, before)
        self.loads(self.host(self.one), kv)

    def test_a_flipped_bit_is_a_miss(self):
        self.stored_by(self.host(self.one))
        places = [5, 20, 70, 80, 100, ENCRYPTED_HEADER + 9000]
        for path, at in zip(self.files(), places):
            with open(path, "r+b") as file:
                file.seek(at)
                old = file.read(1)
                file.seek(at)
                file.write(bytes([old[0] ^ 4]))
        host = self.host(self.one)
        self.assertEqual(set(host.load(*range(BLOCKS))) & {OK}, set())
        self.until(lambda: not self.files(), "damaged files to go")
        self.assertEqual(host.metrics()["shared_damaged"], BLOCKS)

    def test_a_file_under_another_name_is_a_miss(self):
        self.stored_by(self.host(self.one))
        one, two = self.files()[:2]
        os.unlink(two)
        os.link(one, two)
        host = self.host(self.one)
        self.assertEqual(host.load(*range(BLOCKS)).count(OK), BLOCKS - 1)

    def test_plain_files_that_a_peer_plants_are_not_read(self):
        self.stored_by(self.host())
        host = self.host(self.one)
        self.assertEqual(host.tiers(*range(BLOCKS)), [ABSENT] * BLOCKS)
        self.assertEqual(set(host.load(*range(BLOCKS))) & {OK}, set())

    def test_rotation(self):
        first = self.host(self.one)
        kv = self.stored_by(first, 3)
        with open(self.one, encoding="ascii") as file:
            old = file.read().strip()
        fresh = secrets.token_hex(32)
        self.key_file("one", old, fresh)
        first.client.call("encryption_key.reload")
        self.until(lambda: not first.client.call("encryption_key.list")["keys"][0]["reading"], "the keys' reading")
        self.assertEqual(set(first.region.dump([8, 9], [0, 1])), {OK})
        self.until(lambda: len(self.files()) == 5, "their writing")
        self.assertEqual(len({data[64:72] for data in self.contents().values()}), 2)
        self.counted(first, {0: 3, 1: 2})
        other = self.host(self.one)
        self.loads(other, kv)
        self.assertEqual(other.load(8, 9), [OK, OK])
        late = self.host(self.key_file("late", fresh))
        self.assertEqual(late.load(8, 9), [OK, OK])
        self.assertEqual(set(late.load(0, 1, 2)) & {OK}, set())
        self.assertEqual(len(self.files()), 5)
        first.client.call("evict", ns=first.ns, keys=keys(0, 1, 2), tier=0)
        self.until(lambda: len(self.files()) == 2, "an eviction by name")
        self.counted(first, {1: 2})

    def counted(self, host, files):
        """Checks what `ucmctl encryption-key files` says of each of the host's keys, in their
        order. An old key may go when it is in no list."""
        ids = host.client.call("encryption_key.list")["keys"][0]["ids"]
        listed = json.loads(self.key_files("--json").stdout)
        self.assertEqual({ids.index(key["key"]): key["files"] for key in listed["keys"]}, files)
        self.assertEqual([listed[what] for what in ("damaged", "unread")] + [listed["plaintext"]["files"]], [0, 0, 0])

    def key_files(self, *more, directory=None):
        return subprocess.run([UCMCTL, "encryption-key", "files", directory or self.root, *more], capture_output=True, text=True, timeout=60)

    def test_what_else_lies_on_a_root_is_counted_apart(self):
        """An operator counts files that a key has encrypted. There are raw and damaged files, and a
        directory that is no root."""
        host, plain = self.host(self.one), self.host()
        self.stored_by(host, 3)
        self.stored_by(plain, 2)
        encrypted = next(path for path, data in self.contents().items() if data[4] == 2)
        with open(encrypted, "r+b") as file:
            file.truncate(100)
        size = os.path.getsize(next(path for path, data in self.contents().items() if data[4] == 1))
        done = self.key_files()
        self.assertEqual(done.returncode, 0, done.stderr)
        (key,) = host.client.call("encryption_key.list")["keys"][0]["ids"]
        self.assertRegex(done.stdout, rf"(?m)^{key} +2 +[0-9.]+ KiB$")
        self.assertRegex(done.stdout, rf"(?m)^not encrypted +2 +{2 * size / 1024:.1f} KiB$")
        self.assertIn("1 files are damaged, or no block files", done.stdout)
        os.unlink(encrypted)
        blocks = os.path.join(self.root, "blocks")
        bucket = next(name for name in sorted(os.listdir(blocks)) if os.listdir(os.path.join(blocks, name)))
        free = [name for name in ("%02x" % i for i in range(256)) if not os.path.lexists(os.path.join(blocks, name))][:2]
        os.mkfifo(os.path.join(blocks, free[0]))
        os.symlink(bucket, os.path.join(blocks, free[1]))
        done = self.key_files()
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertRegex(done.stdout, rf"(?m)^{key} +2 ")
        for name in free:
            self.assertIn(f"blocks/{name}: Not a directory; passed over", done.stderr)
        done = self.key_files("--json")
        self.assertEqual((done.returncode, json.loads(done.stdout)["directories_passed_over"]), (5, 2))
        for name in free:
            os.unlink(os.path.join(blocks, name))
        done = self.key_files(directory=self.directory)
        self.assertEqual(done.returncode, 1)
        self.assertIn("name the directory of a root", done.stderr)

    @unittest.skipUnless(os.path.exists(KILLED), "ucmd-kill is not built")
    def test_a_kill_at_every_step_of_a_rotation(self):
        """A file is whole under its name, or there is none. Remains of it are encrypted, too."""
        kv = self.stored_by(self.host(self.one))
        with open(self.one, encoding="ascii") as file:
            lines = [file.read().strip()]
        points = ("keys-read:2", "keys-taken:2", "shared-write-asked:1", "shared-write-answered:1")
        for name, point in enumerate(points, 10):
            host = self.killed_host(point)
            lines.append(secrets.token_hex(32))
            self.key_file("one", *lines)
            host.fill(1)
            with self.assertRaises(Closed):
                host.client.call("encryption_key.reload")
                self.until(lambda: not host.client.call("encryption_key.list")["keys"][0]["reading"], "the keys' reading")  # noqa: B023
                host.region.dump([name], [0])
                self.until(lambda: host.client.call("stats") and False, "its end")  # noqa: B023
            self.ended(host, point)
            for at, _, files in os.walk(self.root):
                for path in files:
                    with open(os.path.join(at, path), "rb") as file:
                        self.assertNotIn(b"is known to me", file.read(), point)
            other = self.host(self.one)
            self.loads(other, kv)
            self.assertEqual(other.load(name), [OK if point.startswith("shared-write-answered") else MISS], point)
            self.assertEqual(other.metrics()["shared_damaged"], 0)

    def test_a_purge_removes_encrypted_and_plain_files(self):
        self.stored_by(self.host())
        host = self.host(self.one)
        self.stored_by(host)
        self.assertEqual(len(self.files()), 2 * BLOCKS)
        host.client.call("namespace.purge", ns=host.ns)
        self.until(lambda: not self.files(), "files to go")
        host.fill(1)
        self.assertEqual(host.region.dump([0], [0]), [OK])
        self.until(lambda: len(self.files()) == 1, "its writing")
        host.client.call("evict", ns=host.ns, keys=keys(0), tier=0)
        self.until(lambda: not self.files(), "an eviction by name")

    def test_many_at_once(self):
        """More parts than may wait in encrypted form in memory, in the queues of several roots."""
        identity = dict(DEMO, layers=[8], layer_bytes=131072, model=self.id() + "big")
        patient = {"arena.size": "256MiB", "shared.timeout": "600s"}
        host = self.host(self.one, identity=identity, **patient)
        for first in range(0, 128, 16):
            host.fill(16)
            self.assertEqual(set(host.region.dump(range(first, first + 16), range(16))), {OK})
        written = 0
        while written < 128:  # however long it takes, as long as it goes on
            self.until(lambda: len(self.files()) > written, f"more than {written} files of 128")  # noqa: B023
            written = len(self.files())
        other = self.host(self.one, identity=identity, **patient)
        for first in range(0, 128, 16):
            self.until(lambda: other.load(*range(first, first + 16)) == [OK] * 16, "their loads")  # noqa: B023
        self.assertTrue(other.region.bytes(3).startswith(b"the prompt of block 3 "))
        self.assertEqual(other.metrics()["shared_damaged"], 0)


class Secrets(Encrypted):
    """Two hosts with a directory of secrets next to the root. Nobody keeps snapshots of that
    directory."""

    def setUp(self):
        super().setUp()
        self.secrets = os.path.join(self.directory, "secrets")
        os.mkdir(self.secrets)

    def host(self, key_file=None, identity=None, **options):
        if key_file:
            options.setdefault("secrets", self.secrets)
        return super().host(key_file, identity, **options)

    def loads(self, host, kv):
        self.until(lambda: host.tiers(*range(len(kv))) == [ON_SHARED] * len(kv), "the secret")
        super().loads(host, kv)

    def secret(self):
        (name,) = [name for name in os.listdir(self.secrets) if not name.startswith(".")]
        with open(os.path.join(self.secrets, name), "rb") as file:
            return file.read()[40:56]

    def test_a_purge_of_a_namespace_that_nobody_uses(self):
        """The daemon has not read its secret, of which its files have their names."""
        state = os.path.join(self.directory, "state")
        os.mkdir(state)
        host = self.host(self.one, nvme=True, directory=state)
        self.stored_by(host)
        old = self.secret()
        self.assertEqual(self.hosts.pop().daemon.stop(), 0)
        again = self.host(self.one, nvme=True, directory=state, opens=False)
        (listed,) = again.client.call("namespace.list")["namespaces"]
        again.client.call("namespace.purge", ns=listed["ns"])
        self.assertEqual(self.files(), [])
        self.assertNotEqual(self.secret(), old)

    def test_a_snapshot_of_a_purged_namespace_is_worth_nothing(self):
        """Purged blocks don't come back to another host, which still had the old secret. Nor do
        they to a new host with the tenant's key and all old files."""
        first, second = self.host(self.one), self.host(self.one)
        kv = self.stored_by(first)
        self.loads(second, kv)
        snapshot, old = self.contents(), self.secret()
        first.client.call("namespace.purge", ns=first.ns)
        self.until(lambda: not self.files(), "files to go")
        self.assertNotEqual(self.secret(), old)
        for path, data in snapshot.items():
            with open(path, "wb") as file:
                file.write(data)

        def given_up():
            second.client.call("evict", ns=second.ns, keys=keys(*range(BLOCKS)), tier=1)
            return OK not in second.load(*range(BLOCKS))

        self.until(given_up, "the second host to give up the old secret")
        for host in (first, second, self.host(self.one)):
            self.assertEqual(host.load(*range(BLOCKS)), [MISS] * BLOCKS)
        first.client.call("shared.gc")  # as it does by itself, some seconds after its start
        self.until(lambda: first.metrics()["shared_gc_passes"], "the garbage collection")
        self.assertEqual(self.contents(), snapshot, "they are of names that nobody asks for")
        fresh = self.stored_by(first)
        self.loads(second, fresh)
        self.assertEqual({path: data for path, data in self.contents().items() if path in snapshot}, snapshot)

    def test_hosts_that_make_a_secret_at_once_agree(self):
        one, two = self.host(self.one), self.host(self.one)
        for round_ in range(8):
            identity = dict(BIG, model=f"{self.id()} {round_}")
            asked = [host.client.begin("namespace.open", **identity) for host in (one, two)]
            for host, msgid in zip((one, two), asked):
                host.ns = host.client.wait(msgid)["ns"]
                host.region = Region(host.client, host.ns, identity, 16)
            kv = self.stored_by(one, 2)
            self.loads(two, kv)
        self.assertEqual(len([name for name in os.listdir(self.secrets) if not name.startswith(".")]), 9)
        self.assertEqual([name for name in os.listdir(self.secrets) if name.startswith(".")], [])

    def test_a_directory_of_secrets_that_is_away_shows_in_health(self):
        """It shows before anybody needs a secret, until the directory is there."""
        away = self.secrets + ".away"
        os.rename(self.secrets, away)
        host = self.host(self.one)

        def health():
            return host.client.call("health")
        self.until(lambda: f"encryption.secrets {self.secrets}: No such file or directory" in str(health()), "health to say it")
        self.assertEqual(health()["status"], "degraded")
        os.rename(away, self.secrets)
        os.chmod(self.secrets, 0o777)
        self.until(lambda: "users other than its owner and group may write to it" in str(health()), "health to say the mode")
        os.chmod(self.secrets, 0o700)
        self.until(lambda: health()["status"] == "ok", "health to be well")
        self.loads(self.host(self.one), self.stored_by(host))

    def test_a_directory_of_secrets_that_hangs(self):
        """While it hangs, it costs encrypted blocks on shared roots, and nothing else."""
        kv = self.stored_by(self.host(self.one))
        (name,) = os.listdir(self.secrets)
        held = os.open(os.path.join(self.secrets, name), os.O_RDWR)
        before = signal.signal(signal.SIGIO, signal.SIG_IGN)
        self.addCleanup(signal.signal, signal.SIGIO, before)
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        host = self.host(self.one)
        self.assertEqual(host.tiers(*range(BLOCKS)), [ABSENT] * BLOCKS)
        host.fill(1)
        self.assertEqual(host.region.dump([50], [0]), [OK])
        self.assertEqual(host.region.load([50], [0]), [OK])
        self.until(lambda: "secret-not-read" in host.daemon.log(), "its deadline")
        os.close(held)
        self.loads(host, kv)

    @unittest.skipUnless(os.path.exists(KILLED), "ucmd-kill is not built")
    def test_a_kill_at_every_step_of_a_purge(self):
        """Either the old secret is there with all files, or a new one with none."""
        for point in ("secret-written:1", "secret-replaced:1", "secret-wiped:1"):
            first = self.host(self.one)
            kv, old = self.stored_by(first), self.secret()
            host = self.killed_host(point)
            self.until(lambda: host.tiers(0) == [ON_SHARED], "the secret")  # noqa: B023
            with self.assertRaises(Closed):
                host.client.call("namespace.purge", ns=host.ns)
                host.client.call("stats")
            self.ended(host, point)
            self.assertEqual(self.secret() == old, point.startswith("secret-written"), point)
            other = self.host(self.one)
            if self.secret() == old and len(self.files()) == BLOCKS:
                self.loads(other, kv)
            elif self.secret() != old:
                other.fill(1)
                self.assertEqual(other.region.dump([50], [0]), [OK])  # after its secret
                self.assertNotIn(OK, other.load(*range(BLOCKS)))
            other.client.call("namespace.purge", ns=other.ns)
            for writer in (first, other):
                writer.daemon.stop()
            shutil.rmtree(self.root)
            os.mkdir(self.root)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main(verbosity=2)
