#!/usr/bin/python3
"""What docs/protocol.md says about blocks, against a real daemon, through second_client.py: dump, load, layers, parts,
leases, tiers, cancelling, what operators may do, and the end.
"""

import faulthandler
import os
import signal
import time
import unittest

from second_client import (BIG, BUSY, CANCELLED, DEMO, DENIED, EXISTS, FAILED, INVALID, IN_PROGRESS, MISS,
                           NOT_FOUND, OK, OTHER_UID, SHUTDOWN, TIMEOUT_S, Case, Client, Closed, Daemon, Refused,
                           Region, keys, u32)

SUITE_TIMEOUT_S = 300
IN_DRAM, ON_NVME = 1, 2


class Blocks(Case):
    def again(self, blocks=16, identity=DEMO, part=0):
        """Another connection to the namespace of worker()."""
        client, identity = self.client(), dict(identity, model=self.id())
        return client, Region(client, client.open(identity), identity, blocks, part)

    def stored(self, count, identity=BIG):
        """A worker whose blocks, named 0 to count, lie on NVMe only."""
        client, ns, region = self.worker(identity, count)
        bytes_of = [region.fill(block) for block in range(count)]
        self.assertEqual(set(region.dump(range(count), range(count))), {OK})
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        self.assertEqual(client.tiers(ns, *range(count)), [ON_NVME] * count)
        return client, ns, region, bytes_of

    def parts_in_dram(self, client, ns, name):
        return [part["part"] for part in client.call("inspect", ns=ns, key=keys(name))["parts"] if part["dram"] == "ready"]

    def test_dump_and_load(self):
        client, ns, region = self.worker()
        first, second = region.fill(7), region.fill(3)
        self.assertEqual(region.call("dump", "ab", [7, 3]), {"status": bytes([OK, OK]), "bytes": 2 * region.size})
        again = region.call("dump", "abc", [7, 3, 7])
        self.assertEqual(again, {"status": bytes([EXISTS, EXISTS, OK]), "bytes": region.size})
        _, target = self.again()
        answer = target.call("load", "bxa", [0, 1, 15], priority=7, timeout_ms=3600000)
        self.assertEqual(answer, {"status": bytes([OK, MISS, OK]), "bytes": 2 * region.size})
        self.assertEqual((target.bytes(0), target.bytes(15), target.bytes(2)), (second, first, bytes(region.size)))

    def test_sizes_that_are_no_power_of_two(self):
        identity = dict(DEMO, layers=[3], layer_bytes=4097, key_bytes=23)
        client, ns, region = self.worker(identity, 5)
        before = region.fill(3)
        for method, block in (("dump", 3), ("load", 1)):
            msgid = region.begin(method, "a", [block], size=23)
            self.assertEqual(client.wait(msgid), {"status": bytes([OK]), "bytes": 3 * 4097})
        self.assertEqual(region.bytes(1), before)

    def test_bad_moves(self):
        client, ns, region = self.worker()
        region.dump("a", [0])
        for method in ("load", "dump"):
            good = {"region": region.number, "keys": keys("a"), "blocks": u32(0)}
            for wrong in ({"keys": bytes(17)}, {"keys": keys("a", "b")}, {"blocks": bytes(5)}, {"blocks": u32(16)},
                          {"layer": 2}, {"layer": 1, "layers": 2}, {"layers": 3}):
                self.refused(INVALID, client.call, method, **dict(good, **wrong))
            self.refused(NOT_FOUND, client.call, method, **dict(good, region=4000000))
        self.refused(INVALID, region.load, "ab", [1, 1])
        for method in ("lookup", "prefetch", "evict", "pin", "unpin", "namespace.purge"):
            self.refused(INVALID, client.call, method, ns=ns, keys=bytes(17))
        self.refused(INVALID, client.call, "prefetch", ns=ns, keys=keys("a"), part=1, parts=2)
        self.refused(INVALID, client.call, "inspect", ns=ns, key=bytes(17))
        self.refused(NOT_FOUND, client.call, "inspect", ns=ns, key=keys("nobody"))
        self.refused(INVALID, client.call, "lookup", ns=ns, keys=bytes(16) * 16385)
        most = client.call("lookup", ns=ns, keys=bytes(16) * 16384, per_key=True)
        self.assertEqual(most, {"hits": 0, "status": bytes(16384)})

    def test_layers(self):
        identity = dict(DEMO, layers=[4])
        client, ns, region = self.worker(identity)
        before = region.fill(0)
        other, rival = self.again(identity=identity)
        self.assertEqual(region.call("dump", "a", [0], layer=2), {"status": bytes([OK]), "bytes": 8192})
        for again in (rival.dump("a", [0]), region.dump("a", [0], layer=3), rival.dump("a", [0], layers=1)):
            self.assertEqual(again, [IN_PROGRESS])
        self.assertEqual((other.hits(ns, "a"), rival.load("a", [1])), (0, [MISS]))
        self.assertEqual(client.call("prefetch", ns=ns, keys=keys("a")), {"status": bytes([MISS])})
        self.assertEqual(client.call("inspect", ns=ns, key=keys("a"))["parts"][0]["dram"], "pending_write")
        self.assertEqual(region.dump("a", [0], layer=1, layers=1), [OK])
        self.assertEqual((other.hits(ns, "a"), region.dump("a", [0], layers=1), other.hits(ns, "a")), (0, [OK], 1))
        pipeline = [rival.begin("load", "a", [1], layer=layer, layers=1) for layer in range(4)]
        self.assertEqual([other.wait(msgid)["bytes"] for msgid in pipeline], [4096] * 4)
        self.assertEqual(rival.bytes(1), before)
        rival.memory[:] = bytes(len(rival.memory))
        self.assertEqual(rival.load("a", [1], layer=1, layers=2), [OK])
        self.assertEqual(rival.bytes(1), bytes(4096) + before[4096:12288] + bytes(4096))

    def test_all_layers_may_follow_some(self):
        """As after a dump by layers that was cancelled midway."""
        identity = dict(DEMO, layers=[4])
        client, ns, region = self.worker(identity)
        region.fill(0)
        self.assertEqual(region.dump("a", [0], layers=3), [OK])
        now = region.fill(1)
        self.assertEqual(region.dump("a", [1]), [OK])
        self.assertEqual((client.call("lookup", ns=ns, keys=keys("a"))["hits"], region.load("a", [2])), (1, [OK]))
        self.assertEqual(region.bytes(2), now)

    def told_of_a_load(self, region, before, first, step):
        """The layers that were reported before the answer."""
        client = region.client
        region.memory[:] = bytes(len(region.memory))
        msgid = region.begin("load", ["x", *range(7)], range(8), layer=first, progress_interval=step)
        answer = client.wait(msgid)
        self.assertEqual(answer["status"], bytes([MISS] + [OK] * 7))
        progress = client.progress.pop(msgid, [])
        self.assertEqual([note.get("status") for note in progress][:1], [answer["status"]][:len(progress)])
        self.assertTrue(all("status" not in note for note in progress[1:]))
        for block in range(1, 8):
            self.assertEqual(region.bytes(block)[first * 4096:], before[block - 1][first * 4096:])
        return [note["layers"] for note in progress]

    def test_layers_of_a_load_are_told(self):
        identity = dict(DEMO, layers=[5])
        client, ns, region = self.worker(identity)
        before = [region.fill(block) for block in range(8)]
        region.dump(range(8), range(8))
        for first, step, told in ((0, 2, [2, 4]), (0, 1, [1, 2, 3, 4]), (2, 1, [1, 2]), (0, 5, []), (0, 1024, [])):
            for _ in range(100):
                numbers = self.told_of_a_load(region, before, first, step)
                self.assertEqual(numbers, sorted(set(numbers)))
                self.assertLessEqual(set(numbers), set(told))
                if numbers or not told:
                    break  # otherwise the last step was done when the daemon first looked
            else:
                self.fail("never told of a step")
        self.refused(INVALID, region.load, "a", [0], progress_interval=1025)

    def test_an_unfinished_dump_ends_with_its_connection(self):
        client, ns, region = self.worker()
        other, rival = self.again()
        self.assertEqual((rival.dump("a", [0], layers=1), region.dump("a", [0], layer=1)), ([OK], [IN_PROGRESS]))
        other.close()
        self.until(lambda: not client.call("ls", ns=ns)["blocks"], "the end of the unfinished part")
        self.assertEqual((region.dump("a", [0]), client.hits(ns, "a")), ([OK], 1))

    def test_parts(self):
        identity = dict(DEMO, parts=2, layers=[1, 2])
        client, ns, region = self.worker(identity)
        other, second = self.again(identity=identity, part=1)
        before = region.fill(0), second.fill(5)
        self.assertEqual((region.dump("ab", [0, 1]), region.dump("a", [0])), ([OK, OK], [EXISTS]))
        self.assertEqual((client.hits(ns, "a"), region.load("a", [2]), second.load("a", [2])), (0, [MISS], [MISS]))
        block = client.call("inspect", ns=ns, key=keys("a"))
        self.assertEqual((block["complete"], block["ready"]), (False, 1))
        self.assertEqual([part["dram"] for part in block["parts"]], ["ready", "none"])
        self.assertEqual((second.dump("a", [5]), other.hits(ns, "a", "b")), ([OK], 1))
        self.assertEqual((region.load("a", [2]), second.load("a", [2])), ([OK], [OK]))
        self.assertEqual((region.bytes(2), second.bytes(2)), before)
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        answer = client.call("prefetch", ns=ns, keys=keys("a", "b"), part=1, parts=1)
        self.assertEqual(answer, {"status": bytes([OK, MISS]), "bytes": 8192})
        block = client.call("inspect", ns=ns, key=keys("a"))
        self.assertEqual((client.tiers(ns, "a"), block["parts"][0]["dram"]), ([ON_NVME], "none"))
        self.assertEqual(second.load("a", [3]) + region.load("a", [3]), [OK, OK])
        self.assertEqual(second.bytes(3), before[1])

    def test_prefetch_of_some_parts(self):
        identity = dict(DEMO, parts=3, layers=[1, 2, 3])
        client, ns, region = self.worker(identity)
        regions = [region] + [self.again(identity=identity, part=part)[1] for part in (1, 2)]
        before = [region.fill(0) for region in regions]
        for region in regions:
            self.assertEqual(region.dump("a", [0]), [OK])
        self.settled(client, ns)
        for asked, arrive in (({"part": 1}, [1, 2]), ({"part": 0, "parts": 2}, [0, 1]), ({"part": 2, "parts": 1}, [2]),
                              ({"part": 1, "parts": 2}, [1, 2]), ({"part": 2}, [2]), ({"parts": 1}, [0]), ({"parts": 3}, [0, 1, 2]),
                              ({"part": 1, "parts": 0}, [1, 2]), ({}, [0, 1, 2])):
            with self.subTest(**asked):
                client.call("evict", ns=ns, tier=1)
                self.assertEqual(self.parts_in_dram(client, ns, "a"), [])
                answer = client.call("prefetch", ns=ns, keys=keys("a", "b"), **asked)
                self.assertEqual(answer, {"status": bytes([OK, MISS]), "bytes": sum(regions[part].size for part in arrive)})
                self.assertEqual(self.parts_in_dram(client, ns, "a"), arrive)
        for part, region in enumerate(regions):
            self.assertEqual((region.load("a", [1]), region.bytes(1)), ([OK], before[part]))

    def test_prefetch_of_parts_that_the_namespace_lacks(self):
        client, ns, _ = self.worker(dict(DEMO, parts=3, layers=[1, 2, 3]))
        for asked in ({"part": 3}, {"part": 1, "parts": 3}, {"part": 3, "parts": 1}, {"parts": 4}, {"part": 255, "parts": 256}):
            with self.subTest(**asked):
                refused = self.refused(INVALID, client.call, "prefetch", ns=ns, keys=keys("a"), **asked)
                part, parts = asked.get("part", 0), asked.get("parts", 0)
                self.assertIn(f"part: {part}, parts: {parts}; the namespace has 3, from 0", str(refused))
        self.refused(INVALID, client.call, "prefetch", ns=ns, keys=keys("a"), part=256)

    def test_lookup(self):
        client, ns, region = self.worker()
        region.dump("abc", [0, 1, 2])
        self.assertEqual(client.call("lookup", ns=ns, keys=keys(*"abxc")), {"hits": 2, "dram": 2})
        self.assertEqual(client.call("lookup", ns=ns, keys=keys(*"xabc"), lease_ms=1000), {"hits": 0})
        self.assertEqual(client.call("lookup", ns=ns, keys=keys(*"xcya"), per_key=True),
                         {"hits": 2, "dram": 2, "status": bytes([0, IN_DRAM, 0, IN_DRAM])})
        self.settled(client, ns)
        self.assertEqual(client.call("evict", ns=ns, keys=keys(*"bx"), tier=1), {"blocks": 1, "missing": 1})
        self.assertEqual(client.call("lookup", ns=ns, keys=keys(*"abc")), {"hits": 3, "dram": 2})
        self.assertEqual(client.tiers(ns, *"abc"), [IN_DRAM, ON_NVME, IN_DRAM])

    def test_leases(self):
        client, ns, region = self.worker()
        region.dump("abcd", range(4))

        def lease(*names, ms=(1 << 32) - 1, per_key=False):
            return client.call("lookup", ns=ns, keys=keys(*names), lease_ms=ms, per_key=per_key)["lease"]

        def held(name="a"):
            return client.call("inspect", ns=ns, key=keys(name))["leases"]

        first, second = lease("a", "b", "x"), lease("x", "a", per_key=True)
        self.assertEqual((held("a"), held("b"), held("c")), (2, 1, 0))
        other, rival = self.again()
        other.call("release", lease=first)
        # a lease of another connection does not count
        self.assertEqual(rival.load("a", [0], lease=first), [OK])
        self.refused(INVALID, region.load, "a", [0], lease=first, layer=9)
        self.assertEqual(held(), 1)  # a load ends the lease that it names, refused or not
        for _ in range(2):
            self.assertEqual(client.call("release", lease=second), {})
        self.assertEqual(held(), 0)
        first = lease("a")
        self.assertEqual((held(), region.load("x", [0], lease=first), held()), (1, [MISS], 0))
        lease("a", ms=200)
        self.assertEqual(held(), 1)
        self.until(lambda: held() == 0, "the end of the lease's time")
        stale, kept = lease("a", ms=1), [lease("a") for _ in range(40)]
        self.until(lambda: held() == 40, "the end of the first one's time")
        kept += [lease("a") for _ in range(40)]
        client.call("release", lease=stale)  # whatever number it had
        self.assertEqual(held(), 80)
        for number in kept:
            client.call("release", lease=number)
        self.assertEqual(held(), 0)
        third = lease("a", "b")
        self.settled(client, ns)  # a block that is being written is busy, too
        self.assertEqual(client.call("evict", ns=ns, keys=keys("a", "c")), {"blocks": 1, "busy": 1})
        self.assertEqual((client.hits(ns, "a"), client.call("inspect", ns=ns, key=keys("a"))["deleting"]), (0, True))
        self.assertEqual(region.load("ab", [8, 9], lease=third), [MISS, OK])
        self.refused(NOT_FOUND, client.call, "inspect", ns=ns, key=keys("a"))
        other.call("lookup", ns=ns, keys=keys("d"), lease_ms=60000)
        self.assertEqual(held("d"), 1)
        other.close()
        self.until(lambda: held("d") == 0, "the end of the connection's leases")
        for _ in range(client.limits["max_leases"]):
            lease("b")
        self.refused(BUSY, lease, "b")
        self.assertEqual((client.hits(ns, "b"), held("b")), (1, client.limits["max_leases"]))

    def test_nvme(self):
        client, ns, region, before = self.stored(8)
        target = Region(client, ns, BIG, 8)
        self.assertEqual(target.load([5, "x", 2], [0, 1, 2]), [OK, MISS, OK])
        self.assertEqual((target.bytes(0), target.bytes(2)), (before[5], before[2]))
        client.call("evict", ns=ns, tier=1)
        wanted = {"ns": ns, "keys": keys(0, "x", 1)}
        self.assertEqual(client.call("prefetch", **wanted), {"status": bytes([OK, MISS, OK]), "bytes": 2 * region.size})
        self.assertEqual(client.call("prefetch", **wanted), {"status": bytes([OK, MISS, OK])})
        self.assertEqual(client.tiers(ns, 0, 1, 2), [IN_DRAM, IN_DRAM, ON_NVME])
        self.assertEqual(client.call("evict", ns=ns, keys=keys(0, 2), tier=2)["blocks"], 2)
        self.assertEqual(client.tiers(ns, 0, 2), [IN_DRAM, 0])
        pages = self.pages(client, "verify", None, ns=ns)
        self.assertEqual(sum(page["checked"] for page in pages), 6)
        self.assertEqual([page for page in pages if page.get("corrupt") or page.get("failed")], [])

    def test_what_is_corrupt_is_never_delivered(self):
        client, ns, region, before = self.stored(4, DEMO)
        for block in before[:3]:
            self.spoil(block, 5000)
        marked = region.fill(2)
        self.assertEqual(region.call("load", [0, 3], [2, 3]), {"status": bytes([FAILED, OK]), "bytes": region.size})
        self.assertIn(region.bytes(2)[5000], (marked[5000], before[0][5000]))
        self.assertEqual(client.call("prefetch", ns=ns, keys=keys(1)), {"status": bytes([FAILED])})
        pages = self.pages(client, "verify", None, ns=ns)
        self.assertEqual(sum(page.get("corrupt", 0) for page in pages), 1)
        self.assertEqual(client.tiers(ns, *range(4)), [0, 0, 0, IN_DRAM])
        self.assertEqual(region.dump([0], [0]), [OK])

    def test_verify_counts_as_checked_what_agreed(self):
        client, ns, _, before = self.stored(2, DEMO)
        self.spoil(before[0], 5000)
        self.assertEqual(client.call("verify", ns=ns), {"checked": 1, "corrupt": 1})

    def test_a_page_of_verify_has_8192_parts_at_most(self):
        client = self.client()
        parts = dict(DEMO, model=self.id(), parts=256, layers=[1] * 256, layer_bytes=512)
        ns = client.open(parts)
        Region(client, ns, parts, 50).dump(range(50), range(50))
        cursor, pages = 0, 0
        while pages == 0 or cursor:
            cursor = client.call("verify", ns=ns, cursor=cursor, limit=4096).get("next", 0)
            pages += 1
        self.assertGreater(pages, 1)

    def test_order_cancel_deadline(self):
        client, ns, region, before = self.stored(60)
        many = region.begin("load", range(60), range(60), _more=True)
        last = client.begin("lookup", ns=ns, keys=keys(0))
        # answers come in the order in which the work is done
        self.assertEqual([client.next(), client.next()], [last, many])
        self.assertEqual(client.wait(many)["bytes"], 60 * region.size)
        for method, stop in [(method, stop) for method in ("load", "prefetch") for stop in ("cancel", "deadline")]:
            client.call("evict", ns=ns, tier=1)
            how = {"timeout_ms": 1} if stop == "deadline" else {"_more": True}
            region.memory[:] = bytes(len(region.memory))
            if method == "load":
                many = region.begin("load", range(60), range(60), **how)
            else:
                many = client.begin("prefetch", ns=ns, keys=keys(*range(60)), **how)
            if stop == "cancel":
                self.assertEqual(client.call("cancel", msgid=many), {"cancelled": True})
            answer = client.wait(many)
            self.assertLessEqual({CANCELLED}, set(answer["status"]), (method, stop))
            self.assertLessEqual(set(answer["status"]), {OK, CANCELLED})
            self.assertEqual(client.call("cancel", msgid=many).get("cancelled", False), False)
            for block, status in enumerate(answer["status"] if method == "load" else b""):
                self.assertTrue(status == CANCELLED or region.bytes(block) == before[block])
        self.assertEqual(set(region.dump(range(60, 120), range(60), timeout_ms=1)) - {OK, CANCELLED}, set())
        self.assertEqual(set(region.dump(range(60, 70), range(10))) - {OK, EXISTS}, set())

    def test_unregister_ends_what_is_under_way(self):
        client, ns, region, _ = self.stored(60)
        loads = [region.begin("load", range(60), range(60)) for _ in range(2)]
        last = client.begin("region.unregister", region=region.number)
        self.assertEqual([client.next() for _ in range(3)][2], last)
        for msgid in loads:
            self.assertLessEqual(set(client.wait(msgid)["status"]), {OK, CANCELLED})
        self.assertEqual(client.wait(last), {})

    def test_unregister_again_is_answered_when_nothing_is_mapped(self):
        for turn in range(20):
            client, ns, region, _ = self.stored(60, dict(BIG, revision=str(turn)))
            many = [region.begin("load", range(60), range(60), _more=True)]
            many += [client.begin("region.unregister", region=region.number, _more=left > 0) for left in reversed(range(3))]
            self.assertEqual([client.next() for _ in many], many)
            self.assertLessEqual(set(client.wait(many[0])["status"]), {OK, CANCELLED})
            self.assertEqual(client.wait(many[1]), {})
            try:
                self.assertEqual([client.wait(msgid) for msgid in many[2:]], [{}, {}])
            except Refused as e:
                self.assertEqual(e.code, NOT_FOUND)
                continue  # it was their turn when nothing was mapped any more
            self.refused(NOT_FOUND, client.call, "region.unregister", region=region.number)
            return
        self.fail("none came while the region was unmapped")

    def test_busy(self):
        """test_shared_hangs.py has requests."""
        client, ns, _region = self.worker(BIG, 1)
        for _ in range(client.limits["max_regions"] - 1):
            kept = Region(client, ns, BIG, 1)
        self.refused(BUSY, Region, client, ns, BIG, 1)
        client.call("region.unregister", region=kept.number)
        Region(client, ns, BIG, 1)

    def test_pin_evict_purge(self):
        client, ns, region = self.worker()
        region.dump(range(8), range(8))
        self.settled(client, ns)
        self.assertEqual(client.call("pin", ns=ns, keys=keys(0, 1, "x")), {"blocks": 2, "missing": 1})
        self.assertEqual(client.call("pin", ns=ns, keys=keys(0, 2)), {"blocks": 1})
        self.assertTrue(client.call("inspect", ns=ns, key=keys(2))["pinned"])
        self.assertEqual(client.call("evict", ns=ns)["blocks"], 5)
        self.assertEqual(client.call("lookup", ns=ns, keys=keys(*range(8)), per_key=True)["hits"], 3)
        self.assertEqual(client.call("unpin", ns=ns, keys=keys(2, "x")), {"blocks": 1, "missing": 1})
        self.assertEqual(client.call("evict", ns=ns, keys=keys(2)), {"blocks": 1})
        self.assertEqual(client.call("unpin", ns=ns), {"blocks": 2})
        self.assertEqual(client.call("pin", ns=ns), {"blocks": 2})
        lease = client.call("lookup", ns=ns, keys=keys(0), lease_ms=60000)["lease"]
        self.assertEqual(client.call("namespace.purge", ns=ns), {"blocks": 1, "busy": 1})
        self.assertEqual((client.hits(ns, 0), region.load([0], [9], lease=lease)), (0, [MISS]))
        self.assertEqual((client.call("ls", ns=ns)["blocks"], region.dump([0], [0])), ([], [OK]))
        self.settled(client, ns)
        self.assertEqual(client.call("namespace.purge", ns=ns, keys=keys(0, "x")), {"blocks": 1, "missing": 1})

    def test_what_operators_see(self):
        client, ns, region = self.worker()
        region.dump(range(10), range(10))
        self.settled(client, ns)
        blocks = self.pages(client, "ls", "blocks", ns=ns)
        self.assertEqual(sorted(block["key"] for block in blocks), sorted(keys(name) for name in range(10)))
        like = {"dram": 1, "nvme": 1, "ready": 1, "complete": True, "pinned": False, "leases": 0}
        self.assertEqual([block for block in blocks if dict(block, **like) != block], [])
        block = client.call("inspect", ns=ns, key=keys(3))
        self.assertEqual((block["key"], block["complete"]), (keys(3), True))
        self.assertEqual([block["parts"][0][tier] for tier in ("dram", "nvme")], ["ready", "ready"])
        entry = [entry for entry in self.pages(client, "namespace.list", "namespaces") if entry["ns"] == ns][0]
        self.assertEqual((entry["blocks"], entry["dram_bytes"], entry["nvme_bytes"]), (10, 81920, 81920))
        stats = client.call("stats")
        self.assertEqual((stats["pid"], stats["instance"]), (self.daemon.process.pid, client.limits["instance"]))
        self.assertEqual(([tier["name"] for tier in stats["tiers"]], [device["name"] for device in stats["devices"]]),
                         (["nvme"], ["cpu"]))
        self.assertTrue(stats["metrics"] and all(type(value) is int for value in stats["metrics"].values()))
        self.assertEqual(client.call("health"), {"status": "ok", "reasons": []})

    @unittest.skipUnless(os.geteuid() == 0, "takes another uid")
    def test_others_than_operators(self):
        client, ns, region = self.worker()
        region.dump("a", [0])
        other, identity = self.client(uid=OTHER_UID), dict(DEMO, model=self.id())
        self.assertFalse(other.limits.get("admin", False))
        self.refused(DENIED, other.call, "namespace.open", **dict(identity, tenant=client.limits["tenant"]))
        for number in (ns, 4000000):
            for method in ("lookup", "prefetch", "evict", "namespace.purge"):
                self.refused(NOT_FOUND, other.call, method, ns=number, keys=keys("a"))
            for method in ("ls", "verify"):
                self.refused(NOT_FOUND, other.call, method, ns=number)
            self.refused(NOT_FOUND, other.call, "inspect", ns=number, key=keys("a"))
            self.refused(NOT_FOUND, Region, other, number, DEMO, 1)
        mine = other.open(identity)
        own = Region(other, mine, identity, 4)
        self.assertEqual((other.hits(mine, "a"), own.load("a", [0]), own.dump("ab", [0, 1])), (0, [MISS], [OK, OK]))
        for method in ("pin", "unpin"):
            self.refused(DENIED, other.call, method, ns=mine, keys=keys("a"))
        self.refused(DENIED, other.call, "shared.gc")
        self.assertEqual(len(other.call("ls", ns=mine)["blocks"]), 2)
        self.assertEqual(other.call("inspect", ns=mine, key=keys("a"))["complete"], True)
        listed = other.call("namespace.list")["namespaces"]
        self.assertEqual({entry["tenant"] for entry in listed}, {other.limits["tenant"]})
        for method in ("stats", "health"):
            other.call(method)
        self.settled(other, mine)
        self.assertEqual(other.call("verify", ns=mine)["checked"], 2)
        self.assertEqual(other.call("evict", ns=mine, keys=keys("a"))["blocks"], 1)
        self.assertEqual(other.call("namespace.purge", ns=mine)["blocks"], 1)
        self.assertEqual(len(client.call("ls", ns=mine)["blocks"]), 0)  # an operator did not need to open it
        self.assertEqual(client.hits(ns, "a"), 1)

    @unittest.skipUnless(os.geteuid() == 0, "takes another uid")
    def test_a_tenant_sees_and_drops_its_own_without_opening_it(self):
        writer, identity = self.client(uid=OTHER_UID), dict(DEMO, model=self.id())
        ns = writer.open(identity)
        self.assertEqual(Region(writer, ns, identity, 8).dump("abcd", range(4)), [OK] * 4)
        self.settled(writer, ns)
        mine, other = self.client(uid=OTHER_UID), self.client(uid=OTHER_UID + 1)
        self.assertEqual([entry["ns"] for entry in self.pages(mine, "namespace.list", "namespaces")
                          if entry["model"] == self.id()], [ns])
        self.assertEqual(len(self.pages(mine, "ls", "blocks", ns=ns)), 4)
        self.assertTrue(mine.call("inspect", ns=ns, key=keys("a"))["complete"])
        self.assertEqual(sum(page["checked"] for page in self.pages(mine, "verify", None, ns=ns)), 4)
        for method in ("ls", "verify", "evict", "namespace.purge"):
            there, nowhere = (str(self.refused(NOT_FOUND, other.call, method, ns=number)) for number in (ns, ns + 1000))
            self.assertEqual(there.replace(f" {ns};", ""), nowhere.replace(f" {ns + 1000};", ""))
        self.refused(NOT_FOUND, other.call, "inspect", ns=ns, key=keys("a"))
        self.refused(NOT_FOUND, mine.call, "lookup", ns=ns, keys=keys("a"))  # to use it, one opens it
        self.refused(DENIED, mine.call, "pin", ns=ns)
        self.assertEqual(mine.call("evict", ns=ns, keys=keys("a"))["blocks"], 1)
        self.assertEqual(mine.call("namespace.purge", ns=ns)["blocks"], 3)
        self.assertEqual(writer.hits(ns, "b"), 0)

    def test_shutdown(self):
        daemon = Daemon()
        self.addCleanup(daemon.stop)
        client = Client(daemon)
        ns = client.open(BIG)
        region = Region(client, ns, BIG, 60)
        self.assertEqual(set(region.dump(range(60), range(60))), {OK})
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        many = [region.begin("load", range(60), range(60)) for _ in range(30)]
        client.call("health")  # they are read
        daemon.process.send_signal(signal.SIGTERM)
        late = []

        def refused():  # those that come before the daemon has its signal are served
            time.sleep(0.002)
            late.append(region.begin("load", [0], [0]))
            try:
                return not client.wait(late[-1])
            except Refused as refused:
                return self.assertEqual(refused.code, SHUTDOWN) is None
        self.until(refused, "a refusal")
        self.assertEqual([set(client.wait(msgid)["status"]) for msgid in many], [{OK}] * 30)
        self.assertRaises(Closed, client.next)
        self.assertEqual(daemon.process.wait(TIMEOUT_S), 0)

    def test_a_page_of_ls_fits_a_frame(self):
        """This holds however many blocks it may have."""
        small = dict(DEMO, layers=[1], layer_bytes=1024)
        client, ns, region = self.worker(small, blocks=4096)
        self.assertEqual(set(region.dump(range(4096), range(4096))), {OK})
        page, found = client.call("ls", ns=ns, limit=4096), []
        self.assertEqual(len(page["blocks"]), 1024)
        while page["next"]:
            found += page["blocks"]
            page = client.call("ls", ns=ns, limit=4096, cursor=page["next"])
        self.assertEqual(len({block["key"] for block in found + page["blocks"]}), 4096)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
