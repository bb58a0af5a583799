#!/usr/bin/python3
"""ucmctl's commands about the host: doctor; and each command's JSON."""

import json
import os
import re
import subprocess
import tempfile
import unittest

from daemon import TOP, UCMCTL, Daemon, ctl, until

UCM_BENCH = os.environ.get("UCM_BENCH", os.path.join(TOP, "build/ucm-bench"))
NOWHERE = "/nonexistent/ucmd.sock"
TIMEOUT_S = 120
# Public numbers of Llama-3.1-70B.
LLAMA = {"model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8,
         "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
# For GPUs whose memory is the host's.
DRIVER = os.path.join(TOP, "tests/integration/driver/libcuda.c")


#: Other tests have one thread, or only the threads of test_with_a_daemon and of the round trip.
once = unittest.skipIf(os.environ.get("UCM_PHASE") == "tsan", "no thread that the two others lack")
plainly = unittest.skipUnless(os.environ.get("UCM_PHASE", "plain") == "plain", "no code that the two others lack")


class Doctor(unittest.TestCase):
    """A check's finding depends on the machine. That the check runs, and its finding for a fault
    made here, do not."""

    def findings(self, *words, socket=NOWHERE):
        done = ctl(socket, "doctor", "--json", *words)
        self.assertEqual(done.stderr, "")
        document = json.loads(done.stdout)
        verdicts = [f["verdict"] for f in document["findings"]]
        worst = "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"
        self.assertEqual((document["verdict"], done.returncode), (worst, {"ok": 0, "warn": 4, "fail": 1}[worst]))
        for finding in document["findings"]:
            if finding["verdict"] in ("warn", "fail"):
                self.assertTrue(finding["remedy"], finding)
        return {f["check"]: f for f in document["findings"]}

    @plainly
    def test_without_a_daemon(self):
        found = self.findings("--quick")
        self.assertLessEqual({"daemon", "memlock", "descriptors", "io_uring", "numa", "huge pages", "memory", "round trip"}, {*found})
        self.assertTrue({"gpu", "gpu driver"} & {*found})
        self.assertEqual(found["daemon"]["verdict"], "skip")
        self.assertEqual(found["round trip"]["text"], "not tried: no daemon")

    def test_with_a_daemon(self):
        daemon = Daemon()
        self.addCleanup(daemon.stop)
        found = self.findings(socket=daemon.socket)
        self.assertEqual(found["daemon"]["verdict"], "ok")
        self.assertEqual(found["round trip"]["verdict"], "ok")
        self.assertRegex(found["round trip"]["text"], r"equal: [\d.]+ GB/s out, [\d.]+ GB/s in")
        self.assertIn("GB/s", found["dram speed"]["text"])
        # It measures next to the daemon's cache file, and leaves nothing there, nor in the cache.
        self.assertIn(daemon.store, found["disk speed"]["text"])
        self.assertLessEqual({*os.listdir(daemon.store)}, {"ucmd.cache", "ucmd.index", "ucmd.namespaces"})
        (ns,) = json.loads(daemon.ctl("namespace", "list", "--json").stdout)["namespaces"]
        self.assertEqual((ns["model"], ns["blocks"]), ("ucmctl doctor", 0))
        text = daemon.ctl("doctor", "--quick").stdout
        self.assertRegex(text, r"(?m)^ok +round trip +16 MiB dumped, found, loaded and equal")

    @plainly
    def test_a_full_arena_fails_the_round_trip(self):
        daemon = Daemon(nvme=False, **{"arena.size": "16MiB"})
        self.addCleanup(daemon.stop)
        subprocess.run([UCM_BENCH, "--socket", daemon.socket, "--quiet", "replay", "--limit", "200", "--block-bytes", "64KiB", "--fragment", "16KiB"],
                       stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)
        daemon.ctl("pin", "1")
        found = self.findings("--quick", socket=daemon.socket)
        self.assertEqual(found["round trip"]["verdict"], "fail")
        self.assertRegex(found["round trip"]["text"], "dump: ")

    @plainly
    def test_a_bypass_is_named_as_the_cause(self):
        daemon = Daemon(nvme=False)
        self.addCleanup(daemon.stop)
        daemon.ctl("bypass", "load", "on")
        found = self.findings("--quick", socket=daemon.socket)
        self.assertEqual((found["bypass"]["verdict"], found["round trip"]["verdict"]), ("warn", "fail"))
        self.assertIn("turned 1 on", found["bypass"]["text"])
        self.assertIn("a bypass is on", found["round trip"]["text"])
        daemon.ctl("bypass", "load", "off")
        self.assertNotIn("bypass", self.findings("--quick", socket=daemon.socket))

    def driver(self):
        """The directory of a driver made here."""
        directory = tempfile.TemporaryDirectory(prefix="ucmctl.")
        self.addCleanup(directory.cleanup)
        subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", os.path.join(directory.name, "libcuda.so.1"), DRIVER], check=True, timeout=TIMEOUT_S)
        return directory.name

    def gpu_findings(self, directory, *words, socket=NOWHERE, **more):
        done = ctl(socket, "doctor", "--json", *words, env={**os.environ, "LD_LIBRARY_PATH": directory, **more})
        found = [(f["check"], f["verdict"], f["text"]) for f in json.loads(done.stdout)["findings"] if "gpu" in f["check"]]
        return [f for f in found if "/dev/nvidia-uvm" not in f[2]]

    def daemon_with(self, directory, cuda="auto", **environment):
        """A daemon that finds the driver made here; None where it was built without CUDA."""
        words = [f"{key}={value}" for key, value in {"LD_LIBRARY_PATH": directory, **environment}.items()]
        daemon = Daemon(before=("env", *words), nvme=False, **{"device.cuda": cuda, "copy.strategy": "dma"})
        self.addCleanup(daemon.stop)
        return None if "built without CUDA" in daemon.log() else daemon

    @plainly
    def test_a_gpu(self):
        directory = self.driver()
        self.assertIn(("gpu driver", "ok", "of CUDA 12.4, 1 GPU"), self.gpu_findings(directory, "--quick"))
        self.assertIn(("gpu 0", "skip", "round trip not tried: no daemon"), self.gpu_findings(directory, "--quick"))
        self.assertRegex(str(self.gpu_findings(directory)), r"'gpu 0', 'ok', 'Made here: the bus carries [\d.]+ GB/s to it'")
        self.assertEqual(self.gpu_findings(directory, "--quick", DRIVER_GPUS="0"), [("gpu", "skip", "not tried: no GPU (the driver shows none)")])
        self.assertEqual(self.gpu_findings(directory, "--quick", DRIVER_ERROR="999"), [("gpu", "fail", "the driver can't be used: CUDA_ERROR_MADE_HERE")])

    @plainly
    def test_a_gpu_that_the_daemon_was_not_given(self):
        directory = self.driver()
        daemon = Daemon()
        self.addCleanup(daemon.stop)
        why = "the daemon does not use Made here: the daemon has no GPU: CUDA is switched off in the daemon's configuration (device.cuda)"
        self.assertIn(("gpu 0", "warn", why), self.gpu_findings(directory, "--quick", socket=daemon.socket))

    def test_the_round_trip_through_a_gpu(self):
        """Right after the daemon's start, when its list of devices holds no GPU yet."""
        directory = self.driver()
        daemon = self.daemon_with(directory, DRIVER_SLOW_MS="3000")
        if daemon is None:
            self.skipTest("ucmd was built without CUDA")
        self.assertEqual(len(daemon.stats()["devices"]), 1)
        _driver, (check, verdict, text) = self.gpu_findings(directory, "--quick", socket=daemon.socket)
        self.assertEqual((check, verdict), ("gpu 0", "ok"), text)
        self.assertRegex(text, r"16 MiB dumped, found, loaded and equal: [\d.]+ GB/s out")
        (gpu,) = [d for d in daemon.stats()["devices"] if d["cuda"]]
        self.assertGreaterEqual((gpu["dump_bytes"], gpu["load_bytes"]), (16 << 20, 16 << 20))
        self.assertEqual(gpu["regions"], 0)
        # The daemon uses one of two GPUs of the host.
        found = self.gpu_findings(directory, "--quick", socket=daemon.socket, DRIVER_GPUS="2")
        self.assertEqual([f[:2] for f in found[1:]], [("gpu 0", "ok"), ("gpu 1", "warn")])
        self.assertIn("the daemon does not use Made here: no GPU with UUID 0808", found[2][2])

    @plainly
    def test_a_gpu_that_the_daemon_can_not_open(self):
        directory = self.driver()
        daemon = self.daemon_with(directory, DRIVER_CONTEXT_ERROR="2")
        if daemon is None:
            self.skipTest("ucmd was built without CUDA")
        found = self.gpu_findings(directory, "--quick", socket=daemon.socket)
        self.assertEqual(found[1], ("gpu 0", "fail", "registering memory: the GPU gives no context: CUDA_ERROR_MADE_HERE (made here)"))

    @plainly
    def test_a_directory_of_ones_own(self):
        with tempfile.TemporaryDirectory(prefix="ucmctl.") as directory:
            found = self.findings("--dir", directory)
            self.assertRegex(found["disk speed"]["text"], rf"{directory}: [\d.]+ GB/s read, [\d.]+ GB/s written")
            self.assertEqual(os.listdir(directory), [])
        found = self.findings("--quick", "--dir", "/nonexistent")
        self.assertEqual(found["space"]["verdict"], "fail")
        self.assertIn("No such file", found["space"]["text"])

    @plainly
    def test_a_degraded_daemon_is_a_warning(self):
        daemon = Daemon(**{"shared.roots": "/nonexistent/kv"})
        self.addCleanup(daemon.stop)
        until(lambda: "degraded" in daemon.health(), "its word")
        found = self.findings("--quick", socket=daemon.socket)
        self.assertEqual(found["daemon"]["verdict"], "warn")
        self.assertIn("/nonexistent/kv", found["daemon"]["text"])
        self.assertEqual(found["shared root"]["verdict"], "warn")


@once
class Growing(unittest.TestCase):
    def test_dram_is_what_the_daemon_is_on_its_way_to(self):
        """One slab, so that nothing is ready until all is: the daemon serves meanwhile."""
        daemon = Daemon(nvme=False, **{"arena.size": "256MiB", "arena.slab": "256MiB"})
        self.addCleanup(daemon.stop)
        line = re.search(r"(?m)^dram .*$", daemon.ctl("status").stdout)[0]
        self.assertRegex(line, r"0 B of 256 MiB used \(0\.0 %\)(, growing: 0 B ready)?$")
        frame = json.loads(daemon.ctl("top", "--json", "--interval", "0.2").stdout)
        self.assertEqual([t["capacity_bytes"] for t in frame["tiers"]], [256 << 20])


@unittest.skipIf(os.environ.get("UCM_PHASE") == "tsan", "so slow a daemon keeps up with any disk")
@once
class DroppedWrites(unittest.TestCase):
    def test_health_says_that_the_disk_is_too_slow(self):
        """One write at a time, while dumps replace all of DRAM."""
        daemon = Daemon(**{"arena.size": "16MiB", "nvme.write_queue_size": "1MiB", "nvme.queue_depth": "1", "nvme.threads": "1", "nvme.io": "threads",
                           "nvme.admission": "all"})
        self.addCleanup(daemon.stop)
        self.assertEqual(daemon.ctl("health").returncode, 0)
        for _ in range(3):
            subprocess.run([UCM_BENCH, "--socket", daemon.socket, "--quiet", "replay", "--limit", "300", "--block-bytes", "64KiB",
                            "--fragment", "16KiB"], stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)
            said, metrics = daemon.health(), daemon.metrics()
            if said != "ok\n":
                break
            if metrics["nvme_write_dropped"] * 9 < metrics["nvme_writes"]:
                self.skipTest("the disk here is faster than the dumps; tests/unit/observe/test_drops.c has the rule")
        self.assertRegex(said, r"^degraded\n +tier nvme: \d+ of \d+ parts were not written \(nvme_write_dropped\): the disks are slower")


@once
class Json(unittest.TestCase):
    """Every command that the daemon here allows gives one document, and nothing else on standard
    output."""

    # Words that a command needs. The other commands run without, except those that never end or
    # need more than a daemon.
    WORDS = {"namespace": [], "tenant": [], "ls": ["1"], "inspect": ["1", "KEY"], "evict": ["1", "KEY"], "pin": ["1", "KEY"], "unpin": ["1"],
             "purge": ["1", "--yes"], "format": ["FILE"], "plan": ["CONFIG"], "doctor": ["--quick"], "verify": [], "shared": [],
             "top": ["--interval", "0.2"]}

    def test_every_command(self):
        daemon = Daemon()
        self.addCleanup(daemon.stop)
        subprocess.run([UCM_BENCH, "--socket", daemon.socket, "--quiet", "replay", "--limit", "5", "--block-bytes", "16KiB", "--fragment", "4KiB"],
                       stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)
        names = {"FILE": os.path.join(daemon.directory, "disk"), "CONFIG": os.path.join(daemon.directory, "config.json"),
                 "KEY": json.loads(daemon.ctl("ls", "1", "--json").stdout)["blocks"][0]["key"]}
        with open(names["FILE"], "wb") as file:
            file.truncate(64 << 20)
        with open(names["CONFIG"], "w") as file:
            json.dump(LLAMA, file)
        text = subprocess.run([UCMCTL, "--help"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
        usages = re.findall(r"^  ([a-z]+)((?: \S+)*?)(?:  |$)", text[:text.index("\nOptions:")], re.M)
        seen = set()
        for command, words in usages:
            if command not in self.WORDS and (words.strip() or command == "help"):
                continue
            with self.subTest(command):
                done = daemon.ctl(command, "--json", *(names.get(w, w) for w in self.WORDS.get(command, [])))
                if done.stdout or done.returncode == 0:
                    json.loads(done.stdout)
                else:
                    self.assertTrue(done.stderr)
                if command in self.WORDS:
                    self.assertIn(done.returncode, (0, 4), f"{command}: {done.stderr}")
                seen.add(command)
        self.assertLessEqual({*self.WORDS, "status", "stats", "namespace", "tenant", "health", "version"}, seen)


if __name__ == "__main__":
    unittest.main()
