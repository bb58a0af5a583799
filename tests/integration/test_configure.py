#!/usr/bin/python3
"""What an operator changes in a running daemon: `config.reload`, on the wire and as `ucmctl config
reload` prints it. And which peers, in namespaces of their own, are operators, and of which tenant.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from daemon import UCMCTL, halt
from second_client import (BUSY, DEMO, DENIED, EXISTS, INVALID, MISS, NO_ROOM, NOT_FOUND, OK, TIMEOUT_S,
                           UNSUPPORTED, Case, Client, Daemon, OwnDaemons, Region, keys, u32)

USERS = {"a": 1001, "b": 1002}


class Configured(OwnDaemons, Case):
    """One daemon a test, with a configuration file."""
    config = "log:\n  level: info\n"
    options = {}

    def setUp(self):
        self.daemon = Daemon(config=self.config, **self.options)
        self.addCleanup(self.end)

    def end(self):
        self.assertEqual(self.daemon.stop(), 0)

    def ctl(self, *words, **options):
        return self.daemon.ctl(*words, **options)

    def reload(self, text):
        self.daemon.configure(text)
        return self.client().call("config.reload")


class Reload(Configured):
    def test_what_changed_and_what_needs_a_restart(self):
        self.assertEqual(self.reload(self.config), {"changes": [], "restarts": []})
        text = "log:\n  level: debug\nnvme:\n  queue_depth: 8\n  threads: 3\n"
        answer = self.reload(text)
        self.assertEqual(answer["changes"], [{"key": "log.level", "from": "info", "to": "debug"}])
        self.assertEqual([change["key"] for change in answer["restarts"]], ["nvme.queue_depth", "nvme.threads"])
        again = self.reload(text)
        self.assertEqual((again["changes"], again["restarts"]), ([], answer["restarts"]))

    def test_a_refusal_names_file_line_and_what_is_right_and_changes_nothing(self):
        answer = self.reload("log:\n  level: debug\narena:\n  sise: 1GiB\n")
        self.assertEqual((answer["file"], answer["line"]), (self.daemon.config, 4))
        self.assertRegex(answer["refused"], '^unknown key "arena.sise"; did you mean "arena.size"')
        for text, says in (("tenants: [a uid:1, b uid:1]", "uid:1 is in"), ("admins: [bob]", "write uid:NUMBER"),
                           ("\t", "a tab"), ("x: \u00e4\u00e4", "unknown key")):
            self.assertRegex(self.reload(text + "\n")["refused"], says)
        os.unlink(self.daemon.config)
        self.assertRegex(self.client().call("config.reload")["refused"], "can't be opened")
        self.assertNotIn(" debug ", self.daemon.log())

    def test_only_operators_and_only_with_a_file(self):
        self.refused(INVALID, self.client().call, "config.reload", why="not")
        if os.geteuid() == 0:
            self.refused(DENIED, self.client(uid=1000).call, "config.reload")
        bare = Daemon(nvme=False)
        self.addCleanup(bare.stop)
        self.refused(UNSUPPORTED, Client(bare).call, "config.reload")

    def test_ucmctl_prints_it_and_a_refusal_is_its_exit_status(self):
        self.daemon.configure("log:\n  level: warn\nnvme:\n  queue_depth: 8\n")
        done = self.ctl("config", "reload")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"changed:\n  log.level: info -> warn\nneeds a restart.*:\n  nvme.queue_depth: 128 -> 8\n$")
        self.daemon.configure("log:\n  level: loud\n")
        done = self.ctl("config", "reload")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r'nothing changed: .*/ucmd.yaml:2: log.level: "loud" .* error, warn, info, debug')
        done = self.ctl("config", "reload", "--json")
        self.assertEqual((done.returncode, json.loads(done.stdout)["line"]), (1, 2))

    def test_sighup_logs_the_same(self):
        self.daemon.configure("log:\n  level: debug\nnvme:\n  queue_depth: 8\n  threads: 3\n")
        self.daemon.process.send_signal(signal.SIGHUP)
        self.until(lambda: "reloaded changed=log.level need_restart=nvme.queue_depth,nvme.threads" in self.daemon.log())
        self.daemon.configure("arena:\n  sise: 1GiB\n")
        self.daemon.process.send_signal(signal.SIGHUP)
        self.until(lambda: "ucmd.yaml:2: unknown key" in self.daemon.log())


class Get(Configured):
    config = "log:\n  level: warn\nnvme:\n  queue_depth: 8\n"

    def key(self, name):
        found = [key for key in self.client().call("config.get")["keys"] if key["key"] == name]
        self.assertEqual(len(found), 1)
        return found[0]

    def test_each_key_says_where_it_came_from(self):
        level = {"key": "log.level", "value": "warn", "default": "info", "changed": True, "reloadable": True,
                 "source": "file", "where": self.daemon.config + ":2"}
        self.assertEqual(self.key("log.level"), level)
        self.assertEqual((self.key("nvme.on_write_stall")["source"], self.key("nvme.on_write_stall")["changed"]), ("default", False))
        self.assertEqual((self.key("arena.size")["source"], self.key("arena.size")["value"]), ("command line", "16MiB"))
        self.reload("\n\nlog:\n  level: error\nnvme:\n  queue_depth: 16\n")
        self.assertEqual(self.key("log.level"), dict(level, value="error", where=self.daemon.config + ":4"))
        depth = self.key("nvme.queue_depth")
        self.assertEqual((depth["value"], depth["next"], depth["source"]), ("8", "16", "file"))
        if os.geteuid() == 0:
            self.refused(DENIED, self.client(uid=1000).call, "config.get")

    def test_ucmctl_config(self):
        done = self.ctl("config", "--changed")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [line.split() for line in done.stdout.splitlines()]
        self.assertEqual(lines[0], ["KEY", "VALUE", "SOURCE"])
        self.assertIn(["log.level", "warn", self.daemon.config + ":2"], lines)
        self.assertNotIn("nvme.on_write_stall", done.stdout)
        self.assertIn("nvme.on_write_stall ", self.ctl("config").stdout)
        self.reload("nvme:\n  queue_depth: 16\n")
        self.assertRegex(self.ctl("config", "--changed").stdout, "nvme.queue_depth +8 .*16 at the next start")
        keys = json.loads(self.ctl("config", "--json").stdout)["keys"]
        self.assertEqual({key["key"]: key["value"] for key in keys}["socket"], self.daemon.socket)

    def test_the_environment_goes_over_the_file(self):
        daemon = Daemon(config="log:\n  level: warn\n", nvme=False,
                        before=("env", "UCMD_LOG_LEVEL=debug", "UCMD_NVME_QUEUE_DEPTH=9", "UCMD_ARENA_SIZE=32MiB",
                                "UCMD_SERVICE_HOST=10.0.0.1"))
        self.addCleanup(daemon.stop)
        keys = {key["key"]: (key["value"], key["where"]) for key in Client(daemon).call("config.get")["keys"]}
        self.assertEqual(keys["log.level"], ("debug", "UCMD_LOG_LEVEL"))
        self.assertEqual((keys["nvme.queue_depth"], keys["arena.size"]), (("9", "UCMD_NVME_QUEUE_DEPTH"), ("16MiB", "--set")))
        daemon.configure("log:\n  level: error\n")
        self.assertEqual(Client(daemon).call("config.reload")["changes"], [])


class Audit(Configured):
    """One line for each change, with its caller, whatever the level."""
    config = "log:\n  level: error\n"
    options = {"nvme": False}

    def lines(self, method):
        return [dict(re.findall(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|\S*)', line)) for line in self.daemon.log().splitlines()
                if f" info audit {method} " in line]

    def last(self, method, **values):
        values = {name: str(value) for name, value in values.items()}
        self.assertEqual({name: self.lines(method)[-1].get(name) for name in values}, values)

    def test_what_operators_and_tenants_change(self):
        client, identity = self.client(), dict(DEMO, model='new "weights" \\ 2')
        ns = client.open(identity)
        region = Region(client, ns, identity, 8)
        region.dump("abcd", range(4))
        who = {"uid": os.geteuid(), "gid": os.getegid(), "pid": os.getpid(), "tenant": client.limits["tenant"]}
        client.call("pin", ns=ns, keys=keys("a"))
        self.last("pin", ns=ns, keys=1, blocks=1, result="OK", ns_tenant=who["tenant"], **who)
        self.assertEqual(self.lines("pin")[-1]["model"], r'"new \"weights\" \\ 2"')
        client.call("unpin", ns=ns)
        self.last("unpin", keys="all", blocks=1)
        client.call("evict", ns=ns, keys=keys("b", "nowhere"))
        self.last("evict", tier="all", keys=2, blocks=1, busy=0, missing=1)
        client.call("namespace.purge", ns=ns)
        self.last("namespace.purge", tier="all", keys="all", blocks=3, result="OK")
        self.reload("log:\n  level: error\nrequest:\n  timeout: 5s\n")
        self.last("config.reload", result="OK", changed="request.timeout", uid=who["uid"])
        self.reload("no: key\n")
        self.last("config.reload", result="refused")
        if os.geteuid() == 0:
            tenant = self.client(uid=1000)
            mine = tenant.open(DEMO)
            tenant.call("namespace.purge", ns=mine)
            self.last("namespace.purge", uid=1000, tenant="uid:1000", ns=mine, blocks=0)
            self.refused(DENIED, tenant.call, "pin", ns=mine)
            self.assertEqual(len(self.lines("pin")), 1)

    def test_none_is_held_back(self):
        client = self.client()
        ns = client.open(DEMO)
        for _ in range(200):
            client.call("evict", ns=ns, keys=keys("x"))
        self.assertEqual(len(self.lines("evict")), 200)

    @unittest.skipUnless(os.geteuid() == 0, "takes another uid")
    def test_a_tenant_fills_no_log_with_calls_that_change_nothing(self):
        tenant = self.client(uid=1000)
        identity = dict(DEMO)
        ns = tenant.open(identity)
        for _ in range(500):
            tenant.call("evict", ns=ns, keys=keys("x"))
            tenant.call("namespace.purge", ns=ns)
        self.until(lambda: len(self.lines("evict") + self.lines("namespace.purge")) + self.held() == 1000, "each call, alone or in sum")
        self.assertGreater(self.held(), 0)
        Region(tenant, ns, identity, 8).dump("ab", range(2))
        for key in "ab":
            tenant.call("evict", ns=ns, keys=keys(key))
            self.last("evict", blocks=1, uid=1000)

    def held(self):
        return sum(int(line["calls"]) for line in self.lines("held"))


class AuditWithRoots(Audit):
    """With a root, too, calls by key that find nothing are held back. A call for a whole namespace
    counts as a change."""
    test_what_operators_and_tenants_change = None  # a block that is being written is busy, and not counted as purged

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="root.")
        self.addCleanup(directory.cleanup)
        os.chmod(directory.name, 0o777)
        self.options = {"nvme": False, "shared.roots": directory.name}
        super().setUp()

    @unittest.skipUnless(os.geteuid() == 0, "takes another uid")
    def test_a_tenant_fills_no_log_with_calls_that_change_nothing(self):
        tenant = self.client(uid=1000)
        ns = tenant.open(dict(DEMO))
        for _ in range(200):
            tenant.call("evict", ns=ns, keys=keys("x"))
        self.until(lambda: len(self.lines("evict")) + self.held() == 200, "each call, alone or in sum")
        self.assertGreater(self.held(), 0)
        for _ in range(5):
            tenant.call("namespace.purge", ns=ns)
        self.assertEqual(len(self.lines("namespace.purge")), 5)


class Bypass(Configured):
    options = {"nvme": False}

    def worker(self, **more):
        client, identity = self.client(), dict(DEMO, **more)
        ns = client.open(identity)
        return client, ns, Region(client, ns, identity, 8)

    def counted(self, client):
        return {name: value for name, value in client.metrics().items() if "bypass" in name and value}

    def test_loads(self):
        client, ns, region = self.worker()
        self.assertEqual(region.dump("abc", range(3)), [OK] * 3)
        lease = client.call("lookup", ns=ns, keys=keys("a", "b"), lease_ms=60000)["lease"]
        hits = client.metrics()["lookup_keys"]
        entry = self.client().call("bypass", ns=ns, load=1)["bypassed"]
        self.assertEqual([(each["ns"], each["load"], each["store"]) for each in entry], [(ns, True, False)])
        self.assertEqual(client.call("lookup", ns=ns, keys=keys("a", "b"), lease_ms=60000), {"hits": 0})
        self.assertEqual(client.tiers(ns, "a", "b", "x"), [0, 0, 0])
        self.assertEqual(region.load("ab", [4, 5], lease=lease), [MISS, MISS])
        self.assertEqual(list(client.call("prefetch", ns=ns, keys=keys("a"))["status"]), [MISS])
        self.assertEqual(region.dump("ad", [0, 3]), [EXISTS, OK])
        self.assertEqual(self.counted(client), {"bypasses": 1, "bypass_lookup_keys": 5, "bypass_load_blocks": 3})
        self.assertEqual(client.metrics()["lookup_keys"], hits)
        self.assertEqual(client.metrics()["leases"], 0)
        self.assertEqual(client.call("bypass", ns=ns, load=2), {"bypassed": []})
        self.assertEqual((client.hits(ns, *"abcd"), region.load("abcd", range(4, 8))), (4, [OK] * 4))

    def test_sequences(self):
        client, ns, region = self.worker()
        region.dump("ab", range(2))
        derived = client.call("summary.open", ns=ns, method=1, dtype=1, kv_heads=1, head_dim=64, k_token_stride=128)["ns"]
        sequence = client.call("sequence.open", ns=derived)["sequence"]
        self.assertEqual(client.call("sequence.append", sequence=sequence, keys=keys("a"))["blocks"], 1)
        client.call("bypass", load=1)
        self.assertEqual(client.call("sequence.append", sequence=sequence, keys=keys("b"))["blocks"], 1)
        self.assertEqual(list(client.call("sequence.prefetch", sequence=sequence, index=u32(0))["status"]), [MISS])
        client.call("bypass", load=2)
        self.assertEqual(client.call("sequence.append", sequence=sequence, keys=keys("b"))["blocks"], 2)
        self.assertEqual(list(client.call("sequence.prefetch", sequence=sequence, index=u32(0))["status"]), [OK])

    def test_stores(self):
        client, ns, region = self.worker()
        self.assertEqual(region.dump("a", [0], layer=0, layers=1), [OK])
        client.call("bypass", tenant=client.limits["tenant"], store=1)
        self.assertEqual(region.dump("bc", [1, 2]), [NO_ROOM] * 2)
        self.assertEqual(region.dump("b", [1], durability=1), [NO_ROOM])
        self.assertEqual(region.dump("ab", [0, 1], layer=1, layers=1), [OK, NO_ROOM])  # the part that had begun
        self.assertEqual((client.hits(ns, "a"), region.load("a", [4])), (1, [OK]))
        self.assertEqual(client.metrics()["bypass_dump_blocks"], 4)
        self.assertEqual(client.metrics()["blocks_partial"], 0)
        client.call("bypass", tenant=client.limits["tenant"], store=2)
        self.assertEqual(region.dump("bc", [1, 2]), [OK, OK])

    def test_whose(self):
        client, ns, _ = self.worker()
        self.refused(NOT_FOUND, client.call, "bypass", tenant="nobody", load=1)
        self.refused(NOT_FOUND, client.call, "bypass", ns=ns + 1, load=1)
        self.refused(INVALID, client.call, "bypass", ns=ns, tenant="uid:7", load=1)
        client.call("bypass", tenant="uid:1001", load=1, store=1)
        if os.geteuid() == 0:
            for uid, seen in ((1001, 1), (1002, 0)):
                other = self.client(uid=uid)
                theirs = other.open(DEMO)
                region = Region(other, theirs, DEMO, 2)
                self.assertEqual(region.dump("a", [0]), [NO_ROOM if seen else OK])
                self.assertEqual(other.hits(theirs, "a"), 0 if seen else 1)
                self.assertEqual(len(other.call("stats")["bypassed"]), seen)
                self.refused(DENIED, other.call, "bypass")
        for number in range(63):
            client.call("bypass", tenant=f"uid:{number}", store=1)
        self.refused(BUSY, client.call, "bypass", load=1)
        self.assertEqual(len(client.call("bypass", tenant="uid:5", store=2)["bypassed"]), 63)
        self.assertEqual(len(client.call("bypass", tenant="uid:5", store=2)["bypassed"]), 63)
        self.assertIn('info audit bypass uid=', self.daemon.log())

    def test_a_tenant_that_is_gone_gets_rid_of_its_bypass(self):
        client = self.client()
        self.reload(self.config + "tenants: [team uid:4711]\n")
        self.assertEqual(self.ctl("tenant", "list").stdout, "no tenant has a namespace\n")
        self.assertEqual(len(client.call("bypass", tenant="team", load=1)["bypassed"]), 1)
        self.reload(self.config)
        self.assertEqual(client.call("bypass", tenant="team", load=2), {"bypassed": []})
        self.refused(NOT_FOUND, client.call, "bypass", tenant="team", load=2)

    def test_a_namespace_that_is_gone_keeps_its_bypass_and_the_number_that_ends_it(self):
        daemon = Daemon(nvme=False, **{"limits.namespaces": "1"})
        self.addCleanup(daemon.stop)
        client = Client(daemon)
        ns = client.open(DEMO)
        client.call("bypass", ns=ns, load=1)
        client.close()
        client = Client(daemon)
        client.open(dict(DEMO, model="another"))
        self.assertEqual([entry["ns"] for entry in client.call("bypass")["bypassed"]], [ns])
        self.refused(NOT_FOUND, client.call, "bypass", ns=ns + 17, load=2)
        client.close()
        client = Client(daemon)
        again = client.open(DEMO)
        self.assertEqual([entry["ns"] for entry in client.call("bypass")["bypassed"]], [again])
        client.close()
        client = Client(daemon)
        client.open(dict(DEMO, model="another"))
        self.assertEqual(client.call("bypass", ns=ns, load=2), {"bypassed": []})
        self.refused(NOT_FOUND, client.call, "bypass", ns=ns, load=1)

    def test_ucmctl(self):
        client, ns, _ = self.worker()
        self.assertEqual(self.ctl("bypass").stdout, "nothing is bypassed\n")
        self.assertRegex(self.ctl("bypass", "load", "on").stdout, "^loads of all tenants, for ")
        self.assertRegex(self.ctl("bypass", "store", "on", "--ns", str(ns)).stdout, rf"\nstores of namespace {ns} \(tenant ")
        self.assertRegex(self.ctl("status").stdout, r"\nBYPASSED   loads of all tenants, for .*\nBYPASSED   stores of namespace")
        self.assertEqual(len(json.loads(self.ctl("status", "--json").stdout)["bypassed"]), 2)
        self.ctl("bypass", "load", "off")
        self.assertNotIn("all tenants", self.ctl("bypass").stdout)
        for words, says in ((["load"], "on or off"), (["load", "up"], "not 'up'"), (["both", "on"], "load or store"),
                            (["--ns", "1"], "goes with"), (["load", "on", "--ns", "1", "--tenant", "a"], "exclude")):
            done = self.ctl("bypass", *words)
            self.assertEqual(done.returncode, 2)
            self.assertIn(says, done.stderr)
        self.assertEqual(self.ctl("bypass", "load", "on", "--tenant", "teem-a").returncode, 1)


@unittest.skipUnless(os.geteuid() == 0, "takes other uids")
class Tenants(Configured):
    config = f"tenants: [team-a uid:{USERS['a']}]\n"
    options = {"nvme": False}  # a block that is being written is busy, and not counted as purged

    def test_ucmctl_lists_every_tenant_in_order(self):
        for uid in (2003, 2001, 2004, 2002):  # the last one belongs between others
            self.client(uid=uid).open(DEMO)
        listed = [entry["tenant"] for entry in json.loads(self.ctl("tenant", "list", "--json").stdout)["tenants"]]
        self.assertEqual(listed, sorted(listed))
        self.assertLessEqual({f"uid:{uid}" for uid in (2001, 2002, 2003, 2004)}, set(listed))

    def test_a_new_table_is_for_new_connections(self):
        before = {name: self.client(uid=uid) for name, uid in USERS.items()}
        self.assertEqual([before[name].limits["tenant"] for name in "ab"], ["team-a", "uid:1002"])
        ns = before["b"].open(DEMO)
        region = Region(before["b"], ns, DEMO, 4)
        self.assertEqual(region.dump("x", [0]), [OK])
        answer = self.reload(f"tenants: [team-a uid:{USERS['a']} uid:{USERS['b']}, team-c gid:7]\n"
                             f"admins: ['uid:{USERS['a']}']\n")
        self.assertEqual([change["key"] for change in answer["changes"]], ["tenants", "admins"])
        self.assertEqual((before["b"].hits(ns, "x"), region.load("x", [1])), (1, [OK]))
        self.refused(DENIED, before["a"].call, "pin", ns=ns)
        after = {name: self.client(uid=uid) for name, uid in USERS.items()}
        self.assertEqual([after[name].limits["tenant"] for name in "ab"], ["team-a", "team-a"])
        self.assertEqual(after["a"].call("pin", ns=ns)["blocks"], 1)
        self.assertEqual(after["b"].hits(after["b"].open(DEMO), "x"), 0)

    def test_a_tenant_that_goes_away_keeps_its_cache_until_it_is_purged(self):
        client = self.client(uid=USERS["a"])
        ns = client.open(DEMO)
        self.assertEqual(Region(client, ns, DEMO, 4).dump("xy", [0, 1]), [OK, OK])
        client.close()
        self.reload("")
        again = self.client(uid=USERS["a"])
        self.assertEqual((again.limits["tenant"], again.hits(again.open(DEMO), "xy")), ("uid:1001", 0))
        mine = [each for each in self.pages(self.client(), "namespace.list", "namespaces") if each["tenant"] == "team-a"]
        self.assertEqual((mine[0]["ns"], mine[0]["blocks"]), (ns, 2))
        self.reload(self.config)
        back = self.client(uid=USERS["a"])
        self.assertEqual(back.hits(back.open(DEMO), "x", "y"), 2)
        self.assertEqual(self.client().call("namespace.purge", ns=ns)["blocks"], 2)

    def test_ucmctl_of_a_tenant_sees_and_drops_what_is_its_own(self):
        for name, uid in USERS.items():
            client = self.client(uid=uid)
            Region(client, client.open(DEMO), DEMO, 4).dump("xy", [0, 1])

        def ctl(*words):
            return self.ctl(*words, user=USERS["a"])
        namespaces = json.loads(ctl("namespace", "list", "--json").stdout)["namespaces"]
        self.assertEqual([entry["tenant"] for entry in namespaces], ["team-a"])
        self.assertEqual([entry["tenant"] for entry in json.loads(ctl("tenant", "list", "--json").stdout)["tenants"]], ["team-a"])
        name = namespaces[0]["fingerprint"][:8]
        self.assertEqual(len(json.loads(ctl("ls", name, "--json").stdout)["blocks"]), 2)
        self.assertEqual(ctl("verify").returncode, 0)
        self.assertEqual(ctl("purge", name, "--yes").stdout, "2 blocks purged\n")
        theirs = [entry for entry in json.loads(self.ctl("namespace", "list", "--json").stdout)["namespaces"]
                  if entry["tenant"] != "team-a"]
        self.assertEqual(theirs[0]["blocks"], 2)
        done = ctl("ls", theirs[0]["fingerprint"][:8])
        self.assertEqual(done.returncode, 1)
        self.assertIn("no namespace", done.stderr)

    def test_the_quota_of_namespaces(self):
        self.reload("limits:\n  namespaces_per_tenant: 16\n")
        client = self.client(uid=USERS["a"])
        region = None
        for number in range(16):
            identity = dict(DEMO, revision=str(number))
            ns = client.open(identity)
            region = Region(client, ns, identity, 1)
            self.assertEqual(region.dump("x", [0]), [OK])
        other = self.client(uid=USERS["a"])
        with self.assertRaisesRegex(Exception, "namespaces_per_tenant"):
            other.open(dict(DEMO, revision="one too many"))
        self.reload("limits:\n  namespaces_per_tenant: 17\n")
        other.open(dict(DEMO, revision="one too many"))


def cgroup_make(name):
    """Makes a cgroup of this name below this process's. Returns the file that takes members, and
    its path. None: not allowed."""
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts, open("/proc/self/cgroup", encoding="utf-8") as own:
        mounts, own = mounts.read().splitlines(), [line.strip().split(":", 2) for line in own]
    named = [path for _, of, path in own if of == "name=systemd"]
    path = named[0] if named else [path for number, _, path in own if number == "0"][0]
    for line in mounts:
        fields, kind = line.split(" - ")[0].split(), line.split(" - ")[1].split()
        if kind[0] == ("cgroup" if named else "cgroup2") and (not named or "name=systemd" in kind[2]):
            directory = os.path.join(fields[4] + (path if fields[3] == "/" else ""), name)
            try:
                os.mkdir(directory)
            except OSError:
                return None
            return directory, os.path.join(path, name)
    return None


@unittest.skipUnless(os.geteuid() == 0, "makes namespaces as root")
class Containers(Configured):
    """The daemon runs as in the shipped unit, without the privilege to look into others'
    namespaces."""
    config = "admins: ['uid:1001']\n"
    user_ns = ("unshare", "--user", "--map-root-user")
    pid_ns = ("unshare", "--pid", "--fork", "--mount-proc")

    def setUp(self):
        directory = tempfile.mkdtemp(prefix="containers.")
        self.addCleanup(shutil.rmtree, directory)
        os.chown(directory, 1003, 1003)
        self.daemon = Daemon(config=self.config, nvme=False, directory=directory,
                             before=("setpriv", "--reuid=1003", "--regid=1003", "--clear-groups"))
        self.addCleanup(self.end)

    def seen(self, *before, **options):
        """The tenant, and whether it is an operator, of a client whose command begins with these words."""
        done = subprocess.run([*before, UCMCTL, "--socket", self.daemon.socket, "status", "--json"], capture_output=True,
                              text=True, timeout=TIMEOUT_S, check=False, **options)
        if done.returncode == 1 and "unshare" in done.stderr:
            self.skipTest("no namespaces here: " + done.stderr.strip())
        self.assertEqual(done.returncode, 0, done.stderr)
        status = json.loads(done.stdout)
        return status["tenant"], status["admin"]

    def test_operators(self):
        self.assertEqual(self.seen(), ("uid:0", True))
        self.assertEqual(self.seen(user=1003), ("uid:1003", True))
        self.assertEqual(self.seen(user=1001), ("uid:1001", True))
        self.assertEqual(self.seen(user=1002), ("uid:1002", False))
        self.assertEqual(self.seen(*self.user_ns), ("uid:0", False))
        self.assertEqual(self.seen(*self.user_ns, user=1001), ("uid:1001", False))
        self.assertEqual(self.seen(*self.pid_ns), ("uid:0", False))
        as_admin = ("setpriv", "--reuid=1001", "--clear-groups")
        self.assertEqual(self.seen(*self.pid_ns, *as_admin), ("uid:1001", False))
        self.assertEqual(self.seen("unshare", "--mount"), ("uid:0", True))
        self.assertIn("container-shares", self.daemon.log())
        done = subprocess.run([*self.pid_ns, UCMCTL, "--socket", self.daemon.socket, "config", "reload"], capture_output=True,
                              text=True, timeout=TIMEOUT_S, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "for operators.*from a container only if `container_admins` says so")
        self.reload(self.config + "container_admins: true\n")
        self.assertEqual(self.seen(*self.pid_ns), ("uid:0", True))
        self.assertEqual(self.seen(*self.pid_ns, *as_admin), ("uid:1001", True))
        self.assertEqual(self.seen(*self.user_ns), ("uid:0", False))
        self.assertEqual(self.seen("unshare", "--user", "--map-root-user", "--pid", "--fork"), ("uid:0", False))

    def test_root_of_a_container_may_not_connect_without_pause(self):
        """1,000 connections at once wait while the daemon is stopped. Then the uid gets 512 of
        them, and one more for each millisecond that the daemon takes. Root of the host gets in."""
        code = ("import resource, socket, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
                "held = [socket.socket(socket.AF_UNIX) for _ in range(1000)]\n"
                "for one in held: one.connect(sys.argv[1])\n"
                "print('connected', flush=True)\nsys.stdin.read()\nrefused = 0\n"
                "for one in held:\n"
                "    one.setblocking(False)\n"
                "    try: refused += b'connects more than' in one.recv(4096)\n"
                "    except BlockingIOError: pass\n"
                "print(refused)\n")
        for before in (("unshare", "--mount"), self.pid_ns):
            halt(self.daemon.process.pid)
            try:
                client = subprocess.Popen([*before, sys.executable, "-c", code, self.daemon.socket], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                ready = client.stdout.readline()
            finally:
                start = time.monotonic()
                os.kill(self.daemon.process.pid, signal.SIGCONT)
            self.assertEqual(self.seen(), ("uid:0", True))  # after all of them
            took_ms = (time.monotonic() - start) * 1000
            seen, words = client.communicate(timeout=TIMEOUT_S)
            if b"unshare" in words:
                self.skipTest("no namespaces here: " + words.decode())
            self.assertEqual(ready, b"connected\n", words)
            if before == self.pid_ns:
                self.assertLessEqual(1000 - int(seen), 512 + took_ms + 1)
            else:
                self.assertEqual(int(seen), 0)

    def test_tenants_by_cgroup(self):
        made = cgroup_make("ucmd-test-a")
        if not made:
            self.skipTest("this process may not make cgroups")
        directory, path = made
        inner = os.path.join(directory, "inner")
        self.addCleanup(os.rmdir, directory)
        os.mkdir(inner)
        self.addCleanup(os.rmdir, inner)

        def within(cgroup, **options):
            def enter():
                with open(os.path.join(cgroup, "cgroup.procs"), "w", encoding="ascii") as members:
                    members.write(str(os.getpid()))
            try:
                return self.seen(*self.pid_ns, preexec_fn=enter, **options)
            except subprocess.SubprocessError:
                return self.skipTest("this process may not enter cgroups")
        self.reload(f"tenants: [by-uid uid:0, 'team-a cgroup:{path}', 'team-b cgroup:{path}/inner', 'near cgroup:{path}x']\n")
        self.assertEqual(self.seen()[0], "by-uid")
        self.assertEqual(within(directory)[0], "team-a")
        self.assertEqual(within(inner)[0], "team-b")
        self.assertIn("is in", self.reload(f"tenants: ['a cgroup:{path}', 'b cgroup:{path}']\n")["refused"])


if __name__ == "__main__":
    unittest.main()
