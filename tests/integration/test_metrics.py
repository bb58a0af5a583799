#!/usr/bin/python3
"""The text for Prometheus, from a real daemon that has served requests, checked by promtool's
rules. test_observe.py asks promtool itself.

$UCMD, $UCMCTL and $UCM_BENCH name other programs than those in build/.
"""

import json
import os
import pathlib
import re
import unittest

from test_ucmctl import replay, start

TOP = pathlib.Path(__file__).resolve().parents[2]
SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? ([-+0-9.einfEINF]+)')
# Suffixes that name another unit than the base one, or the type.
NO_SUFFIXES = ("_us", "_ms", "_ns", "_microseconds", "_milliseconds", "_kib", "_mib", "_percent", "_counter", "_gauge")


class Family:
    def __init__(self, name, kind):
        self.name, self.kind = name, kind
        self.samples = {}  # (name, labels): value


def families(text):
    """Parses the 0.0.4 text, and fails where a scraper would."""
    result, helped, family = {}, set(), None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            assert name not in helped and words.strip(), line
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in result and name in helped, line
            family = result[name] = Family(name, kind)
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            base = re.sub("_(bucket|sum|count)$", "", name) if family.kind == "histogram" else name
            assert base == family.name, f"{line} stands after {family.name}"
            assert (name, labels) not in family.samples, line
            family.samples[name, labels] = float(value)
    return result


class Exposition(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = start(**{"arena.size": "64MiB"})
        replay(cls.daemon.socket, requests=300)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.stop()

    def text(self):
        done = self.daemon.ctl("stats", "--prometheus")
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_names_say_unit_and_kind(self):
        for family in families(self.text()).values():
            self.assertRegex(family.name, r"^ucmd_[a-z]+(_[a-z]+)*$")
            self.assertIn(family.kind, ("counter", "gauge", "histogram"))
            self.assertEqual(family.name.endswith("_total"), family.kind == "counter", family.name)
            self.assertFalse(family.name.endswith(NO_SUFFIXES), family.name)
            if "_bytes" in family.name or "_seconds" in family.name:
                self.assertRegex(family.name, r"_(bytes|seconds)(_total)?$")
            if family.kind == "histogram":
                self.assertTrue(family.name.endswith("_seconds"), family.name)
            self.assertTrue(family.samples, family.name)

    def test_histograms_add_up(self):
        for family in families(self.text()).values():
            if family.kind != "histogram":
                continue
            buckets = {}
            for (name, labels), value in family.samples.items():
                if name.endswith("_bucket"):
                    rest, bound = re.fullmatch(r'(.*?),?le="([^"]+)"', labels).groups()
                    buckets.setdefault(rest, []).append((float(bound), value))
            for rest, pairs in buckets.items():
                self.assertEqual(pairs, sorted(pairs), family.name)
                self.assertEqual([v for _, v in pairs], sorted(v for _, v in pairs), family.name)
                self.assertEqual(pairs[-1][0], float("inf"))
                self.assertEqual(family.samples[f"{family.name}_count", rest or None], pairs[-1][1])
                self.assertIn((f"{family.name}_sum", rest or None), family.samples)

    def test_every_metric_of_stats_is_in_the_text(self):
        text = families(self.text())
        self.assertEqual(text["ucmd_uptime_seconds"].kind, "gauge")
        self.assertEqual(len(text["ucmd_tier_capacity_bytes"].samples), 1)
        self.assertEqual(len(text["ucmd_device_failed"].samples), 1)
        self.assertRegex(next(iter(text["ucmd_build_info"].samples))[1],
                         '^version="[0-9.]+",commit="[^"]+",options="[^"]+",policy="[^"]+"$')
        self.assertEqual(text["ucmd_health"].samples["ucmd_health", 'state="ok"'], 1)
        self.assertEqual(sum(text["ucmd_health"].samples.values()), 1)
        # A name in the text is that of the wire, except for its suffix and the place of its unit.
        units = {"total", "bytes", "seconds", "us", "ratio"}
        words = {tuple(sorted(set(name.split("_")) - {"ucmd", *units})) for name in text}
        for name in self.daemon.metrics():
            self.assertIn(tuple(sorted(set(name.split("_")) - units)), words, name)
        self.assertGreater(text["ucmd_lookups_total"].samples["ucmd_lookups_total", None], 0)

    def test_what_was_served_is_in_the_histograms(self):
        """The replay's lookups, loads and dumps count once each, in the wire's figures and in the
        text's."""
        stats, text = self.daemon.stats(), families(self.text())
        metrics = stats["metrics"]
        count = {}
        for h in stats["histograms"]:
            count[h["name"]] = count.get(h["name"], 0) + h["count"]
            self.assertEqual(h["count"], sum(h["buckets"][1::2]))
            if h["count"] > 0:
                self.assertTrue(0 < h["p50_us"] <= h["p99_us"] <= max(h["buckets"][0::2]), h)
                self.assertGreater(h["sum_ns"], 0)
        self.assertEqual(count["lookup"], metrics["lookups"])
        self.assertEqual(count["nvme_read"], metrics["load_blocks_nvme"])
        self.assertGreater(count["load"], 0)
        self.assertGreater(count["dump"], 0)
        for name, n in count.items():
            family = text[f"ucmd_{name}_seconds"]
            told = sum(v for (sample, _), v in family.samples.items() if sample.endswith("_count"))
            if name == "loop_iteration":  # the event loop runs to answer, too
                self.assertGreater(told, 0)
            else:
                self.assertEqual(told, n)

    def test_what_more_memory_would_bring(self):
        stats, text = self.daemon.stats(), families(self.text())
        metrics, reuse = stats["metrics"], stats["reuse"]
        self.assertEqual(reuse["references"], metrics["lookup_keys"])
        self.assertEqual(reuse["factor_permille"], [500, 1000, 2000, 4000])
        self.assertEqual([curve["tiers"] for curve in reuse["curves"]], ["dram", "dram_nvme"])
        samples = text["ucmd_reuse_hit_ratio"].samples
        self.assertEqual(len(samples), 8)
        for curve in reuse["curves"]:
            self.assertEqual(curve["hit_permille"], sorted(curve["hit_permille"]))
            self.assertEqual(samples["ucmd_reuse_hit_ratio", f'tiers="{curve["tiers"]}",factor="2"'],
                             curve["hit_permille"][2] / 1000)
        # All blocks fit in DRAM, so that the estimate at today's size is what was counted.
        self.assertEqual(metrics["arena_evicted_blocks"], 0)
        self.assertAlmostEqual(reuse["curves"][0]["hit_permille"][1] / 1000,
                               metrics["lookup_hits"] / metrics["lookup_keys"], delta=0.15)
        status = self.daemon.ctl("status").stdout
        self.assertRegex(status, r"(?m)^reuse      dram: [0-9.]+ % .* 2x \(128 MiB\) [0-9.]+ %, 4x \(256 MiB\) [0-9.]+ %$")

    def test_a_tenant_s_counters_are_the_daemon_s_where_there_is_one_tenant(self):
        stats = self.daemon.stats()
        (tenant,) = stats["tenants"]
        self.assertEqual(tenant["name"], f"uid:{os.getuid()}")
        for name in ("lookups", "lookup_keys", "lookup_hits", "lookup_hits_dram", "lookup_hits_shared", "load_bytes",
                     "dump_bytes"):
            self.assertEqual(tenant[name], stats["metrics"][name], name)
        self.assertEqual(tenant["evicted_blocks"], stats["metrics"]["arena_evicted_blocks"])
        self.assertEqual(tenant["blocks"], stats["metrics"]["blocks"] + stats["metrics"]["blocks_partial"])
        self.assertGreaterEqual(stats["metrics"]["lookup_hits"], stats["metrics"]["lookup_hits_dram"])
        self.assertGreater(stats["metrics"]["lookup_hits_dram"], 0)
        (ns,) = json.loads(self.daemon.ctl("--json", "namespace", "list").stdout)["namespaces"]
        for name in ("lookups", "lookup_keys", "lookup_hits", "loads", "load_bytes", "dumps", "dump_bytes",
                     "evicted_blocks"):
            self.assertEqual(ns[name], tenant[name], name)
        for name in ("lookup", "load"):
            times, daemon = tenant[f"{name}_times"], [h for h in stats["histograms"] if h["name"] == name]
            self.assertGreater(times["count"], 0)
            self.assertTrue(0 < times["p50_us"] <= times["p99_us"])
            self.assertEqual((times["count"], times["sum_ns"]), (sum(h["count"] for h in daemon), sum(h["sum_ns"] for h in daemon)))
            self.assertEqual(sum(times["buckets"][1::2]), times["count"])
        sample = families(self.text())["ucmd_tenant_load_bytes_total"].samples
        self.assertEqual(list(sample.values()), [tenant["load_bytes"]])


class Page(unittest.TestCase):
    """docs/metrics.md against the shipped alerts; tests/unit/proto/test_metrics_docs.c compares it with the tables."""

    @staticmethod
    def items():
        """Of lists: each in one line."""
        text = re.sub(r"\n  (?=\S)", " ", (TOP / "docs/metrics.md").read_text())
        return re.findall(r"^- (.*)", text, re.M)

    def test_each_alert_stands_with_the_metrics_that_it_looks_at(self):
        rows = {}
        for item in self.items():
            if item.startswith("`ucmd_"):
                rows[item.split("`")[1]] = set(re.findall(r"`(Ucmd\w+)`", (re.search(r"; alerts? ((?:, |`Ucmd\w+`)+)", item) or ["", ""])[1]))
        rules = re.findall(r"- alert: (\w+)\n +expr: (.*)", (TOP / "config/observe/alerts.yml").read_text())
        self.assertTrue(rules)
        expected = {name: set() for name in rows}
        for alert, expression in rules:
            for name in re.findall(r"ucmd_\w+", expression):
                name = re.sub("_seconds_bucket$", "_seconds", name)
                if name in expected:
                    expected[name].add(alert)
        self.assertEqual(rows, expected)

    def test_each_alert_has_its_severity_and_time(self):
        page = (TOP / "docs/metrics.md").read_text()
        shown = {}
        for severity, text in re.findall(r"^(Critical|Warning):\n\n(.*?\n)\n", page, re.M | re.S):
            for name, wait, meaning in re.findall(r"^- \[(\w+)\]\([^)]*\)(?:, (\w+))?: (.*)", text, re.M):
                shown[name] = severity.lower(), wait
                self.assertRegex(meaning, r"\w+ \w+")
        rules = re.findall(r"- alert: (\w+)\n(.*?)annotations:", (TOP / "config/observe/alerts.yml").read_text(), re.S)
        self.assertEqual(shown, {name: (re.search(r"severity: (\w+)", rule)[1], (re.search(r"for: (\w+)", rule) or ["", ""])[1]) for name, rule in rules})


if __name__ == "__main__":
    unittest.main()
