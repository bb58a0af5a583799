#!/usr/bin/python3
"""tests/setup/packages.sh with a dpkg-query, an apt-get and a systemctl made here."""

import os
import subprocess
import tempfile
import unittest

from daemon import TOP

SCRIPT = os.path.join(TOP, "tests/setup/packages.sh")
FAKES = {
    "dpkg-query": '''case $1 in
-W) shift 3; for package; do [ ! -e "$DIRECTORY/installed.$package" ] || printf '%s:installed ' "$package"; done ;;
-L) printf '/usr/bin/%s\\n/lib/systemd/system/%s.service\\n/lib/systemd/system/%s@.service\\n' "$2" "$2" "$2" ;;
esac''',
    # A package's script starts its service unless policy-rc.d forbids it, as invoke-rc.d and deb-systemd-invoke do.
    "apt-get": '''for last; do :; done
[ "$1" = install ] || exit 0
[ -z "$APT_FAILS" ] || exit 100
if [ -x "$UCM_POLICY" ]; then "$UCM_POLICY" $last start; [ $? = 101 ] || touch "$DIRECTORY/started"; else touch "$DIRECTORY/started"; fi
touch "$DIRECTORY/installed.$last"''',
    "systemctl": 'echo "$@" >>"$DIRECTORY/asked"',
    "id": "echo 0",
}


class Packages(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="packages.")
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        for name, text in FAKES.items():
            path = os.path.join(self.directory, name)
            with open(path, "w") as file:
                file.write("#!/bin/sh\n" + text + "\n")
            os.chmod(path, 0o755)

    def run_it(self, *packages, **environment):
        return subprocess.run(["sh", SCRIPT, *packages], capture_output=True, text=True, timeout=60, check=False,
                              env={"PATH": f"{self.directory}:/usr/bin:/bin", "DIRECTORY": self.directory,
                                   "UCM_POLICY": os.path.join(self.directory, "policy-rc.d"), "APT_FAILS": "", **environment})

    def there(self, name):
        return os.path.exists(os.path.join(self.directory, name))

    def test_a_service_starts_neither_now_nor_at_the_next_boot(self):
        done = self.run_it("prometheus")
        self.assertEqual((done.returncode, done.stdout), (0, "ucmd: installing prometheus\n"), done.stderr)
        self.assertTrue(self.there("installed.prometheus"))
        self.assertFalse(self.there("started"))
        self.assertFalse(self.there("policy-rc.d"))
        with open(os.path.join(self.directory, "asked")) as file:
            self.assertEqual(file.read(), "disable prometheus.service\n")

    def test_what_is_installed_is_left_as_it_is(self):
        open(os.path.join(self.directory, "installed.prometheus"), "w").close()
        self.assertEqual(self.run_it("prometheus").stdout, "")
        self.assertFalse(self.there("asked"))

    def test_a_failure_leaves_no_policy_behind(self):
        self.assertEqual(self.run_it("prometheus", APT_FAILS="yes").returncode, 1)
        self.assertFalse(self.there("policy-rc.d"))

    def test_a_policy_of_the_host_s_own_stays(self):
        policy = os.path.join(self.directory, "policy-rc.d")
        with open(policy, "w") as file:
            file.write("#!/bin/sh\nexit 0\n")
        os.chmod(policy, 0o755)
        self.assertEqual(self.run_it("prometheus").returncode, 0)
        self.assertTrue(self.there("policy-rc.d") and self.there("started"))


if __name__ == "__main__":
    unittest.main()
