#!/usr/bin/python3
"""Roots that are processes, through real daemons: hosts find each other's blocks, and a process that is killed costs its own
hits only."""

import faulthandler
import json
import os
import signal
import time
import unittest

from daemon import UCMD
from second_client import OK
from shared_case import SMALL, Host, SharedCase

DIRECTORY = os.path.join(os.path.dirname(os.path.realpath(UCMD)), "ucmd-backend-directory")
FIRST = """# What a backend has open when it starts, before it opens files of its own.
import json, os
opened = {}
for fd in range(4096):
    try:
        opened[fd] = os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        pass
with open(__file__ + ".opened", "w") as f:
    json.dump(opened, f)
"""
SAYS = """# What a backend says before it serves.
import os
print("on standard output", flush=True)
os.write(2, b'a "quoted" line\\n\\n1970-01-01T00:00:00.000Z error core died\\x1b[2J\\n' + b"x" * 100000 + b"\\n")
"""
FLOODS = """if os.fork() == 0:
    while True:
        os.write(2, b"again and again\\n" * 4096)
"""


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return " Z " not in f.read()
    except (FileNotFoundError, ProcessLookupError):
        return False


class Backends(SharedCase):
    def host(self, blocks=16, command=None, **options):
        root = f"process:cold read={os.path.dirname(DIRECTORY)} write={self.directory} buffer=4MiB -- {command or f'{DIRECTORY} {self.directory}'}"
        self.hosts.append(Host(root, self.identity, blocks, **{**SMALL, **options}))
        return self.hosts[-1]

    def written(self, host, count):
        self.right = host.dumped(range(count))
        self.until(lambda: len(self.files()) == count, "their writing")

    def test_another_host_reads_what_one_wrote(self):
        self.identity["parts"], self.identity["layers"] = 1, self.identity["layers"][:1]
        self.written(self.host(), 8)
        other = self.host()
        self.assertEqual(other.loaded(self.right), 8)
        root = other.root()
        self.assertEqual((root["backend"], root["program"], root["health"]), ("process", "directory", "up"))
        self.assertEqual((root["backend_starts"], root["backend_ends"]), (1, 0))
        self.assertRegex(other.daemon.ctl("status").stdout, rf"shared +process:cold: up, .*, directory with pid {root['pid']}\n")
        self.assertIn(str(root["pid"]), other.daemon.ctl("shared").stdout)

    def test_what_the_process_inherits(self):
        pid = self.until_up(self.host(command=self.program(FIRST)))
        with open(f"/proc/{pid}/environ") as f:
            self.assertEqual({word.split("=")[0] for word in f.read().split("\0") if word}, {"PATH", "LANG", "UCM_BACKEND_FD"})
        with open(os.path.join(self.directory, "program.py.opened")) as f:
            opened = json.load(f)
        self.assertEqual(sorted(opened), ["0", "1", "2", "3"])
        self.assertEqual(opened["0"], "/dev/null")
        self.assertTrue(opened["3"].startswith("socket:"), opened)
        self.assertTrue(opened["1"] == opened["2"] and opened["1"].startswith("pipe:"), opened)
        self.assertEqual(os.getsid(pid), pid)
        self.assertEqual(os.readlink(f"/proc/{pid}/cwd"), "/")

    def program(self, *first):
        """The directory backend, started by lines of Python."""
        program = os.path.join(self.directory, "program.py")
        with open(program, "w") as f:
            f.write("".join(first) + f"os.execv({DIRECTORY!r}, {[DIRECTORY, self.directory]!r})\n")
        return f"/usr/bin/python3 {program} {self.directory}"

    def said(self, host):
        return [line for line in host.daemon.log().splitlines() if " shared backend-says root=process:cold " in line]

    def test_what_the_process_says(self):
        host = self.host(command=self.program(SAYS, FLOODS))
        pid = self.until_up(host)
        self.until(lambda: any("again and again" in line for line in self.said(host)), "its flood")
        self.written(host, 8)
        lines = self.said(host)
        self.assertEqual([line.split(" ", 2)[1] for line in lines], ["warn"] * len(lines))
        texts = [line.partition(" text=")[2] for line in lines[:4]]
        self.assertEqual(texts[:3], ['"on standard output"', r'"a \"quoted\" line"', '"1970-01-01T00:00:00.000Z error core died?[2J"'])
        self.assertRegex(texts[3], r'^"x{200,800}\.\.\."$')
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: any(" dropped=" in line for line in self.said(host)), "the count of what was dropped")
        for line in host.daemon.log().splitlines():
            self.assertRegex(line, r"^20\d\d-\S+Z (info|warn|error) [a-z]+ [a-z-]+( |$)")
        self.assertLess(len(self.said(host)), 1000)

    def test_what_it_says_before_it_fails(self):
        host = self.host(command=self.program("import sys\n", "print('first', file=sys.stderr)\n", "sys.exit('no such bucket')\n"))
        self.until(lambda: "no such bucket" in host.daemon.log() and "exit status 1" in host.daemon.log(), "its reason")
        self.assertEqual([line.partition(" text=")[2] for line in self.said(host)[:2]], ['"first"', '"no such bucket"'])

    def until_up(self, host):
        self.until(lambda: host.root()["health"] == "up" and host.root()["program"], "its process")
        return host.root()["pid"]

    def test_a_killed_process_costs_its_own_hits(self):
        self.identity["parts"], self.identity["layers"] = 1, self.identity["layers"][:1]
        host = self.host()
        self.written(host, 8)
        for _ in range(3):
            pid = self.until_up(host)
            os.kill(pid, signal.SIGKILL)
            self.assertEqual(host.loaded(self.right), 8)  # DRAM serves meanwhile
            self.until(lambda: host.root()["pid"] not in (0, pid) or self.poke(host), "the next process")
        self.assertEqual(host.root()["backend_ends"], 3)
        self.assertEqual(host.root()["backend_kills"], 0)
        other = self.host()
        self.assertEqual(other.loaded(self.right), 8)

    def poke(self, host):
        """Asks the root, which starts a process once the pause is over."""
        host.look(time.time_ns() % 10**9, per_key=True)
        return False

    def test_a_command_that_ends_at_once(self):
        host = self.host(command="/bin/false")
        self.until(lambda: host.root()["health"] == "down", "its failure")
        self.assertRegex(host.root()["reason"], "the backend: ")
        self.assertIn("no process", host.daemon.ctl("status").stdout)
        self.assertEqual(set(host.regions[0].dump(range(4), range(4))), {OK})

    def test_the_process_ends_with_the_daemon(self):
        host = self.host()
        pid = self.until_up(host)
        host.daemon.kill()
        self.hosts.remove(host)
        host.client.close()
        self.until(lambda: not runs(pid), "its end")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(300, exit=True)
    unittest.main()
