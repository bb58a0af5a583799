#!/usr/bin/python3
"""ucmctl top against a real daemon: for programs, without a terminal, and live on one, which it leaves as it was."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
import unittest

from daemon import TOP, UCMCTL, Daemon, ctl, script_of

UCM_BENCH = os.environ.get("UCM_BENCH", os.path.join(TOP, "build/ucm-bench"))
TIMEOUT_S = 120
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *words, rows=24, columns=120):
        self.ours, self.theirs = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(words, stdin=self.theirs, stdout=self.theirs, stderr=subprocess.PIPE, start_new_session=True,
                                        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        self.text = ""

    def resize(self, rows, columns):
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, pattern):
        """The output since the last call, up to what matches."""
        deadline = time.monotonic() + 60
        while True:
            found = re.search(pattern, self.text, re.S)
            if found:
                seen, self.text = self.text[:found.end()], self.text[found.end():]
                return seen
            if time.monotonic() > deadline:
                raise AssertionError(f"no {pattern!r} in {self.text[-2000:]!r}")
            if select.select([self.ours], [], [], 0.1)[0]:
                self.text += os.read(self.ours, 65536).decode(errors="replace")

    def write(self, text):
        os.write(self.ours, text.encode())

    def same_as_before(self):
        return termios.tcgetattr(self.theirs) == self.before

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        os.close(self.ours)
        os.close(self.theirs)


class Top(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.addClassCleanup(cls.daemon.stop)

    def words(self, *words):
        return [UCMCTL, "--socket", self.daemon.socket, "top", *map(str, words)]

    def top(self, *words):
        return self.daemon.ctl("top", *words, check=True).stdout

    def replay(self, stop=None):
        while True:
            subprocess.run([UCM_BENCH, "--socket", self.daemon.socket, "--quiet", "replay", "--limit", "200", "--block-bytes", "16KiB",
                            "--fragment", "4KiB", "--model", "of the test"], stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)
            if stop is None or stop.is_set():
                return

    def test_programs_get_a_line_a_frame(self):
        stop = threading.Event()
        player = threading.Thread(target=self.replay, args=(stop,))
        player.start()
        try:
            lines = self.top("--json", "--interval", 0.5, "--count", 4).splitlines()
        finally:
            stop.set()
            player.join()
        self.assertEqual(len(lines), 4)
        frames = [json.loads(line) for line in lines]
        for frame in frames:
            self.assertGreater(frame["seconds"], 0.3)
            self.assertIn(frame["health"], ("ok", "degraded"))  # where the disk is slower than the dumps
        busy = max(frames, key=lambda f: f["load_bytes_per_second"])
        self.assertGreater(busy["load_bytes_per_second"], 0)
        self.assertTrue(0 < busy["hit_ratio"] <= 1)
        self.assertGreater(busy["load"]["count"], 0)
        self.assertLessEqual(busy["load"]["p50_us"], busy["load"]["p99_us"])
        self.assertEqual({t["tier"] for t in busy["tiers"]}, {"dram", "nvme"})
        for curve in busy["reuse"]:
            self.assertTrue(0 <= curve["hit_ratio"] <= curve["hit_ratio_twice"] <= curve["hit_ratio_four_times"] <= 1, curve)
        (tenant,) = busy["tenants"]
        (ns,) = busy["namespaces"]
        self.assertGreater(tenant["lookup"]["count"], 0)
        self.assertLessEqual(tenant["load"]["p50_us"], tenant["load"]["p99_us"])
        self.assertEqual((ns["model"], ns["tenant"]), ("of the test", tenant["tenant"]))
        # Only this namespace loads. The sums agree, except for loads that ended between the two
        # calls of a sample.
        self.assertAlmostEqual(ns["load_bytes_per_second"] / busy["load_bytes_per_second"], 1, delta=0.5)

    def test_without_a_terminal_it_prints_one_frame(self):
        self.replay()
        text = self.top("--interval", 0.2)
        self.assertEqual(text.count("ucmd 0"), 1)
        self.assertNotIn("\x1b", text)
        for word in ("lookup", "load", "dump", "waiting", "dram", "nvme"):
            self.assertRegex(text, rf"(?m)^{word} +")
        self.assertRegex(text, r"(?m)^TENANT +LOAD GB/s .*LOOKUP P50 +P99 +LOAD P50 +P99 ")
        self.assertRegex(text, r"(?m)^ *\d+ .*of the test$")

    def test_no_daemon(self):
        done = ctl("/nonexistent/s", "top")
        self.assertEqual(done.returncode, 3)
        self.assertIn("no daemon listens", done.stderr)

    def live(self, *words, **size):
        terminal = Terminal(*self.words("--interval", 0.2, *words), **size)
        self.addCleanup(terminal.close)
        terminal.until(re.escape(ENTER))
        terminal.until("lookup +")
        self.assertFalse(terminal.same_as_before())
        return terminal

    def ended(self, terminal, status):
        self.assertEqual(terminal.process.wait(30), status)
        terminal.until(re.escape(LEAVE))
        self.assertTrue(terminal.same_as_before())
        self.assertEqual(terminal.process.stderr.read(), b"")

    def test_q_ends_it(self):
        terminal = self.live()
        terminal.write("q")
        self.ended(terminal, 0)

    def test_a_count_ends_it(self):
        terminal = Terminal(*self.words("--interval", 0.2, "--count", 2))
        self.addCleanup(terminal.close)
        self.ended(terminal, 0)

    def test_signals_leave_the_terminal_as_it_was(self):
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            terminal = self.live()
            terminal.process.send_signal(number)
            self.ended(terminal, -number)
        terminal = self.live()
        terminal.write("\x03")
        self.ended(terminal, -signal.SIGINT)

    def test_it_stops_and_goes_on(self):
        """Its process group is orphaned here, so the kernel ignores SIGTSTP. The test checks what
        it does before and after."""
        terminal = self.live()
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until(re.escape(LEAVE))
        terminal.until(re.escape(ENTER))
        terminal.until("lookup +")
        terminal.write("q")
        self.ended(terminal, 0)

    def test_it_fits_the_terminal(self):
        terminal = self.live(rows=6, columns=40)
        frame = terminal.until(r"\x1b\[H.*?\x1b\[H")
        lines = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", frame.split("\x1b[H")[-2]).split("\r\n")
        self.assertEqual(len(lines), 6)
        self.assertLessEqual(max(map(len, [line.strip("\r") for line in lines])), 40)
        terminal.resize(24, 120)
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.until("dram .*nvme ")
        terminal.write("q")
        self.ended(terminal, 0)


class Frames(unittest.TestCase):
    """The changes between two samples, in as few fields as a frame needs."""

    script = script_of("client/ctl/ucmctl-top")

    def sample(self, ms, keys=0, hits=0, loaded=0, slow=0, instance="i"):
        """slow: how many lookups took 8 ms; 92 others took 1 us. Each of three namespaces has
        loaded half as much as the one before it."""
        names = ("requests_total", "requests_busy", "requests_active", "lookups", "dump_bytes", "arena_evicted_blocks", "arena_evicted_lost",
                 "nvme_read_bytes", "nvme_written_bytes", "slot_waiters", "slot_wait_oldest_us", "arena_bytes_used", "arena_bytes_total")
        metrics = dict.fromkeys(names, 0) | {"lookup_keys": keys, "lookup_hits": hits, "load_bytes": loaded}
        times = {"buckets": [1, 92, 8192, slow]}
        return ({"instance": instance, "uptime_ms": ms, "metrics": metrics, "histograms": [{"name": "lookup", "tier": "", **times}],
                 "tenants": [{"name": "a", "load_bytes": loaded, "lookup_times": times}]},
                [{"ns": n, "tenant": "a", "model": "m", "dram_bytes": 100 * n, "load_bytes": loaded >> n} for n in (1, 2, 3)])

    def frame(self, before, after):
        return self.script.frame_of(self.sample(**before), self.sample(**after))

    def test_rates_are_of_the_time_between(self):
        f = self.frame({"ms": 1000, "keys": 100, "hits": 100, "loaded": 1 << 20}, {"ms": 3000, "keys": 300, "hits": 150, "loaded": 5 << 20})
        self.assertEqual((f["seconds"], f["load_bytes_per_second"], f["hit_ratio"]), (2, 2 << 20, 0.25))
        self.assertEqual((f["tenants"][0]["load_bytes_per_second"], f["tenants"][0]["hit_ratio"]), (2 << 20, None))
        fresh = self.script.rows([], [{"ns": 1, "load_bytes": 4 << 20}], 2, {"ns": "ns"})
        self.assertEqual(fresh[0]["load_bytes_per_second"], 2 << 20, "one that is new has done it all in this time")

    def test_times_are_of_what_was_counted_between(self):
        f = self.frame({"ms": 1000, "slow": 5}, {"ms": 2000, "slow": 15})
        for times in (f["lookup"], f["tenants"][0]["lookup"]):
            self.assertEqual(times["count"], 10)
            self.assertTrue(6144 < times["p50_us"] < times["p99_us"] <= 8192, times)
        self.assertEqual(f["load"]["p99_us"], None)
        bounds = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40]
        self.assertEqual([self.script.below(bound) for bound in bounds], [0, *bounds[:-1]])

    def test_the_busiest_is_first_and_idle_ones_by_what_they_hold(self):
        for loaded, order in ((1 << 20, [1, 2, 3]), (0, [3, 2, 1])):
            f = self.frame({"ms": 1000}, {"ms": 2000, "loaded": loaded})
            self.assertEqual([row["ns"] for row in f["namespaces"]], order)

    def test_a_restart_has_no_rates(self):
        self.assertIsNone(self.frame({"ms": 1000}, {"ms": 9000, "instance": "b"}))
        self.assertIsNone(self.frame({"ms": 1000}, {"ms": 1000}))


class Gone(unittest.TestCase):
    def test_a_daemon_that_went_away_is_waited_for(self):
        daemon = Daemon()
        self.addCleanup(daemon.stop)
        terminal = Terminal(UCMCTL, "--socket", daemon.socket, "top", "--interval", "0.2")
        self.addCleanup(terminal.close)
        terminal.until("lookup +")
        daemon.kill()
        terminal.until("does not answer")
        os.unlink(daemon.socket)
        again = Daemon(directory=daemon.directory)
        self.addCleanup(again.stop)
        terminal.until("lookup +")
        terminal.write("q")
        self.assertEqual(terminal.process.wait(30), 0)


if __name__ == "__main__":
    unittest.main()
