#!/usr/bin/python3
"""What tenants get, against a real daemon: settings of the configuration and of `ucmctl tenant`,
kept over restarts and kills. A noisy tenant stores far more than there is room for, alongside a
quiet one with a guarantee.
"""

import glob
import json
import os
import re
import shutil
import tempfile
import time
import unittest

from second_client import BIG, DENIED, INVALID, NOT_FOUND, OK, Case, Daemon, OwnDaemons, Region, keys

QUIET, NOISY = 1001, 1002
DRAM = 1  # of a lookup's status
MIB = 1 << 20
BLOCK = 2 * BIG["layer_bytes"]


class Own(OwnDaemons, Case):
    """A daemon, or several, over a directory of each test's own."""
    options = {"arena.size": "16MiB", "nvme.size": "64MiB", "tenants": f"quiet uid:{QUIET},noisy uid:{NOISY}"}

    def start(self, **more):
        self.daemon = Daemon(directory=self.directory, **{**self.options, **more})
        self.addCleanup(self.daemon.stop)
        client = self.client()
        self.until(lambda: self.grown(client), "all of DRAM")

    def grown(self, client):
        """Cached blocks may leave while the arena is still growing."""
        metrics = client.metrics()
        return metrics["arena_bytes_total"] == metrics["arena_bytes_configured"]

    def ctl(self, *words):
        return self.daemon.ctl(*words)

    def tenants(self):
        return {each["tenant"]: each for each in json.loads(self.ctl("tenant", "list", "--json").stdout)["tenants"]}

    def worker(self, uid, blocks=8):
        client = self.client(uid=uid)
        ns = client.open(BIG)
        return client, ns, Region(client, ns, BIG, blocks)

    def store(self, region, names):
        """In requests of four blocks, each a prefix of its own."""
        for at in range(0, len(names), 4):
            some = names[at:at + 4]
            self.assertEqual(set(region.dump(some, range(len(some)))), {OK})


class Settings(Own):
    def test_what_is_set_is_kept_until_it_is_reset(self):
        self.start(tenant_settings="quiet weight=200 namespaces=3")
        self.assertEqual(self.ctl("tenant", "set", "quiet", "weight=300", "dram.min=4MiB").stdout, "tenant quiet changed\n")
        self.assertEqual(self.ctl("tenant", "set", "*", "dram.max=12MiB").returncode, 0)
        self.assertEqual(self.ctl("tenant", "set", "uid:7", "weight=5").returncode, 0)
        for _ in range(2):
            quiet = self.tenants()["quiet"]
            self.assertEqual([quiet["given_" + key] for key in ("weight", "namespaces", "dram_min", "dram_max")],
                             [300, 3, 4 * MIB, 12 * MIB])
            self.assertEqual(quiet["kept"], "weight=300 dram.min=4MiB")
            self.assertEqual(self.tenants()["uid:7"]["given_dram_max"], 12 * MIB)
            self.daemon.kill()
            self.start(tenant_settings="quiet weight=200 namespaces=3")
        self.assertEqual(self.ctl("tenant", "reset", "quiet").stdout, "tenant quiet has what the configuration gives\n")
        self.assertEqual(self.ctl("tenant", "reset", "*").returncode, 0)
        self.assertEqual(self.ctl("tenant", "reset", "uid:7").returncode, 0)
        for _ in range(2):
            self.assertEqual([self.tenants()["quiet"]["given_" + key] for key in ("weight", "dram_min", "dram_max")], [200, 0, 0])
            self.assertNotIn("uid:7", self.tenants())
            self.daemon.kill()
            self.start(tenant_settings="quiet weight=200 namespaces=3")
        self.assertRegex(self.daemon.log(), r'audit tenant.set uid=0 .* of_tenant=quiet settings="weight=300 dram.min=4MiB"')
        self.assertRegex(self.daemon.log(), r'audit tenant.reset uid=0 .* of_tenant=\* settings=""')

    def test_what_can_not_be_is_refused_and_changes_nothing(self):
        self.start()
        client = self.client()
        for code, name, settings, says in (
                (NOT_FOUND, "quite", "weight=2", 'there is no tenant "quite"'), (NOT_FOUND, "gid:7", "weight=2", "there is no tenant"),
                (INVALID, "quiet", "wieght=2", 'no setting "wieght"; there are weight, '), (INVALID, "quiet", "weight", "write KEY=VALUE"),
                (INVALID, "quiet", "weight=0", "from 1 to 10000"), (INVALID, "*", "dram.min=1MiB", "give it by name"),
                (INVALID, "quiet", "dram.min=17MiB", "in sum, and arena.size is 16MiB"),
                (INVALID, "quiet", "dram.min=2MiB dram.max=1MiB", "is more than dram.max")):
            self.assertIn(says, str(self.refused(code, client.call, "tenant.set", tenant=name, settings=settings)))
        client.call("tenant.set", tenant="quiet", settings="dram.min=10MiB")
        self.assertIn("17MiB in sum", str(self.refused(INVALID, client.call, "tenant.set", tenant="noisy", settings="dram.min=7MiB")))
        self.assertIn("(10MiB) is more than dram.max (9MiB)",
                      str(self.refused(INVALID, client.call, "tenant.set", tenant="*", settings="dram.max=9MiB")))
        self.assertEqual(self.tenants()["quiet"]["kept"], "dram.min=10MiB")
        for words in (("set", "quiet"), ("reset", "quiet", "weight=2"), ("give", "quiet")):
            self.assertEqual(self.ctl("tenant", *words).returncode, 2)

    def test_a_directory_that_takes_no_file(self):
        self.start(state=os.path.join(self.directory, "none"))
        done = self.ctl("tenant", "set", "quiet", "weight=2")
        self.assertEqual(done.returncode, 1)
        self.assertIn("it is in force, but ends with the daemon", done.stderr)
        self.assertEqual(self.tenants()["quiet"]["given_weight"], 2)

    def test_what_an_earlier_run_kept_and_does_not_hold_any_more(self):
        with open(os.path.join(self.directory, "tenants"), "w", encoding="utf-8") as file:
            file.write("# words\nquiet2 \0\nquiet weight=9\nnoisy dram.min=1TiB\nquiet2 colour=red\n" + "x" * 3000 + "\n")
        self.start()
        self.assertEqual(self.tenants()["quiet"]["given_weight"], 9)
        self.assertNotIn("noisy", self.tenants())
        self.assertEqual(self.daemon.log().count("kept-settings-refused"), 4)

    def test_a_reload_counts_what_was_set(self):
        self.start(config="log:\n  level: info\n")
        self.assertEqual(self.ctl("tenant", "set", "quiet", "dram.min=10MiB").returncode, 0)
        self.daemon.configure('tenant_settings: ["noisy dram.min=10MiB"]\n')
        self.assertRegex(self.client().call("config.reload")["refused"], "with what 'ucmctl tenant set' has set: .*20MiB in sum")
        self.assertEqual(self.tenants()["quiet"]["given_dram_min"], 10 * MIB)
        self.daemon.configure('tenant_settings: ["noisy dram.min=6MiB"]\n')
        self.assertNotIn("refused", self.client().call("config.reload"))
        self.assertEqual([self.tenants()[name]["given_dram_min"] for name in ("quiet", "noisy")], [10 * MIB, 6 * MIB])

    @unittest.skipUnless(os.geteuid() == 0, "takes other uids")
    def test_what_an_operator_sees(self):
        """For DRAM, NVMe and the shared tier: use, guarantee and bound; and the weight, changed
        live. test_fairness.py has what each tenant gets."""
        root = os.path.join(self.directory, "root")
        os.mkdir(root)
        self.start(**{"shared.roots": f"{root} capacity=1GiB", "tenant_settings":
                      "quiet dram.min=4MiB dram.max=12MiB nvme.min=8MiB nvme.max=32MiB shared.min=16MiB shared.max=64MiB weight=200"})
        client, ns, region = self.worker(QUIET)
        self.store(region, ["a", "b", "c", "d"])
        self.settled(client, ns)
        self.until(lambda: self.tenants()["quiet"]["shared_bytes"] == 4 * BLOCK, "what was written to the root")

        def row():
            return re.search(r"(?m)^quiet .*$", self.ctl("tenant", "list").stdout)[0]
        self.assertRegex(self.ctl("tenant", "list").stdout, r"^TENANT +NAMESPACES +BLOCKS +DRAM +GIVEN +NVME +GIVEN +SHARED +GIVEN +WEIGHT +OF BUS +OF NVME +OF SHARED")
        self.assertRegex(row(), r"^quiet +1 +4 +2\.0 MiB +4\.0 MiB to 12\.0 MiB +2\.0 MiB +8\.0 MiB to 32\.0 MiB +"
                                r"2\.0 MiB +16\.0 MiB to 64\.0 MiB +200 +- +- +-$")
        self.ctl("tenant", "set", "quiet", "weight=300", "dram.min=0", "dram.max=0", "shared.max=0")
        client.call("evict", ns=ns, keys=keys("a"), tier=1)
        self.assertRegex(row(), r"^quiet +1 +4 +1\.5 MiB +- +2\.0 MiB +8\.0 MiB to 32\.0 MiB +2\.0 MiB +16\.0 MiB to all +300 ")

    def test_who_may(self):
        self.start()
        client, _, _ = self.worker(QUIET)
        self.worker(NOISY)
        self.refused(DENIED, client.call, "tenant.set", tenant="quiet", settings="weight=9")
        self.refused(DENIED, client.call, "tenant.reset", tenant="quiet")
        self.assertEqual([each["tenant"] for each in client.call("tenant.list")["tenants"]], ["quiet"])
        self.assertEqual([each["tenant"] for each in self.pages(self.client(), "tenant.list", "tenants")], ["quiet", "noisy"])


@unittest.skipUnless(os.geteuid() == 0, "takes other uids")
class NoisyNeighbour(Own):
    """The quiet tenant stores 8 blocks, 4 MiB. The noisy tenant then stores 200 blocks, 100 MiB:
    six times DRAM."""
    quiet = [f"quiet {i}" for i in range(8)]
    noise = [f"noise {i}" for i in range(200)]

    def play(self, **more):
        """How many blocks of the quiet tenant are still hits in DRAM."""
        self.start(**more)
        client, ns, region = self.worker(QUIET)
        self.store(region, self.quiet)
        said = [region.bytes(i) for i in range(4)]
        self.settled(client, ns)
        self.store(self.worker(NOISY)[2], self.noise)
        tiers = [client.tiers(ns, name)[0] for name in self.quiet]
        held = tiers.count(DRAM)
        if held:
            self.assertEqual(region.load(self.quiet[4:], range(4)), [OK] * 4)
            self.assertEqual([region.bytes(i) for i in range(4)], said)
        return held

    def test_without_a_guarantee_the_noisy_one_has_all_of_dram(self):
        self.assertEqual(self.play(), 0)

    def test_with_a_guarantee_all_its_blocks_are_hits_in_dram(self):
        self.assertEqual(self.play(tenant_settings="quiet dram.min=4MiB"), 8)
        self.assertEqual(self.tenants()["quiet"]["dram_bytes"], 8 * BLOCK)
        self.assertGreater(self.tenants()["noisy"]["dram_bytes"], 10 * MIB)

    def below(self, **more):
        """The same on NVMe, which the noisy tenant fills three times. Then an engine reads blocks
        of both from there."""
        self.start(**more)
        client, ns, region = self.worker(QUIET)
        self.store(region, self.quiet)
        said = [region.bytes(i) for i in range(4)]
        self.settled(client, ns)
        noisy = self.worker(NOISY)
        for at in range(0, 2 * len(self.noise), 4):
            self.store(noisy[2], [f"more noise {i}" for i in range(at, at + 4)])
            self.settled(*noisy[:2])
        found = sum(client.hits(ns, name) for name in self.quiet)
        if found:
            self.assertEqual(region.load(self.quiet[4:], range(4)), [OK] * 4)
            self.assertEqual([region.bytes(i) for i in range(4)], said)
        return found

    def test_without_a_guarantee_the_noisy_one_has_all_of_nvme(self):
        self.assertEqual(self.below(), 0)

    def test_with_a_guarantee_all_its_blocks_stay_on_nvme(self):
        self.assertEqual(self.below(tenant_settings="quiet nvme.min=4MiB"), 8)

    def test_a_bound_for_the_noisy_one_keeps_all_others(self):
        self.assertEqual(self.play(tenant_settings="noisy dram.max=8MiB"), 8)
        self.assertLessEqual(self.tenants()["noisy"]["dram_bytes"], 8 * MIB)

    def test_a_bound_of_nvme_for_the_noisy_one_keeps_all_others(self):
        self.assertEqual(self.below(tenant_settings="noisy nvme.max=16MiB"), 8)
        self.assertLessEqual(self.tenants()["noisy"]["nvme_bytes"], 16 * MIB)
        self.daemon.kill()
        self.start(tenant_settings="noisy nvme.max=8MiB")
        self.until(lambda: 0 < self.tenants()["noisy"]["nvme_bytes"] <= 8 * MIB, "what recovery found gives way")

    def test_a_guarantee_leaves_room_for_blocks_of_another_size(self):
        """Each slab of 1 MiB has one block of the quiet tenant and one of the noisy one. So half of
        DRAM is guaranteed, and all slabs are mixed."""
        self.start(tenant_settings=f"quiet dram.min={16 * BLOCK}")
        client, ns, region = self.worker(QUIET)
        noisy, noisy_ns, noise = self.worker(NOISY)
        for i in range(16):
            self.store(region, [f"quiet {i}"])
            said = region.bytes(0)
            self.store(noise, [f"noise {i}"])
        self.settled(client, ns)
        self.settled(noisy, noisy_ns)
        wide = dict(BIG, model="wide", layer_bytes=2 * BIG["layer_bytes"])
        wide_ns = noisy.open(wide)
        wide_region = Region(noisy, wide_ns, wide, 4)
        names = []

        def fits():
            names.append(f"wide {len(names)}")
            self.store(wide_region, names[-1:])
            return noisy.tiers(wide_ns, *names).count(DRAM) >= 6
        self.until(fits, "6 of them in DRAM")
        self.assertEqual([client.tiers(ns, f"quiet {i}")[0] for i in range(16)], [DRAM] * 16)
        self.assertEqual(region.load(["quiet 15"], [1]), [OK])
        self.assertEqual(region.bytes(1), said)
        self.assertGreater(client.metrics()["arena_parts_moved"], 0)

    def test_a_guarantee_that_is_set_live_and_kept_over_a_kill(self):
        self.start()
        self.assertEqual(self.ctl("tenant", "set", "quiet", "dram.min=4MiB").returncode, 0)
        self.daemon.kill()
        self.assertEqual(self.play(), 8)


@unittest.skipUnless(os.geteuid() == 0, "takes other uids")
class SharedRoot(Own):
    """Two hosts over one directory. The quiet tenant's files are the oldest. Only the first host
    has ever seen its namespace; the other collects garbage."""
    def files(self):
        return [os.path.join(at, name) for at, _, names in os.walk(self.root) for name in names
                if len(name) > 64 and not name.startswith((".", "0" * 32))]

    def age(self, days):
        """Files that are not old yet, all of them."""
        for path in self.files():
            if time.time() - os.path.getmtime(path) < 3600:
                os.utime(path, (time.time() - days * 86400,) * 2)

    def play(self, blocks, **more):
        """How many of the quiet tenant's 8 files and the noisy tenant's 40 are left after a
        collection."""
        self.root = tempfile.mkdtemp(prefix="shared.")
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)
        os.makedirs(os.path.join(self.root, "blocks"))
        hosts = {"shared.roots": self.root, "arena.size": "64MiB", **more}
        self.start(**hosts)
        self.store(self.worker(QUIET)[2], [f"quiet {i}" for i in range(8)])
        self.until(lambda: len(self.files()) == 8, "the quiet one's files")
        quiet = set(self.files())
        self.age(60)
        self.store(self.worker(NOISY)[2], [f"noise {i}" for i in range(40)])
        self.until(lambda: len(self.files()) == 48, "all files")
        self.age(10)
        self.until(lambda: len(glob.glob(os.path.join(self.root, "blocks", "00", ".tenant-*"))) == 2, "a note of each tenant")
        self.directory = tempfile.mkdtemp(prefix="host.")
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.start(**{**hosts, "shared.roots": f"{self.root} capacity={blocks * (BLOCK + 64)}"})
        self.until(lambda: self.ctl("shared", "gc").returncode == 0, "a collection")
        self.until(lambda: re.search(r"shared gc root=1 removed=[1-9]", self.daemon.log()), "its end")
        left = set(self.files())
        return len(left & quiet), len(left - quiet)

    def test_without_a_guarantee_the_oldest_files_go(self):
        self.assertEqual(self.play(24)[0], 0)

    def test_what_is_guaranteed_stays_on_the_root(self):
        quiet, noisy = self.play(24, tenant_settings=f"quiet shared.min={8 * (BLOCK + 64)}")
        self.assertEqual(quiet, 8)
        self.assertTrue(12 <= noisy <= 14, noisy)

    def test_at_most(self):
        quiet, noisy = self.play(1000, tenant_settings=f"noisy shared.max={20 * (BLOCK + 64)}")
        self.assertEqual(quiet, 8)
        self.assertTrue(16 <= noisy <= 18, noisy)

    def test_a_guarantee_that_no_root_could_keep(self):
        with self.assertRaisesRegex(RuntimeError, "shared.min are 2MiB in sum, and what garbage collection leaves on the smallest shared"):
            Daemon(**{"shared.roots": "/tmp capacity=2MiB", **self.options, "tenant_settings": "quiet shared.min=2MiB"})


if __name__ == "__main__":
    unittest.main()
