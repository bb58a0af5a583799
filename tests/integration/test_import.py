#!/usr/bin/python3
"""`ucmctl config --import`."""

import os
import re
import shutil
import subprocess
import tempfile
import unittest

from daemon import TIMEOUT_S, UCMCTL, UCMD


class Import(unittest.TestCase):
    """Turns a file of UCM into one of ucmd, without a daemon."""

    def convert(self, text, code=0):
        directory = tempfile.mkdtemp(prefix="import.")
        self.addCleanup(shutil.rmtree, directory)
        path = os.path.join(directory, "ucm_config.yaml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace("DIRECTORY", directory))
        done = subprocess.run([UCMCTL, "config", "--import", path], capture_output=True, text=True, timeout=TIMEOUT_S,
                              check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        if code == 0:
            with open(os.path.join(directory, "ucmd.yaml"), "w", encoding="utf-8") as file:
                file.write(done.stdout)
            checked = subprocess.run([UCMD, "--check", "--config", file.name, "--set", f"socket={directory}/s", "--set",
                                      "arena.size=64MiB"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            self.assertEqual(checked.returncode, 0, checked.stderr + done.stdout)
        return done.stdout.replace(directory, "DIRECTORY"), done.stderr

    def test_what_both_have(self):
        out, _ = self.convert("""ucm_connectors:
  - ucm_connector_name: "UcmPipelineStore"
    ucm_connector_config:
      store_pipeline: "Cache|Posix"
      storage_backends: "DIRECTORY:/tmp"
      posix_capacity_gb: 1024
      cache_buffer_capacity_gb: 64
      timeout_ms: 30000
      posix_data_trans_concurrency: 512
      store_health:
        enabled: true
      something_new: [1, 2]
use_layerwise: true
""")
        lines = [line for line in out.splitlines() if not line.strip().startswith("#") and line]
        self.assertEqual(lines, ["arena:", "  size: 64GiB", "shared:",
                                 '  roots: ["DIRECTORY capacity=512GiB", "/tmp capacity=512GiB"]', "  threads: 256",
                                 "  timeout: 30000ms"])
        for number, name in ((2, "ucm_connector_name"), (4, "store_pipeline"), (11, "store_health.enabled"),
                             (12, "something_new"), (13, "use_layerwise")):
            self.assertRegex(out, rf"(?m)^# line {number}, {name}: ")
        self.assertEqual(len(re.findall("(?m)^# line", out)), 5)

    def test_what_is_odd_becomes_a_comment(self):
        out, _ = self.convert('cache_buffer_capacity_gb: "all"\nstorage_backends: relative\nposix_capacity_gb: -1\n'
                              'x: "a\\nb: c"\ny: {z: &a [1, *a]}\n')
        self.assertEqual([line for line in out.splitlines() if line and not line.startswith("#")], [])
        self.assertIn("# line 4, x: a?b: c: ucmd has nothing like it\n", out)
        self.assertIn("which was not read", out)
        self.assertEqual(self.convert("")[0].count("\n"), 1)
        out, _ = self.convert("storage_backends: [DIRECTORY, /tmp]\nposix_capacity_gb: 0\n")
        self.assertIn('roots: ["DIRECTORY", "/tmp"]', out)

    def test_aliases_that_multiply_are_cut(self):
        lines = ["a0: &a0 {}"] + [f"a{i}: &a{i} {{{', '.join(f'x{j}: *a{i - 1}' for j in range(9))}}}" for i in range(1, 9)]
        self.assertIn("which was not read", self.convert("\n".join(lines) + "\n")[0])

    def test_what_is_no_yaml_is_refused(self):
        self.assertIn("ucm_config.yaml:2: ", self.convert("a: 1\n  b: [\n", 1)[1])
        done = subprocess.run([UCMCTL, "config", "--import", "/nowhere"], capture_output=True, text=True, timeout=TIMEOUT_S,
                              check=False)
        self.assertEqual((done.returncode, "No such file" in done.stderr), (1, True))


if __name__ == "__main__":
    unittest.main()
