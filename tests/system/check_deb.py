#!/usr/bin/env python3
"""The packages of `make deb`, installed, upgraded, rolled back and purged under a real systemd: `make check-system`."""

import glob
import os
import shutil
import subprocess
import sys
import unittest

import machine
from check_system import SMALL, TREE, Case
from machine import BUILD, Machine, copy_worker

PACKAGES = ("ucmd", "libucmclient0", "python3-ucmclient")
NVME = SMALL + "nvme:\n  paths: [/var/lib/ucmd]\n  size: 64MiB\n  segment: 4MiB\n"


def later(package, directory):
    """The same package under a version that sorts after it."""
    raw = os.path.join(directory, "raw")
    shutil.rmtree(raw, ignore_errors=True)
    subprocess.run(["dpkg-deb", "-R", package, raw], check=True)
    with open(raw + "/DEBIAN/control") as file:
        lines = file.read().splitlines()
    version = next(line for line in lines if line.startswith("Version: "))
    with open(raw + "/DEBIAN/control", "w") as file:
        # Packages of one build name each other by their version.
        file.write("\n".join(lines).replace(version[9:], version[9:] + "+later") + "\n")
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", raw, directory], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(raw)


class Packages(Case):
    @classmethod
    def setUpClass(cls):
        cls.layer = os.path.join(BUILD, "packages")
        shutil.rmtree(cls.layer, ignore_errors=True)
        for part in ("first", "second"):
            os.makedirs(f"{cls.layer}/opt/{part}")
        for name in PACKAGES:
            (package,) = glob.glob(os.path.join(os.environ["UCM_DEB"], name + "_*.deb"))
            shutil.copy(package, cls.layer + "/opt/first")
            later(package, cls.layer + "/opt/second")
        copy_worker(cls.layer + TREE)

    def setUp(self):
        self.m = Machine(self.layer)
        self.addCleanup(self.m.close)
        self.m.run("rm", "/usr/sbin/policy-rc.d")
        self.m.sh("dpkg -i /opt/first/*.deb")

    def property(self, name, unit="ucmd.service"):
        return self.m.run("systemctl", "show", "--value", "-P", name, unit).stdout.strip()

    def test_nothing_starts_before_it_is_configured(self):
        self.assertEqual(self.property("ActiveState"), "inactive")
        self.assertEqual(self.property("ActiveState", "ucmd.socket"), "inactive")
        for unit in ("ucmd.service", "ucmd.socket"):
            self.assertEqual(self.property("UnitFileState", unit), "enabled")
        self.assertEqual(self.m.sh("stat -c %U:%a /var/lib/ucmd 2>/dev/null || echo none").stdout.strip(), "none")
        self.m.sh("python3 -c 'import ucmclient; print(ucmclient.__version__)'")

    def test_what_was_stopped_stays_stopped(self):
        self.start(NVME)
        self.m.run("systemctl", "stop", "ucmd.socket", "ucmd.service")
        self.m.sh("dpkg -i /opt/second/*.deb")
        self.assertEqual(self.property("ActiveState"), "inactive")

    def test_remove_and_purge(self):
        self.start(NVME)
        self.until_health("ok")
        self.m.sh("dpkg -r ucmd")
        self.assertEqual(self.m.sh("pgrep -x ucmd", check=False).stdout, "")
        self.assertEqual(self.m.sh("ls /etc/ucmd/ucmd.yaml /var/lib/ucmd").stdout.split()[0], "/etc/ucmd/ucmd.yaml")
        self.m.sh("dpkg -P ucmd libucmclient0 python3-ucmclient")
        left = self.m.sh("find / -xdev -name '*ucm*' ! -path '/opt/*' ! -path '/proc/*' ! -path '/sys/*' "
                         "! -path '/var/lib/dpkg/*' ! -path '/var/lib/systemd/*' ! -path '/var/tmp/systemd-private-*' 2>/dev/null", check=False).stdout
        self.assertEqual(left, "")


if __name__ == "__main__":
    missing = machine.why_not()
    if missing:
        print(f"check_deb: {missing}; not tried", file=sys.stderr)
        sys.exit(77)
    unittest.main(verbosity=2)
