#!/usr/bin/python3
"""`ucm-bench record` against a real daemon. The file has the lookups and stores but no key, counts
what was lost, and `replay` reads it.

$UCMD and $UCM_BENCH name other programs than those in build/.
"""

import json
import os
import subprocess
import tempfile
import unittest

from second_client import BIG, OTHER_UID, TIMEOUT_S, TOP, Case, keys

UCM_BENCH = os.environ.get("UCM_BENCH", os.path.join(TOP, "build/ucm-bench"))


class Record(Case):
    def recorded(self, work, *words):
        directory = tempfile.TemporaryDirectory(prefix="record.")
        self.addCleanup(directory.cleanup)
        path = os.path.join(directory.name, "site.jsonl")
        process = subprocess.Popen([UCM_BENCH, "--socket", self.daemon.socket, "--json", "--quiet", "record", "--out", path,
                                    *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.until(lambda: os.path.exists(path) or process.poll() is not None, "the recording")
        work()
        process.terminate()
        said, errors = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, 0, errors)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        return path, text, [json.loads(line) for line in text.splitlines()], json.loads(said)

    def bench(self, *words):
        return subprocess.run([UCM_BENCH, "--socket", self.daemon.socket, "--quiet", *words], capture_output=True,
                              text=True, timeout=TIMEOUT_S)

    def test_what_the_file_says(self):
        client, ns, region = self.worker(BIG)
        other = self.client(uid=OTHER_UID)
        theirs = other.open(dict(BIG, model=self.id()))

        def work():
            client.call("lookup", ns=ns, keys=keys("a", "b", "c"))
            region.dump("abc", [0, 1, 2])
            client.call("lookup", ns=ns, keys=keys("a", "b", "d"))
            client.call("lookup", ns=ns, keys=keys("d"), per_key=True)
            other.call("lookup", ns=theirs, keys=keys("a"))
            for _ in range(3):  # as an engine does while the request waits
                client.call("lookup", ns=ns, keys=keys("a", "e"), request="cmpl-1")
            client.call("lookup", ns=ns, keys=keys("a", "e"), request="cmpl-2")
        _, text, lines, said = self.recorded(work)
        self.assertEqual(lines[0]["ucm_trace"], 1)
        spaces = [line for line in lines if line.get("define") == "namespace"]
        self.assertEqual([(space["namespace"], space["tenant"], space["block_tokens"]) for space in spaces],
                         [(1, 1, BIG["block_tokens"]), (2, 2, BIG["block_tokens"])])
        self.assertEqual(spaces[0]["block_bytes"], region.size)
        self.assertEqual([line["hash_ids"] for line in lines if "hash_ids" in line],
                         # in another namespace it is another block
                         [[0, 1, 2], [0, 1, 3], [4], [0, 5], [0, 5]])
        self.assertEqual([line["dumped_ids"] for line in lines if "dumped_ids" in line], [[0, 1, 2]])
        self.assertEqual([line["each_ids"] for line in lines if "each_ids" in line], [[3]])
        self.assertEqual([line["tenant"] for line in lines if "hash_ids" in line], [1, 1, 2, 1, 1])
        self.assertEqual({line["input_length"] for line in lines if len(line.get("hash_ids", [])) == 3}, {3 * 16})
        stamps = [line["timestamp"] for line in lines if "timestamp" in line]
        self.assertEqual(stamps, sorted(stamps))
        self.assertLess(stamps[0], TIMEOUT_S * 1000)
        end = lines[-1]
        self.assertEqual([end[name] for name in ("end", "lookups", "dumps", "repeated", "blocks", "lost")],
                         [True, 6, 1, 2, 6, 0])
        self.assertEqual([said[name] for name in ("lookups", "dumps", "blocks", "tenants", "lost")], [6, 1, 6, 2, 0])
        for name in "abcde":
            self.assertNotIn(keys(name).hex()[:8], text)
        for secret in (client.limits["tenant"], self.id(), "cmpl-1"):
            self.assertNotIn(secret, text)

    def test_loss_is_written_where_it_happened(self):
        client, ns, _ = self.worker(BIG)
        many = keys(*range(1000))

        def work():
            for _ in range(100):
                client.call("lookup", ns=ns, keys=many)
        _, _, lines, said = self.recorded(work, "--ring", "64KiB")
        lookups = sum("hash_ids" in line for line in lines)
        self.assertEqual(lookups + lines[-1]["lost"], 100)
        self.assertEqual(said["lost"], lines[-1]["lost"])
        self.assertGreater(lines[-1]["lost"], 0)
        self.assertLessEqual(sum(line["lost"] for line in lines[:-1] if "lost" in line), lines[-1]["lost"])

    def test_replay_reads_it(self):
        def work():
            run = self.bench("replay", "--limit", "40", "--block-bytes", "16KiB")
            self.assertEqual(run.returncode, 0, run.stderr)
        path, _, lines, said = self.recorded(work)
        self.assertEqual(said["lookups"], 40)
        again = self.bench("--json", "replay", "--trace", path, "--block-bytes", "16KiB", "--model", "again")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual(json.loads(again.stdout)["requests"], 40)
        self.assertEqual(json.loads(again.stdout)["looked_up"],
                         sum(len(line["hash_ids"]) for line in lines if "hash_ids" in line))

    def test_it_needs_a_file_and_an_operator(self):
        self.assertEqual(self.bench("record").returncode, 2)
        self.assertEqual(self.bench("record", "--out", "/nonexistent/x", "--seconds", "0.2").returncode, 1)


if __name__ == "__main__":
    unittest.main()
