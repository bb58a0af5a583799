#!/usr/bin/python3
"""systemd/ucmd-generator in a root of its own: what the sandbox opens for ucmd.yaml, and for
variables in drop-ins."""

import os
import re
import subprocess
import tempfile
import unittest

from daemon import TOP, UCMD


class Generator(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="generator.")
        self.addCleanup(directory.cleanup)
        self.root = directory.name
        self.write("etc/ucmd/ucmd.yaml", "nvme: {paths: [/srv/file], size: 1GiB}\n")
        with open(os.path.join(TOP, "systemd/ucmd-generator"), encoding="utf-8") as file:
            text = file.read().replace("/usr/bin/ucmd", os.path.abspath(UCMD))
        for directory in ("etc/ucmd/", "etc/systemd", "run/systemd", "usr/lib/systemd", "usr/local/lib/systemd"):
            text = re.sub(rf"(?<=[ =]){'/' + directory}", f"{self.root}/{directory}", text)
        self.write("generator", text)

    def write(self, name, text):
        path = os.path.join(self.root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def drop_in(self, name, text, directory="etc/systemd/system"):
        self.write(f"{directory}/ucmd.service.d/{name}", "[Service]\n" + text)

    def made(self):
        done = subprocess.run(["sh", os.path.join(self.root, "generator"), os.path.join(self.root, "out")], capture_output=True, text=True,
                              timeout=60, check=False, env={"PATH": "/usr/bin:/bin"})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        with open(os.path.join(self.root, "out/ucmd.service.d/50-config.conf"), encoding="utf-8") as file:
            return file.read()

    def test_the_file(self):
        text = self.made()
        self.assertIn('ReadWritePaths="-/srv/file"', text)
        self.assertIn("SourcePath=", text)

    def test_a_drop_in_goes_over_the_file(self):
        self.drop_in("10-a.conf", "Environment=OTHER=1 UCMD_NVME_PATHS=/srv/first UCMD_ARENA_SIZE=1GiB\n")
        self.assertIn('ReadWritePaths="-/srv/first"', self.made())
        self.assertNotIn("/srv/file", self.made())
        # By name, whatever the directory; /etc hides /usr/lib.
        self.drop_in("20-b.conf", "  Environment=\"UCMD_NVME_PATHS=/srv/second disk\" \\\n    'UCMD_SHARED_ROOTS=nfs://10.0.0.5/export'\n",
                     "run/systemd/system")
        self.drop_in("30-c.conf", "Environment=UCMD_NVME_PATHS=/srv/hidden\n", "usr/lib/systemd/system")
        self.drop_in("30-c.conf", "# Environment=UCMD_NVME_PATHS=/srv/comment\n")
        text = self.made()
        self.assertIn('ReadWritePaths="-/srv/second disk"', text)
        self.assertIn("AF_INET", text)
        self.assertNotIn("/srv/hidden", text)
        self.drop_in("40-d.conf", "Environment=\n")
        self.assertIn('ReadWritePaths="-/srv/file"', self.made())

    def test_a_file_of_variables_goes_over_both(self):
        path = self.write("etc/default/ucmd", "# a comment\nUCMD_NVME_PATHS='/srv/variables'\nPATH=/nowhere\n")
        self.drop_in("10-a.conf", f"EnvironmentFile=-{path}\nEnvironment=UCMD_NVME_PATHS=/srv/first\nEnvironmentFile=-/nonexistent\n")
        self.assertIn('ReadWritePaths="-/srv/variables"', self.made())


if __name__ == "__main__":
    unittest.main()
