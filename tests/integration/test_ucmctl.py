#!/usr/bin/python3
"""ucmctl against a real daemon: every command, its JSON, its exit status and its sentences.

$UCMD, $UCMCTL and $UCM_BENCH name other programs than those in build/.
"""

import json
import os
import pty
import shutil
import socket
import subprocess
import tempfile
import unittest

from daemon import TOP, UCMCTL, Daemon, ctl, until

UCM_BENCH = os.environ.get("UCM_BENCH", os.path.join(TOP, "build/ucm-bench"))

OK, ERROR, USAGE, NO_DAEMON, UNHEALTHY, CORRUPT = range(6)
COMMANDS = ["status", "stats", "namespace", "tenant", "ls", "inspect", "evict", "pin", "unpin", "purge", "verify",
            "shared", "trace", "health", "version", "config", "bypass"]
REQUESTS = 40
TIMEOUT_S = 120


def start(**more):
    """A daemon whose DRAM is all there."""
    daemon = Daemon(**{"arena.slab": "4MiB", "nvme.size": "128MiB", "mapping.size": "8MiB"} | more)
    until(lambda: "growing" not in ctl(daemon.socket, "status").stdout, "the arena")
    return daemon


def replay(socket, model="test", requests=REQUESTS):
    """Plays some requests, so that there is something to see. Returns the counts."""
    done = subprocess.run([UCM_BENCH, "--socket", socket, "--json", "--quiet", "replay", "--limit",
                           str(requests), "--block-bytes", "16KiB", "--fragment", "4KiB", "--model", model],
                          capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ucm-bench replay: {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


class CommandLine(unittest.TestCase):
    """Commands that need no daemon."""

    nowhere = "/nonexistent/ucmd.sock"

    def check(self, words, code, *sentences):
        done = ctl(self.nowhere, *words)
        self.assertEqual(done.returncode, code, done.stderr)
        for sentence in sentences:
            self.assertIn(sentence, done.stderr)
        self.assertEqual(done.stdout, "")

    def test_health_from_a_user_who_may_not_connect_is_not_failing(self):
        directory = tempfile.mkdtemp(prefix="ucmctl.")
        self.addCleanup(shutil.rmtree, directory)
        path = os.path.join(directory, "s")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            os.chmod(path, 0)
            os.chmod(directory, 0o755)
            for how in ([], ["--live"], ["--ready"]):
                done = ctl(path, "health", *how, **({"user": 1001} if os.geteuid() == 0 else {}))
                self.assertEqual(done.returncode, ERROR, done.stderr)
                self.assertIn("may not connect", done.stderr)

    def test_help_names_every_command_and_exit_code(self):
        done = subprocess.run([UCMCTL, "--help"], capture_output=True, text=True, check=True)
        for command in COMMANDS:
            self.assertRegex(done.stdout, rf"(?m)^  {command}\b")
        for code in range(6):
            self.assertRegex(done.stdout, rf"(?m)^  {code}  \w")
        self.assertEqual(done.stderr, "")

    def test_each_command_explains_itself_with_an_example(self):
        for command in COMMANDS:
            for words in ([command, "--help"], ["help", command], ["--help", command][::-1]):
                done = subprocess.run([UCMCTL, *words], capture_output=True, text=True, check=True)
                self.assertIn(f"Usage: ucmctl {command}", done.stdout)
                self.assertIn(f"  ucmctl {command}", done.stdout.split("\n", 1)[1])

    def test_wrong_usage_says_what_is_wrong(self):
        self.check([], USAGE, "no command")
        self.check(["frobnicate"], USAGE, "unknown command 'frobnicate'", "ucmctl --help")
        self.check(["--frobnicate", "status"], USAGE, "unknown option '--frobnicate'")
        self.check(["ls", "1", "--frobnicate=1"], USAGE, "unknown option '--frobnicate=1' for 'ls'",
                   "ucmctl ls --help")
        self.check(["status", "-x"], USAGE, "unknown option '-x' for 'status'")
        self.check(["ls"], USAGE, "'ls' wants NS")
        self.check(["ls", "1", "2"], USAGE, "'ls' does not take '2'")
        self.check(["inspect", "1"], USAGE, "'inspect' wants NS KEY")
        self.check(["ls", "1", "--limit"], USAGE, "--limit wants a value: N")
        self.check(["ls", "1", "--limit", "many"], USAGE, "--limit many", "a whole number")
        self.check(["ls", "1", "--limit", "0"], USAGE, "--limit 0")
        self.check(["ls", "1", "--limit", "-1"], USAGE, "--limit -1")
        self.check(["status", "--json=1"], USAGE, "--json takes no value")
        self.check(["--timeout", "soon", "status"], USAGE, "--timeout soon", "e.g. 30s")
        self.check(["--timeout", "2h", "status"], USAGE, "--timeout 2h", "1ms to 1h")
        self.check(["evict", "1", "--tier", "tape"], USAGE, "--tier tape", "all, dram, nvme or shared")
        self.check(["stats", "--count", "2"], USAGE, "--count goes with --watch")
        self.check(["stats", "--prometheus", "--json"], USAGE, "--prometheus")
        self.check(["namespace", "lost"], USAGE, "'namespace' wants nothing, or list, not 'lost'")
        self.check(["config", "load"], USAGE, "'config' wants nothing, or reload, not 'load'")
        self.check(["config", "reload", "--changed"], USAGE, "takes neither --import nor --changed")
        self.check(["config", "--import", "ucm.yaml", "--json"], USAGE, "takes neither --json nor --changed")
        self.check(["plan", "config.json", "--history", "2"], USAGE, "go with --length")

    def test_sizes_are_the_configuration_s(self):
        """Tests ucm-bench, because it has options for sizes and the same parser."""
        bench = os.environ.get("UCM_BENCH", os.path.join(os.path.dirname(UCMCTL), "ucm-bench"))
        for size, right in (("1GB", "write 1GiB"), ("4k", "write 4KiB"), ("1.5MiB", "a whole number"), ("1TiB", "64B to")):
            done = subprocess.run([bench, "load", "--block-bytes", size], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, USAGE, done.stderr)
            self.assertIn(right, done.stderr)

    def test_without_a_daemon_says_where_it_looked_and_what_to_do(self):
        for words in (["status"], ["stats"], ["health"], ["ls", "1"], ["purge", "1", "--yes"], ["verify"]):
            self.check(words, NO_DAEMON, f"no daemon listens on {self.nowhere}", "ucmd --set socket=",
                       "--socket", "$UCM_SOCKET")

    def test_the_socket_comes_from_the_environment_too(self):
        done = subprocess.run([UCMCTL, "health"], capture_output=True, text=True, check=False,
                              env={**os.environ, "UCM_SOCKET": "/nonexistent/from-env"})
        self.assertEqual(done.returncode, NO_DAEMON)
        self.assertIn("/nonexistent/from-env", done.stderr)

    def test_version_is_told_without_a_daemon(self):
        done = subprocess.run([UCMCTL, "--version"], capture_output=True, text=True, check=True)
        self.assertRegex(done.stdout, r"^ucmctl \d+\.\d+\.\d+\ncommit (unknown|[0-9a-f]{12}(-dirty)?), (gcc|clang) [^\n]+, with(out)? CUDA\n$")
        done = ctl(self.nowhere, "version", "--json")
        self.assertEqual(done.returncode, NO_DAEMON)
        self.assertIsNone(json.loads(done.stdout)["daemon"])

    def test_output_that_cannot_be_written_is_an_error(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([UCMCTL, "--help"], stdout=full, stderr=subprocess.PIPE, text=True,
                                  check=False)
        self.assertEqual(done.returncode, ERROR)
        self.assertIn("could not be written", done.stderr)


class WithDaemon(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = start()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.stop()

    def setUp(self):
        self.model = "test/" + self.id().rsplit(".", 1)[1]

    def run_ctl(self, *words, code=OK):
        done = self.daemon.ctl(*words)
        self.assertEqual(done.returncode, code, f"{words}: {done.stdout}{done.stderr}")
        return done

    def json(self, *words, code=OK):
        return json.loads(self.run_ctl("--json", *words, code=code).stdout)

    def filled(self):
        """A namespace of this test's own, with blocks; its entry of `namespaces`."""
        counts = replay(self.daemon.socket, self.model)
        self.assertEqual(counts["differing"], 0)
        found = [n for n in self.json("namespace", "list")["namespaces"] if n["model"] == self.model]
        self.assertEqual(len(found), 1)
        self.assertEqual(found[0]["blocks"], counts["dumped"])
        return found[0]

    def keys(self, ns, limit=1000000):
        return [b["key"] for b in self.json("ls", ns, "--limit", limit)["blocks"]]

    def wait_written(self, ns):
        """Until every block of the namespace lies on NVMe."""
        def written():
            blocks = self.json("ls", ns, "--limit", 1000000)["blocks"]
            return blocks and all(b["nvme"] for b in blocks)
        until(written, "blocks on NVMe")

    # ---- reading ----

    def test_status_fits_one_screen(self):
        text = self.run_ctl("status").stdout
        self.assertLess(len(text.splitlines()), 24)
        self.assertIn(f"pid {self.daemon.process.pid}", text)
        self.assertRegex(text, r"(?m)^health +ok$")
        self.assertRegex(text, r"(?m)^dram +.* of 16(\.0)? MiB used")
        self.assertRegex(text, r"(?m)^mappings +0 open, 0 B of 8(\.0)? MiB granted, 0 B referenced; 0 slabs wanted back, 0 blocks left out$")
        self.assertRegex(text, r"(?m)^nvme +.* used")
        status = self.json("status")
        self.assertEqual(status["status"], "ok")
        self.assertEqual(status["reasons"], [])
        self.assertEqual(status["socket"], self.daemon.socket)
        self.assertTrue(status["admin"])
        self.assertEqual(status["pid"], self.daemon.process.pid)
        self.assertEqual(status["tiers"][0]["name"], "nvme")
        self.assertFalse(status["devices"][0]["cuda"])

    def test_stats_has_every_metric_with_its_meaning(self):
        stats = self.json("stats")
        self.assertEqual(stats["pid"], self.daemon.process.pid)
        self.assertRegex(stats["instance"], r"^[0-9a-f]{32}$")
        self.assertGreaterEqual(stats["metrics"]["connections"], 1)
        table = self.run_ctl("stats").stdout
        for name in stats["metrics"]:
            self.assertRegex(table, rf"(?m)^{name} +[0-9.]+( [KMGT]?i?B)? .*\w")

    def test_stats_can_leave_zeros_out(self):
        metrics, histograms = self.run_ctl("stats", "--nonzero").stdout.split("\n\n")
        for line in metrics.splitlines()[1:]:
            self.assertNotEqual(line.split()[1], "0", line)
        for line in histograms.splitlines()[1:]:
            self.assertRegex(line, r"^[a-z_]+ .* [1-9][0-9]* +[0-9.]+ [um]?s +[0-9.]+ [um]?s$")

    def test_watch_tells_what_changed(self):
        watch = subprocess.Popen([UCMCTL, "--socket", self.daemon.socket, "--json", "stats", "--watch", "0.5",
                                  "--count", "6"], stdout=subprocess.PIPE, text=True)
        counts = replay(self.daemon.socket, self.model)
        out, _ = watch.communicate(timeout=TIMEOUT_S)
        self.assertEqual(watch.returncode, OK)
        lines = [json.loads(line) for line in out.splitlines()]
        self.assertEqual(len(lines), 6)
        seen = sum(line["metrics"]["lookups"] for line in lines)
        self.assertLessEqual(seen, counts["requests"])
        text = self.run_ctl("stats", "--watch", "100ms", "--count", "2").stdout.splitlines()
        self.assertEqual(len(text), 3)
        self.assertIn("load GB/s", text[0])

    def test_namespaces_and_ls_agree(self):
        ns = self.filled()
        self.assertRegex(ns["fingerprint"], r"^[0-9a-f]{64}$")
        self.assertEqual((ns["parts"], ns["layer_bytes"], ns["key_bytes"]), (1, 4096, 32))
        keys = self.keys(ns["ns"])
        self.assertEqual(len(keys), ns["blocks"])
        self.assertEqual(len(set(keys)), len(keys))
        table = self.run_ctl("namespace", "list").stdout
        self.assertRegex(table, rf"(?m)^ *{ns['ns']} +{ns['fingerprint'][:12]} .*{self.model}")

    def test_ls_goes_on_where_it_ended(self):
        ns = self.filled()["ns"]
        everything = self.keys(ns)
        first = self.json("ls", ns, "--limit", 10)
        self.assertEqual(len(first["blocks"]), 10)
        self.assertNotEqual(first["next"], 0)
        rest = self.json("ls", ns, "--limit", 1000000, "--cursor", first["next"])
        self.assertEqual(rest["next"], 0)
        self.assertEqual(sorted(b["key"] for b in first["blocks"] + rest["blocks"]), sorted(everything))
        self.assertIn("--cursor", self.run_ctl("ls", ns, "--limit", 10).stdout)
        self.assertEqual(len(self.run_ctl("ls", ns, "--limit", 1000000).stdout.splitlines()),
                         len(everything) + 1)

    def test_a_namespace_is_named_by_a_prefix_of_its_fingerprint(self):
        ns = self.filled()
        self.assertEqual(self.json("ls", ns["fingerprint"][:12])["ns"], ns["ns"])
        self.assertEqual(self.json("ls", ns["fingerprint"].upper())["ns"], ns["ns"])
        for name in ("99999999", "ffffffffffffffff", "x", "", ns["fingerprint"][:2] + "z"):
            done = self.run_ctl("ls", name, code=ERROR)
            self.assertIn(f"no namespace '{name}'", done.stderr)
            self.assertEqual(done.stdout, "")

    def test_inspect_shows_one_block(self):
        ns = self.filled()["ns"]
        self.wait_written(ns)
        key = self.keys(ns, 1)[0]
        block = self.json("inspect", ns, key)
        self.assertEqual(block["key"], key)
        self.assertTrue(block["complete"])
        self.assertFalse(block["pinned"])
        self.assertEqual(len(block["parts"]), 1)
        self.assertEqual(block["parts"][0]["nvme"], "ready")
        self.assertEqual(block["parts"][0]["shared"], "none")
        self.assertIn(key, self.run_ctl("inspect", ns, key).stdout)

    def test_a_key_that_is_not_there_or_no_key(self):
        ns = self.filled()["ns"]
        self.assertIn("NOT", self.run_ctl("inspect", ns, "00" * 32, code=ERROR).stderr.upper())
        for key in ("00" * 31, "zz" * 32, "00" * 33, "-"):
            done = self.run_ctl("inspect", ns, key, code=USAGE)
            self.assertIn(f"'{key}' is no key", done.stderr)
            self.assertIn("64 hexadecimal digits", done.stderr)

    def test_without_a_shared_tier_there_are_no_roots(self):
        self.assertEqual(self.json("shared")["shared_roots"], [])
        self.assertIn("shared.roots", self.run_ctl("shared").stdout)

    def test_health_and_version(self):
        self.assertEqual(self.run_ctl("health").stdout, "ok\n")
        self.assertEqual(self.json("health"), {"status": "ok", "reasons": []})
        self.assertRegex(self.run_ctl("version").stdout, r"(?m)^daemon +ucmd \d")
        self.assertRegex(self.json("version")["daemon"], r"^ucmd \d")

    # ---- changing ----

    def test_pin_keeps_blocks_until_unpin(self):
        ns = self.filled()["ns"]
        keys = self.keys(ns)
        self.assertEqual(self.json("pin", ns, *keys[:3])["blocks"], 3)
        self.assertEqual(self.json("pin", ns, keys[0], "00" * 32)["missing"], 1)
        self.assertTrue(self.json("inspect", ns, keys[0])["pinned"])
        self.assertEqual(self.json("status")["metrics"]["blocks_pinned"], 3)
        self.run_ctl("evict", ns, "--yes")
        self.wait_gone(ns, 3)
        self.assertEqual(sorted(self.keys(ns)), sorted(keys[:3]))
        self.assertEqual(self.json("unpin", ns)["blocks"], 3)
        self.run_ctl("evict", ns, "--yes")
        self.wait_gone(ns, 0)

    def wait_gone(self, ns, left):
        """Blocks that are evicted while they are written go when the write is done."""
        until(lambda: len(self.keys(ns)) <= left, "evictions")
        self.assertEqual(len(self.keys(ns)), left)

    def test_evict_drops_what_it_is_told(self):
        ns = self.filled()["ns"]
        self.wait_written(ns)
        keys = self.keys(ns)
        self.assertIn("2 blocks evicted", self.run_ctl("evict", ns, *keys[:2]).stdout)
        self.assertNotIn(keys[0], self.keys(ns))
        self.assertEqual(self.json("evict", ns, keys[0]), {"ns": ns, "blocks": 0, "busy": 0, "missing": 1})
        self.run_ctl("evict", ns, "--tier", "dram", "--yes")
        for block in self.json("ls", ns, "--limit", 1000)["blocks"]:
            self.assertEqual((block["dram"], block["nvme"]), (0, 1))

    def test_what_destroys_wants_yes_when_nobody_can_be_asked(self):
        ns = self.filled()
        for words in (["evict", ns["ns"]], ["purge", ns["ns"]]):
            done = self.run_ctl(*words, code=USAGE)
            self.assertIn("--yes", done.stderr)
        self.assertEqual(len(self.keys(ns["ns"])), ns["blocks"])

    def answer(self, ns, reply):
        ours, theirs = pty.openpty()
        process = subprocess.Popen([UCMCTL, "--socket", self.daemon.socket, "purge", str(ns)], stdin=theirs,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        os.write(ours, reply)
        out, err = process.communicate(timeout=TIMEOUT_S)
        os.close(ours)
        os.close(theirs)
        return process.returncode, out, err

    def test_on_a_terminal_it_asks(self):
        ns = self.filled()
        code, _, err = self.answer(ns["ns"], b"n\n")
        self.assertEqual(code, ERROR)
        self.assertIn(f"purge all {ns['blocks']} blocks of namespace {ns['ns']} ({self.model})? [y/N]", err)
        self.assertIn("nothing was done", err)
        self.assertEqual(len(self.keys(ns["ns"])), ns["blocks"])
        code, out, _ = self.answer(ns["ns"], b"y\n")
        self.assertEqual(code, OK)
        self.assertIn("purged", out)
        self.wait_gone(ns["ns"], 0)

    def test_verify_finds_nothing_wrong_with_what_is_sound(self):
        ns = self.filled()
        self.wait_written(ns["ns"])
        done = self.json("verify", ns["ns"], "--page", 16)
        self.assertEqual(done["checked"], ns["blocks"])
        self.assertEqual((done["corrupt"], done["failed"]), (0, 0))
        self.assertRegex(self.run_ctl("verify").stdout, r"^\d+ parts checked: 0 corrupt, 0 unreadable")


class Corruption(unittest.TestCase):
    def setUp(self):
        self.daemon = start()

    def tearDown(self):
        self.daemon.stop()

    def flip_bits(self):
        """Flips bits in every written 4 KiB page, except in headers at the file's start."""
        for directory, _, names in os.walk(self.daemon.store):
            for name in names:
                path = os.path.join(directory, name)
                if os.path.getsize(path) < 1 << 20:
                    continue
                with open(path, "r+b") as file:
                    for at in range(8 << 20, 64 << 20, 4096):
                        file.seek(at + 2000)
                        byte = file.read(1)
                        if byte in (b"", b"\0"):
                            continue
                        file.seek(at + 2000)
                        file.write(bytes([byte[0] ^ 0x40]))
                    os.fsync(file.fileno())

    def test_verify_finds_flipped_bits_and_says_so_with_its_exit_code(self):
        replay(self.daemon.socket, requests=200)
        until(lambda: all(b["nvme"] for b in json.loads(self.daemon.ctl("--json", "ls", 1, "--limit", 1000000).stdout)["blocks"]), "blocks on NVMe")
        self.flip_bits()
        done = self.daemon.ctl("--json", "verify")
        self.assertEqual(done.returncode, CORRUPT, done.stdout + done.stderr)
        counts = json.loads(done.stdout)
        self.assertGreater(counts["corrupt"], 0)
        # Blocks that were found corrupt have been dropped.
        done = self.daemon.ctl("--json", "verify")
        self.assertEqual(done.returncode, OK, done.stdout + done.stderr)
        # And none of it is ever served.
        self.assertEqual(replay(self.daemon.socket, requests=200)["differing"], 0)

    def test_the_daemon_going_away_is_told(self):
        self.daemon.process.kill()
        self.daemon.process.wait()
        done = self.daemon.ctl("status")
        self.assertEqual(done.returncode, NO_DAEMON)
        self.assertIn("no daemon listens", done.stderr)


if __name__ == "__main__":
    unittest.main()
