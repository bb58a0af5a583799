"""make install and uninstall, and the example that README quotes, built against what was installed."""

import fnmatch
import os
import pathlib
import re
import subprocess
import tempfile
import textwrap
import time
import unittest

from daemon import listens

TOP = pathlib.Path(__file__).resolve().parents[2]
UCMD = os.environ.get("UCMD", str(TOP / "build/ucmd"))
EXAMPLE = TOP / "client/examples/load_or_dump.c"


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    if done.returncode != 0:
        raise AssertionError(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def make(*arguments):
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return run("make", "--no-print-directory", "-C", str(TOP), *arguments, env=environment)


class Build(unittest.TestCase):
    def test_make_alone_builds_and_says_what_comes_next(self):
        last = make().splitlines()[-1]
        self.assertRegex(last, "ucmd ucmctl ucm-bench( ucmevents)? and libucmclient in build/")
        self.assertIn("sudo make install", last)
        self.assertIn("make check ", make("help"))

    def test_install_compiles_nothing(self):
        with tempfile.TemporaryDirectory(prefix="ucmd-test-") as directory:
            make("install", f"DESTDIR={directory}/root", "CC=false")
            done = subprocess.run(["make", "-C", str(TOP), "install", f"BUILD={directory}/none", f"DESTDIR={directory}/none",
                                   "CC=false"], capture_output=True, text=True, timeout=120)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("run 'make' as yourself, then 'sudo make install'", done.stderr)
            self.assertFalse(os.path.exists(f"{directory}/none"))

    def test_install_and_uninstall_leave_the_loader_a_fresh_cache(self):
        for target in ("install", "uninstall"):
            self.assertIn("; then ldconfig; fi", make("-n", target).splitlines()[-1], target)

    def test_install_refuses_what_is_older_than_its_sources(self):
        with tempfile.TemporaryDirectory(prefix="ucmd-test-") as directory:
            old = pathlib.Path(directory) / "built"
            old.touch()
            os.utime(old, (0, 0))
            done = subprocess.run(["make", "-C", str(TOP), "install", f"DESTDIR={directory}/root", f"BUILT={old}"],
                                  capture_output=True, text=True, timeout=120)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("is newer than what is built", done.stderr)
            self.assertFalse(os.path.exists(directory + "/root"))


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(prefix="ucmd-test-")
        cls.addClassCleanup(directory.cleanup)
        cls.root = pathlib.Path(directory.name) / "root"
        make("install", f"DESTDIR={cls.root}", "PREFIX=/usr")

    def setUp(self):
        self.directory = tempfile.TemporaryDirectory(prefix="ucmd-test-")
        self.addCleanup(self.directory.cleanup)

    def files(self):
        return {
            str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_symlink() or p.is_file()
        }

    def test_files(self):
        self.assertLessEqual(
            {
                "usr/bin/ucmd",
                "usr/bin/ucmctl",
                "usr/bin/ucm-bench",
                "usr/lib/libucmclient.so",
                "usr/lib/libucmclient.so.0",
                "usr/lib/libucmclient.a",
                "usr/lib/pkgconfig/libucmclient.pc",
                "usr/include/ucmclient.h",
                "usr/include/ucmclient_sparse.h",
                "usr/include/ucmclient_mapping.h",
                "usr/lib/systemd/system/ucmd.service",
                "usr/lib/systemd/system/ucmd.socket",
                "usr/lib/sysusers.d/ucmd.conf",
                "usr/lib/tmpfiles.d/ucmd.conf",
                "etc/ucmd/ucmd.yaml",
                "usr/share/ucmd/alerts.yml",
                "usr/share/ucmd/prometheus.yml",
                "usr/share/ucmd/ucmd-board.json",
                "usr/share/man/man1/ucmctl.1",
                "usr/share/man/man1/ucm-bench.1",
                "usr/share/man/man5/ucmd.yaml.5",
                "usr/share/man/man8/ucmd.8",
                "usr/share/bash-completion/completions/ucmctl",
                "usr/share/zsh/site-functions/_ucmctl",
                "usr/share/fish/vendor_completions.d/ucmctl.fish",
            },
            self.files(),
        )
        dynamic = run("readelf", "-d", str(self.root / "usr/lib/libucmclient.so"))
        self.assertIn("[libucmclient.so.0]", dynamic)

    def test_a_debian_package_takes_every_file(self):
        """Installs as config/debian/rules does. Building packages takes minutes, and fails on a
        file that no package takes."""
        rules = (TOP / "config/debian/rules").read_text()
        self.assertIn("SYSTEMDUNITDIR=$(UNITS)", rules)
        directory = pathlib.Path(self.directory.name) / "packages"
        places = dict(re.findall(r"\b([A-Z]+DIR)=(/\S+)", rules), LIBDIR="/usr/lib/triplet", SYSTEMDUNITDIR="/lib/systemd/system")
        make("install", f"DESTDIR={directory}", "PREFIX=/usr", *(f"{name}={place}" for name, place in places.items()))
        patterns = [line for list_ in (TOP / "config/debian").glob("*.install") for line in list_.read_text().splitlines()]
        for path in directory.rglob("*"):
            if path.is_file():
                name = str(path.relative_to(directory))
                taken = [p for p in patterns if fnmatch.fnmatch(name, p) or fnmatch.fnmatch(name, p + "/*")]
                self.assertTrue(taken, f"{name} is in no config/debian/*.install")

    def test_the_debian_packages_build_with_what_make_needs(self):
        needs = set(re.search(r"^PKG_BUILD :=((?:.*\\\n)*.*)", (TOP / "tests/setup/setup.mk").read_text(), re.M)[1].replace("\\", " ").split())
        control = (TOP / "config/debian/control").read_text()
        named = set(re.findall(r"[\w+.-]+", re.search(r"Build-Depends:((?:.*,\n)*.*)", control)[1]))
        self.assertLessEqual(needs - {"build-essential"}, named)

    def test_units_name_the_prefix(self):
        make("install", f"DESTDIR={self.directory.name}", "PREFIX=/opt/ucm", "SYSCONFDIR=/opt/etc")
        unit = (pathlib.Path(self.directory.name) / "opt/ucm/lib/systemd/system/ucmd.service").read_text()
        self.assertIn("ExecStart=/opt/ucm/bin/ucmd --config /opt/etc/ucmd/ucmd.yaml\n", unit)

    def test_a_changed_configuration_is_kept(self):
        self.root = pathlib.Path(self.directory.name) / "root"  # of its own
        config = self.root / "etc/ucmd/ucmd.yaml"
        config.parent.mkdir(parents=True)
        config.write_text("# mine\n")
        make("install", f"DESTDIR={self.root}", "PREFIX=/usr")
        self.assertEqual(config.read_text(), "# mine\n")
        self.assertEqual(
            (self.root / "etc/ucmd/ucmd.yaml.new").read_text(), (TOP / "config/ucmd.yaml").read_text()
        )
        make("uninstall", f"DESTDIR={self.root}", "PREFIX=/usr")
        self.assertEqual(self.files(), {"etc/ucmd/ucmd.yaml", "etc/ucmd/ucmd.yaml.new"})

    def start_daemon(self, socket):
        daemon = subprocess.Popen(
            [str(self.root / "usr/bin/ucmd"), "--set", f"socket={socket}", "--set", "arena.size=64MiB",
             "--set", "device.cuda=off"],
            stderr=subprocess.DEVNULL,
        )
        self.addCleanup(daemon.wait, 30)
        self.addCleanup(daemon.terminate)
        deadline = time.monotonic() + 20
        while not listens(socket):
            self.assertIsNone(daemon.poll(), "the daemon ended")
            self.assertLess(time.monotonic(), deadline, "the daemon does not come up")
            time.sleep(0.02)

    def run_example_twice(self, program, socket):
        self.start_daemon(socket)
        environment = dict(os.environ, UCM_SOCKET=socket, LD_LIBRARY_PATH=str(self.root / "usr/lib"))
        first = run(program, env=environment)
        second = run(program, env=environment)
        self.assertEqual(first, "0 of 4 blocks were cached; dumped 32768 bytes\n")
        self.assertEqual(second, "4 of 4 blocks were cached; loaded 32768 bytes\n")

    def test_the_example_as_make_builds_it(self):
        directory = pathlib.Path(UCMD).parent
        self.run_example_twice(str(directory / "examples/load_or_dump"), f"{self.directory.name}/ucmd.sock")

    def test_the_example_against_the_installed_library(self):
        program = f"{self.directory.name}/example"
        environment = dict(
            os.environ,
            PKG_CONFIG_SYSROOT_DIR=str(self.root),
            PKG_CONFIG_LIBDIR=str(self.root / "usr/lib/pkgconfig"),
        )
        flags = run("pkg-config", "--cflags", "--libs", "libucmclient", env=environment).split()
        run("cc", "-Wall", "-Wextra", "-Werror", str(EXAMPLE), *flags, "-o", program)
        self.run_example_twice(program, f"{self.directory.name}/ucmd.sock")

    def test_readme_quotes_the_example(self):
        (quoted,) = re.findall(r"```c\n(.*?)```", (TOP / "README.md").read_text(), re.DOTALL)
        self.assertIn(textwrap.indent(quoted, "    "), EXAMPLE.read_text())


class Exports(unittest.TestCase):
    def test_libraries_export_what_public_headers_declare(self):
        """The linker refuses an exported name that a library lacks. This test finds a declared name
        that is not exported."""
        text = "".join(header.read_text() for header in TOP.glob("client/include/*.h"))
        declared = set(re.findall(r"UCM_API[^;]*?\b(ucm_\w+)\(", text))
        exported = set(re.findall(r"^ +(ucm_\w+);", "".join(file.read_text() for file in TOP.glob("client/*/*.map")), re.M))
        self.assertGreater(len(declared), 100)
        self.assertEqual(declared, exported)


if __name__ == "__main__":
    unittest.main()
