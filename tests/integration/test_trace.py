#!/usr/bin/python3
"""`trace` and `ucmctl trace` against a real daemon: permissions, which requests are chosen, and
what is in the file. A slow read shows as the longest span of its load.

$UCMD and $UCMCTL name other programs than those in build/.
"""

import ctypes
import json
import mmap
import os
import subprocess
import tempfile
import unittest

from daemon import UCMCTL
from second_client import (BIG, BUSY, DEMO, DENIED, INVALID, NOT_FOUND, OK, OTHER_UID, TIMEOUT_S, UCMD, Case, Daemon,
                           Refused, Region, keys)

DELAY_MS = 300


class Inject(ctypes.Structure):
    """tests/inject/inject.h"""
    _fields_ = [(name, ctypes.c_int) for name in ("read_error", "write_error", "sync_error", "reads", "writes")] + \
               [("read_from", ctypes.c_long)] + \
               [(name, ctypes.c_int) for name in ("short_by", "setup_error", "ring_error", "no_room", "failed",
                                                  "read_delay_ms")]


def injected(add_cleanup):
    """The faults of a daemon's disk, and the words before the daemon's command that let it have
    them."""
    library = UCMD + "-inject.so"
    assert os.path.exists(library), library + " is not there: make build-tests"
    with tempfile.NamedTemporaryFile(prefix="ucm-inject-", delete=False) as file:
        file.write(bytes(ctypes.sizeof(Inject)))
    add_cleanup(os.unlink, file.name)
    with open(file.name, "r+b") as opened:
        fault = Inject.from_buffer(mmap.mmap(opened.fileno(), 0))
    asan = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    return fault, ["env", "LD_PRELOAD=" + library, "UCM_INJECT=" + file.name, "ASAN_OPTIONS=" + asan]



class Traces(Case):
    """What tests with a good and a slow disk share."""

    def start(self, client, **choice):
        return client.call("trace", op=1, **choice)

    def records(self, client):
        """Ends the trace."""
        found, more = [], True
        while more:
            page = client.call("trace", op=2)
            found += page["records"]
            more = page["more"]
        return found

    def stored(self, count=8):
        client, ns, region = self.worker(BIG, count)
        self.assertEqual(set(region.dump(range(count), range(count))), {OK})
        return client, ns, region

    def ctl(self, *words):
        return subprocess.Popen([UCMCTL, "--socket", self.daemon.socket, "trace", *words], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def file(self):
        directory = tempfile.mkdtemp(prefix="trace.")
        path = os.path.join(directory, "trace.json")
        self.addCleanup(lambda: (os.path.exists(path) and os.unlink(path), os.rmdir(directory)))
        return path

    def traced(self, work, *words):
        """Runs work while ucmctl traces, and ends the trace by a signal. Returns the file and what
        ucmctl printed."""
        path = self.file()
        process = self.ctl("--out", path, "--seconds", "60", *words)
        self.until(lambda: os.path.exists(path) or process.poll() is not None, "ucmctl's trace")
        work()
        process.terminate()
        said, errors = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, 0, errors)
        with open(path, encoding="utf-8") as file:
            return json.load(file), said

    def check_rows(self, trace):
        """Events of one row are nested or apart."""
        rows = {}
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        for row in rows.values():
            for a in row:
                for b in row:
                    self.assertTrue(a[1] <= b[0] or b[1] <= a[0] or (a[0] <= b[0] and b[1] <= a[1])
                                    or (b[0] <= a[0] and a[1] <= b[1]), row)
        return rows


class Trace(Traces):
    def test_off_by_default_and_one_at_a_time(self):
        one, two = self.client(), self.client()
        self.refused(NOT_FOUND, one.call, "trace")
        self.assertTrue(self.start(one)["on"])
        self.refused(BUSY, self.start, two)
        self.refused(NOT_FOUND, two.call, "trace")
        self.assertFalse(one.call("trace", op=2)["on"])
        self.refused(BUSY, self.start, two)  # until its connection ends: records may be left
        one.close()
        self.until(lambda: self.begins(two), "the end of the first trace")
        self.assertTrue(self.start(two)["on"])

    def begins(self, client):
        try:
            return self.start(client)["on"]
        except Refused as error:
            self.assertEqual(error.code, BUSY)
            return False

    def test_operators_only(self):
        other = self.client(uid=OTHER_UID)
        self.refused(DENIED, self.start, other)
        self.refused(DENIED, other.call, "trace")

    def test_who_began_one_is_logged(self):
        self.start(self.client(), sample=77)
        lines = [line for line in self.daemon.log().splitlines() if " audit trace " in line and "sample=77" in line]
        self.assertEqual(len(lines), 1)
        self.assertIn(f"uid={os.getuid()} ", lines[0])
        self.assertIn(f"pid={os.getpid()} ", lines[0])

    def test_keys_are_of_everybody_or_of_a_tenant(self):
        client = self.client()
        for wrong in ({"sample": 2}, {"slower_us": 1}, {"request": "x"}):
            self.refused(INVALID, self.start, client, keys=True, **wrong)

    def test_spans_of_each_method(self):
        client, ns, region = self.stored()
        self.settled(client, ns)
        operator = self.client()
        self.start(operator)
        client.call("lookup", ns=ns, keys=keys(0, 1, "none"), request="cmpl-1")
        region.load(range(4), range(4), request="cmpl-1")
        region.dump(["new"], [7], request="cmpl-2")
        client.call("evict", ns=ns, tier=1)
        client.call("prefetch", ns=ns, keys=keys(4, 5))
        self.refused(INVALID, region.load, [0, 1], [0, 0])
        lookup, load, dump, prefetch, bad = self.records(operator)
        for record, method, n_keys, ok, request in ((lookup, "lookup", 3, 2, "cmpl-1"), (load, "load", 4, 4, "cmpl-1"),
                                                    (dump, "dump", 1, 1, "cmpl-2"), (prefetch, "prefetch", 2, 2, "")):
            self.assertEqual([record[name] for name in ("method", "n_keys", "ok", "request", "code", "ns")],
                             [method, n_keys, ok, request, 0, ns])
            self.assertEqual(record["pid"], os.getpid())
            for span in record["spans"]:
                self.assertGreaterEqual(span["start_us"], record["start_us"])
                self.assertLessEqual(span["start_us"] + span["us"], record["start_us"] + record["us"] + 1)
        self.assertEqual((bad["code"], bad["ok"]), (INVALID, 0))
        names = [[span["name"] for span in record["spans"]] for record in (lookup, load, dump, prefetch)]
        self.assertEqual(names, [["queue", "lookup", "answer"], ["queue", "lookup", "copy", "answer"],
                                 ["queue", "lookup", "copy", "answer"], ["queue", "lookup", "NVMe read", "answer"]])
        self.assertEqual([span["count"] for span in prefetch["spans"] if span["name"] == "NVMe read"], [2])
        self.assertEqual(load["bytes"], 4 * region.size)

    def test_choice(self):
        client, ns, _ = self.stored(1)
        operator = self.client()
        other = self.client(uid=OTHER_UID)
        theirs = other.open(dict(BIG, model=self.id()))
        for choice, wanted in (({}, 7), ({"request": "a-1"}, 2), ({"request": "nobody"}, 0), ({"sample": 3}, 3),
                               ({"tenant": other.limits["tenant"]}, 2), ({"tenant": other.limits["tenant"][::-1]}, 0),
                               ({"slower_us": 60000000}, 0)):
            self.start(operator, **choice)
            for request in ("a-1", "a-17", "a-2", "", "b"):
                client.call("lookup", ns=ns, keys=keys(0), request=request)
            for _ in range(2):
                other.call("lookup", ns=theirs, keys=keys(0))
            self.assertEqual(len(self.records(operator)), wanted, choice)

    def test_a_small_ring_says_what_it_lost(self):
        client, ns, _ = self.stored(1)
        operator = self.client()
        self.start(operator, bytes=65536)
        for _ in range(2000):
            client.call("lookup", ns=ns, keys=keys(0))
        page = operator.call("trace")
        self.assertEqual(page["written"] + page["lost"], 2000)
        self.assertGreater(page["lost"], 0)
        rest = self.records(operator) if page["more"] else []
        self.assertEqual(len(page["records"]) + len(rest), page["written"])
        self.start(operator, bytes=1)  # it has room for a record all the same
        client.call("lookup", ns=ns, keys=keys(0))
        self.assertEqual([record["number"] for record in self.records(operator)], [1])

    def test_a_trace_ends_by_itself(self):
        operator = self.client()
        self.start(operator, limit_ms=20)
        self.until(lambda: not operator.call("trace")["on"], "the end of a trace of 20 ms")

    def test_keys(self):
        client, ns, region = self.worker(BIG)
        operator = self.client()
        self.start(operator, keys=True)
        region.dump(range(3), range(3))
        client.call("lookup", ns=ns, keys=keys(0, 1, 2, 3))
        client.call("lookup", ns=ns, keys=keys(7), per_key=True)
        region.load([0], [0])  # adds nothing to what the lookup told
        region.call("load_prefix", [0, 1, 8], range(3))  # which is a lookup, too
        found = self.records(operator)
        self.assertEqual([(record["method"], record["keys"], record["per_key"]) for record in found],
                         [("dump", keys(0, 1, 2), False), ("lookup", keys(0, 1, 2, 3), False), ("lookup", keys(7), True),
                          ("load_prefix", keys(0, 1, 8), False)])
        self.assertEqual((found[1]["block_bytes"], found[1]["block_tokens"]), (region.size, BIG["block_tokens"]))

    def test_keys_come_once(self):
        """Only the spans of a dump's first layer and first part have keys. The other layers and
        parts have the same."""
        identity = dict(DEMO, model=self.id(), parts=2, layers=[2, 2])
        client, operator = self.client(), self.client()
        ns = client.open(identity)
        first, second = (Region(client, ns, identity, 4, part) for part in range(2))
        self.start(operator, keys=True)
        for region, name in ((second, 6), (first, 5)):
            for layer in range(2):
                self.assertEqual(region.dump([name], [0], layer=layer, layers=1), [OK])
        self.assertEqual([record["keys"] for record in self.records(operator)], [keys(5)])

    def test_keys_of_a_tenant(self):
        client, ns, _ = self.stored(1)
        operator = self.client()
        self.start(operator, keys=True, tenant="nobody")
        client.call("lookup", ns=ns, keys=keys(0))
        self.assertEqual(self.records(operator), [])

    def test_what_names_nothing_is_not_traced(self):
        client, ns, region = self.stored(1)
        operator = self.client()
        self.start(operator)
        self.refused(INVALID, client.call, "lookup", ns=ns, keys=b"short")
        self.refused(NOT_FOUND, client.call, "lookup", ns=ns + 100, keys=keys(0))
        client.call("region.unregister", region=region.number)
        self.refused(NOT_FOUND, region.load, [0], [0])
        self.assertEqual(self.records(operator), [])

    def test_a_request_under_way_survives_the_end_of_its_trace(self):
        client, ns, region = self.stored(32)
        operator = self.client()
        for turn in range(20):
            self.start(operator)
            begun = [region.begin("load", range(8), range(first, first + 8)) for first in range(0, 32, 8)]
            if turn % 2:
                operator.call("trace", op=2)
            for load in begun:
                client.wait(load)

    # ---- ucmctl ----

    def test_the_file(self):
        client, ns, region = self.stored()
        quote = 'cmpl-"\\\u00e9'

        def work():
            client.call("lookup", ns=ns, keys=keys(0), request="cmpl-1")
            for request in ("cmpl-1", quote, ""):
                region.load(range(8), range(8), request=request)
        trace, said = self.traced(work, "--json")
        self.check_rows(trace)
        names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
        tenant = client.limits["tenant"]
        self.assertEqual(sorted(names.values()),
                         sorted([f"cmpl-1 ({tenant})", f"{quote} ({tenant})", f"process {os.getpid()} ({tenant})"]))
        rows = [(names[event["pid"]], event["args"]["name"]) for event in trace["traceEvents"]
                if event["name"] == "thread_name"]
        self.assertIn((f"cmpl-1 ({tenant})", "lookup of part 0"), rows)
        self.assertIn((f"cmpl-1 ({tenant})", "load of part 0"), rows)
        self.assertEqual(trace["otherData"]["requests"], 4)
        self.assertEqual(json.loads(said)["requests"], 4)
        self.assertEqual(json.loads(said)["lost"], 0)

    def test_it_stops_by_itself_and_needs_a_file(self):
        process = self.ctl("--out", self.file(), "--seconds", "0.2")
        self.assertIn("0 requests", process.communicate(timeout=TIMEOUT_S)[0])
        self.assertEqual(process.returncode, 0)
        process = self.ctl()
        self.assertIn("--out", process.communicate(timeout=TIMEOUT_S)[1])
        self.assertEqual(process.returncode, 2)


class SlowDisk(Traces):
    """A daemon whose disk takes 0.3 s for a read."""

    @classmethod
    def setUpClass(cls):
        cls.fault, before = injected(cls.addClassCleanup)
        cls.daemon = Daemon(before=before, **{"nvme.io": "threads"})

    def test_a_slow_read_is_the_longest_span_of_its_load(self):
        client, ns, region = self.stored()
        self.settled(client, ns)

        def work():
            region.load(range(8), range(8), request="fast")
            client.call("evict", ns=ns, tier=1)
            self.fault.read_delay_ms = DELAY_MS
            region.load(range(8), range(8), request="slow")
            self.fault.read_delay_ms = 0
        trace, said = self.traced(work, "--slower", f"{DELAY_MS}ms")
        self.check_rows(trace)
        spans = sorted((event["dur"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X")
        self.assertEqual(spans[-1][1], "load")
        self.assertEqual(spans[-2][1], "NVMe read")
        self.assertGreaterEqual(spans[-2][0], DELAY_MS * 1000)
        self.assertEqual(trace["otherData"]["requests"], 1)
        self.assertRegex(said, r"slowest: load of slow, \d+\.\d+ ms, of them \d+\.\d+ ms NVMe read")


if __name__ == "__main__":
    unittest.main()
