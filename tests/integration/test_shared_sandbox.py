#!/usr/bin/python3
"""What a process of a root may not do: programs that try, started as the daemon starts a backend."""

import ctypes
import os
import shutil
import subprocess
import tempfile
import unittest

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UCMD = os.environ.get("UCMD", os.path.join(TOP, "build/ucmd"))
PYTHON = "/usr/bin/python3"
CREATE_RULESET, VERSION = 444, 1  # of Landlock


def landlock():
    return ctypes.CDLL(None, use_errno=True).syscall(CREATE_RULESET, None, 0, VERSION)


class Sandbox(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="sandbox.")
        self.inside, self.outside = os.path.join(self.directory, "in"), os.path.join(self.directory, "out")
        os.mkdir(self.inside)
        with open(self.outside, "w") as f:
            f.write("a tenant's blocks")

    def tearDown(self):
        shutil.rmtree(self.directory)

    def run_in(self, code, *words):
        """What the program prints, or the name of the exception that ended it."""
        body = "\n".join("    " + line for line in code.splitlines())
        program = f"import os, socket, sys, ctypes, mmap\ntry:\n{body}\nexcept BaseException as e:\n    print(type(e).__name__)"
        argv = [UCMD, "--backend", *words, "--", PYTHON, "-c", program]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    @unittest.skipIf(landlock() < 1, "this kernel has no Landlock")
    def test_files(self):
        self.assertEqual(self.run_in(f"print(open({self.outside!r}).read())"), "PermissionError")
        self.assertEqual(self.run_in(f"open({self.outside!r}, 'a')"), "PermissionError")
        self.assertEqual(self.run_in(f"os.unlink({self.outside!r})", f"write={self.inside}"), "PermissionError")
        self.assertEqual(self.run_in(f"print(open({self.outside!r}).read())", f"read={self.outside}"), "a tenant's blocks")
        self.assertEqual(self.run_in(f"open({self.outside!r}, 'a')", f"read={self.outside}"), "PermissionError")
        made = f"os.makedirs({self.inside!r} + '/a/b'); open({self.inside!r} + '/a/b/c', 'w').write('x')\n" \
               f"os.rename({self.inside!r} + '/a/b/c', {self.inside!r} + '/a/c'); print('made')"
        self.assertEqual(self.run_in(made, f"write={self.inside}"), "made")
        self.assertEqual(self.run_in(f"os.mkdir({self.inside!r} + '/d')", f"read={self.inside}"), "PermissionError")

    def test_a_directory_that_is_missing(self):
        done = subprocess.run([UCMD, "--backend", "write=/nonexistent/kv", "--", "/bin/true"], capture_output=True, text=True, timeout=60)
        if landlock() >= 1:
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("write=/nonexistent/kv: No such file or directory", done.stderr)

    @unittest.skipIf(landlock() < 1, "this kernel has no Landlock")
    def test_the_daemons_memory(self):
        self.assertEqual(self.run_in("open(f'/proc/{os.getppid()}/mem', 'rb')"), "PermissionError")
        self.assertEqual(self.run_in("open(f'/proc/{os.getppid()}/environ', 'rb')"), "PermissionError")

    @unittest.skipIf(landlock() < 6, "this kernel's Landlock knows no signals")
    def test_signals(self):
        self.assertEqual(self.run_in("os.kill(os.getppid(), 0)"), "PermissionError")
        self.assertEqual(self.run_in("os.kill(os.getpid(), 0); print('own')"), "own")

    def test_calls(self):
        self.assertEqual(self.run_in("print(ctypes.CDLL(None).ptrace(16, os.getppid(), None, None))"), "-1")
        self.assertEqual(self.run_in("print(ctypes.CDLL(None).unshare(0x10000000))"), "-1")
        self.assertEqual(self.run_in("print(ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, None))"), "-1")
        io_uring = "print(ctypes.CDLL(None, use_errno=True).syscall(425, 8, None), ctypes.get_errno())"
        self.assertEqual(self.run_in(io_uring), "-1 1")

    def test_threads_and_children(self):
        threads = "import threading\nt = threading.Thread(target=print, args=('thread',)); t.start(); t.join()"
        self.assertEqual(self.run_in(threads), "thread")
        self.assertEqual(self.run_in("import subprocess\nprint(subprocess.run(['/bin/echo', 'child'], capture_output=True, text=True).stdout)"), "child")

    def test_network(self):
        inet, local = "socket.socket(); print('yes')", "socket.socket(socket.AF_UNIX); print('yes')"
        self.assertEqual(self.run_in(inet), "OSError")
        self.assertEqual(self.run_in(local), "OSError")
        self.assertEqual(self.run_in(inet, "network"), "yes")
        self.assertEqual(self.run_in(local, "network"), "OSError")
        self.assertEqual(self.run_in("socket.socketpair(); print('yes')"), "yes")

    @unittest.skipIf(os.geteuid() != 0, "ports below 1024 are root's")
    def test_ports_that_file_servers_want(self):
        bound = "for port in range(900, 1000):\n    try:\n        socket.socket().bind(('127.0.0.9', port)); print('yes'); break\n" \
                "    except PermissionError: print('no'); break\n    except OSError: pass"
        self.assertEqual(self.run_in(bound, "network"), "yes")

    def test_limits(self):
        self.assertEqual(self.run_in("bytearray(200 << 20)", f"memory={150 << 20}"), "MemoryError")
        self.assertEqual(self.run_in("bytearray(200 << 20); print('fits')", f"memory={1 << 30}"), "fits")
        self.assertEqual(self.run_in("import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"), "(0, 0)")
        self.assertEqual(self.run_in("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= 4096)"), "True")
        self.assertEqual(self.run_in("import resource; print(resource.getrlimit(resource.RLIMIT_NPROC)[1] <= 4096)"), "True")
        self.assertEqual(self.run_in("import resource; print(resource.getrlimit(resource.RLIMIT_STACK))"), f"({8 << 20}, {8 << 20})")
        self.assertEqual(self.run_in("print(open('/proc/self/oom_score_adj').read())"), "1000")
        nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
        self.assertEqual(self.run_in("print(os.getpriority(os.PRIO_PROCESS, 0))"), str(nice))
        self.assertIn("NoNewPrivs:\t1", self.run_in("print(open('/proc/self/status').read())"))


if __name__ == "__main__":
    unittest.main()
