#!/usr/bin/python3
"""Manual pages and shell completion as `make` writes them: complete, well-formed, and right in a
real shell.

They lie in pages/ next to $UCMCTL. Shells that are not installed are left out."""

import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import time
import unittest

from daemon import TOP, UCMCTL, UCMD, Daemon

UCM_BENCH = os.environ.get("UCM_BENCH", os.path.join(TOP, "build/ucm-bench"))
PAGES = pathlib.Path(UCMCTL).parent / "pages"
EVENTS = ("ucmevents",) if (PAGES.parent / "ucmevents").exists() else ()  # where libzmq3-dev was
MAN = ("ucmctl.1", "ucm-bench.1", "ucmd.8", "ucmd.yaml.5", *(f"{name}.1" for name in EVENTS))
PROGRAMS = {"ucmctl": UCMCTL, "ucm-bench": UCM_BENCH}
TIMEOUT_S = 120


def run(*command, check=True, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=check, **options)


def commands_of(program):
    text = run(program, "--help").stdout
    found = re.findall(r"^  ([a-z-]+)\b", text[:text.index("\nOptions:")], re.M)
    return [name for name in found if name != "help"]


def options_of(*words):
    return set(re.findall(r"^  (--[\w-]+)", run(*words, "--help").stdout, re.M))


def page_text(name):
    """The text that a reader sees, with lines so long that nothing breaks."""
    return run("man", "-P", "cat", "-l", str(PAGES / name), env={**os.environ, "MANWIDTH": "400", "LC_ALL": "C.UTF-8"}).stdout


@unittest.skipUnless(shutil.which("man") and shutil.which("groff"), "man or groff is not installed")
class Man(unittest.TestCase):
    def test_no_page_has_a_warning(self):
        for name in MAN:
            done = run("man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(PAGES / name), env={**os.environ, "MANWIDTH": "80"})
            self.assertEqual(done.stderr, "", name)
            self.assertEqual(run("groff", "-man", "-ww", "-z", str(PAGES / name)).stderr, "", name)

    def test_the_pages_have_every_command_and_option(self):
        for name, program in PROGRAMS.items():
            text = page_text(f"{name}.1")
            commands = commands_of(program)
            self.assertGreater(len(commands), 5)
            for command in commands:
                self.assertRegex(text, rf"(?m)^ +{name} {command}\b")
                for option in options_of(program, command):
                    self.assertRegex(text, rf"(?m)^ +{option}\b", f"{name} {command}")

    def test_the_daemon_s_pages_have_every_option_and_key(self):
        text = page_text("ucmd.8")
        for option in options_of(UCMD):
            self.assertRegex(text, rf"(?m)^ +{option}\b")
        text = page_text("ucmd.yaml.5")
        keys = re.findall(r'KEY\("([a-z_.]+)"((?:[^{]|\n)*?)\.help', pathlib.Path(TOP, "daemon/config/table.c").read_text())
        self.assertGreater(len(keys), 50)
        for key, more in keys:
            (self.assertNotRegex if ".internal" in more else self.assertRegex)(text, rf"(?m)^ +{re.escape(key)}( |$)")
        self.assertRegex(text, r"(?s)arena\.size\s.*?Default: 4GiB; from 1MiB to 15TiB\.")

    def test_options_can_be_copied_from_a_page(self):
        """A hyphen that is not ASCII's can't be pasted into a shell."""
        for name in MAN:
            self.assertNotRegex(page_text(name), r"[‐−–]\w", name)


class Completion(unittest.TestCase):
    """The same questions for each shell: a line as typed so far, and what the shell must offer."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.addClassCleanup(cls.daemon.stop)
        for model in ("one", "two"):
            run(UCM_BENCH, "--socket", cls.daemon.socket, "--quiet", "replay", "--limit", "3", "--block-bytes", "16KiB", "--fragment", "4KiB",
                "--model", model)
        cls.commands = commands_of(UCMCTL)

    def ask_all(self, ask):
        self.assertEqual(ask("ucmctl", ""), {*self.commands, "help"})
        self.assertEqual(ask("ucmctl", "verif"), {"verify"})
        self.assertEqual(ask("ucmctl", "evict --tier "), {"all", "dram", "nvme", "shared"})
        self.assertEqual(ask("ucmctl", "evict --tier n"), {"nvme"})
        self.assertEqual(ask("ucmctl", "verify --sal"), {"--salvage"})
        self.assertEqual(ask("ucmctl", "--so"), {"--socket"})
        self.assertEqual(ask("ucmctl", "shared "), {"gc"})
        self.assertEqual(ask("ucmctl", f"--socket {self.daemon.socket} ls "), {"1", "2"})
        self.assertEqual(ask("ucmctl", f"purge --yes --socket {self.daemon.socket} "), {"1", "2"})
        self.assertEqual(ask("ucmctl", "--socket /nonexistent ls "), set())
        self.assertEqual(ask("ucmd", "--set arena.si"), {"arena.size="})
        self.assertIn("replay", ask("ucm-bench", ""))

    def environment(self):
        return {**os.environ, "PATH": f"{os.path.dirname(UCMCTL)}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}

    def bash(self, program, line):
        words = [program, *line.split()] + ([""] if not line or line.endswith(" ") else [])
        script = (f"source {PAGES / (program + '.bash')}; COMP_CWORD={len(words) - 1}; COMP_WORDS=(\"$@\"); _{program.replace('-', '_')} "
                  "2>/dev/null; printf '%s\\n' \"${COMPREPLY[@]}\"")
        return set(run("bash", "--norc", "-c", script, "bash", *words, env=self.environment()).stdout.split())

    def test_bash(self):
        self.ask_all(self.bash)
        self.assertEqual(self.bash("ucmctl", "verify --offline /etc/host"), {str(p) for p in pathlib.Path("/etc").glob("host*")})

    @unittest.skipUnless(shutil.which("shellcheck"), "shellcheck is not installed")
    def test_shellcheck(self):
        run("shellcheck", "-s", "bash", *map(str, PAGES.glob("*.bash")))

    def test_bash_with_an_equals_sign(self):
        """Readline takes it for a word of its own."""
        self.assertEqual(self.bash("ucmctl", "evict --tier = d"), {"dram"})
        self.assertEqual(self.bash("ucmctl", f"--socket = {self.daemon.socket} ls "), {"1", "2"})

    @unittest.skipUnless(shutil.which("fish"), "fish is not installed")
    def test_fish(self):
        def ask(program, line):
            script = f"source {PAGES / (program + '.fish')}; complete -C '{program} {line}'"
            done = run("fish", "--no-config", "-c", script, env={**self.environment(), "HOME": self.daemon.directory})
            return {line.partition("\t")[0] for line in done.stdout.splitlines()}
        self.ask_all(ask)

    @unittest.skipUnless(shutil.which("zsh"), "zsh is not installed")
    def test_zsh(self):
        for program in ("ucmctl", "ucm-bench", "ucmd", *EVENTS):
            run("zsh", "-n", str(PAGES / f"_{program}"))
        ours, theirs = pty.openpty()
        shell = subprocess.Popen(["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                                 env={**self.environment(), "TERM": "dumb", "PS1": "%% "})
        self.addCleanup(os.close, ours)
        self.addCleanup(shell.wait, 10)
        self.addCleanup(shell.kill)
        os.close(theirs)

        def until(pattern):
            seen, deadline = "", time.monotonic() + 30
            while not re.search(pattern, seen):
                self.assertLess(time.monotonic(), deadline, seen)
                if select.select([ours], [], [], 0.2)[0]:
                    seen += os.read(ours, 65536).decode(errors="replace")
            return seen

        os.write(ours, f"fpath=({PAGES} $fpath); autoload -U compinit; compinit -u -D; setopt no_beep; echo READ''Y\n".encode())
        until(r"READY\r?\n")
        for line, pattern in (("ucmctl verif\t", "verify"), ("ucmctl evict --tier n\t", "--tier nvme"), ("ucmd --set arena.si\t", r"arena\.size="),
                              (f"ucmctl --socket {self.daemon.socket} ls \t", r"[\r\n]1 +2\b")):
            os.write(ours, line.encode())
            until(pattern)
            os.write(ours, b"\x15")


if __name__ == "__main__":
    unittest.main()
