#!/usr/bin/python3
"""What a service manager and an operator rely on: readiness, socket activation, watchdog, signals,
exit status. Two daemons never share a socket or a cache file."""

import contextlib
import ctypes
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import unittest

from daemon import UCMD, ctl, until

TIMEOUT_S = 30
SMALL = ["--set", "arena.size=16MiB", "--set", "arena.slab=1MiB", "--set", "device.cuda=off",
         "--set", "shutdown.drain=2s"]


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Service(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="ucm-service-")
        self.addCleanup(shutil.rmtree, self.dir)
        self.socket = self.dir + "/s"

    def start(self, *arguments, before=None, **options):
        def prepare():
            die_with_parent()
            if before:
                before()
        log = open(self.dir + "/log", "ab")
        self.addCleanup(log.close)
        daemon = subprocess.Popen([UCMD, "--set", "socket=" + self.socket, *SMALL, *arguments], preexec_fn=prepare,
                                  stdin=subprocess.DEVNULL, stderr=log, **options)
        self.addCleanup(self.stop, daemon)
        return daemon

    def stop(self, daemon):
        if daemon.poll() is None:
            daemon.kill()
        daemon.wait(TIMEOUT_S)

    def log(self):
        with open(self.dir + "/log") as log:
            return log.read()

    def healthy(self):
        until(lambda: ctl(self.socket, "health").returncode == 0, self.log)

    def log_says(self, words):
        until(lambda: words in self.log(), self.log)

    def notifications(self):
        inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        inbox.bind(self.dir + "/notify")
        inbox.settimeout(TIMEOUT_S)
        self.addCleanup(inbox.close)
        return inbox

    def test_ready_watchdog_reload_stopping(self):
        inbox = self.notifications()
        with open(self.dir + "/ucmd.yaml", "w") as config:
            config.write("log:\n  level: info\n")
        daemon = self.start("--config", self.dir + "/ucmd.yaml",
                            env={**os.environ, "NOTIFY_SOCKET": self.dir + "/notify", "WATCHDOG_USEC": "200000"})
        self.assertIn(b"READY=1", inbox.recv(4096))
        self.assertEqual(inbox.recv(4096), b"WATCHDOG=1")
        with open(self.dir + "/ucmd.yaml", "w") as config:
            config.write("log:\n  level: debug\narena:\n  slab: 2MiB\n")
        daemon.send_signal(signal.SIGHUP)
        self.log_says("reloaded")
        states = [b""]
        while b"READY=1" not in states[-1]:
            states.append(inbox.recv(4096))
        self.assertTrue([state for state in states if state.startswith(b"RELOADING=1")], states)
        daemon.send_signal(signal.SIGTERM)
        while not states[-1].startswith(b"STOPPING=1"):
            states.append(inbox.recv(4096))
        self.assertEqual(daemon.wait(TIMEOUT_S), 0)
        self.assertFalse(os.path.exists(self.socket), "the socket was left")

    def test_health_answers_a_supervisor(self):
        def health(*how):
            return ctl(self.socket, "health", *how).returncode
        self.start("--set", "shared.roots=/nonexistent/kv")
        until(lambda: health() == 4, self.log)
        self.assertEqual([health("--live"), health("--ready"), health("--live", "--ready")], [0, 0, 2])
        self.socket += ".other"
        self.assertEqual([health(), health("--live"), health("--ready")], [3, 3, 3])

    def test_a_bad_reload_changes_nothing(self):
        with open(self.dir + "/ucmd.yaml", "w") as config:
            config.write("log:\n  level: info\n")
        daemon = self.start("--config", self.dir + "/ucmd.yaml")
        self.healthy()
        with open(self.dir + "/ucmd.yaml", "w") as config:
            config.write("arena:\n  sise: 1GiB\n")
        daemon.send_signal(signal.SIGHUP)
        self.log_says("reload-refused")
        self.assertIn("did you mean", self.log())
        self.healthy()

    def test_signals_interrupt_no_thread(self):
        """The event loop reads them, also one that the parent ignored, as nohup does."""
        with open(self.dir + "/ucmd.yaml", "w") as config:
            config.write("log:\n  level: info\n")
        daemon = self.start("--config", self.dir + "/ucmd.yaml",
                            before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        self.healthy()
        for status in pathlib.Path(f"/proc/{daemon.pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):  # a thread that ended
                blocked = int(re.search(r"SigBlk:\s*(\w+)", status.read_text())[1], 16)
                for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                    self.assertTrue(blocked >> (number - 1) & 1, (status, number))
        daemon.send_signal(signal.SIGHUP)
        self.log_says("reloaded")
        daemon.send_signal(signal.SIGINT)
        self.assertEqual(daemon.wait(TIMEOUT_S), 0)

    def test_socket_activation(self):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.dir + "/activated")
        listener.listen()
        self.addCleanup(listener.close)

        def pass_it():
            os.dup2(listener.fileno(), 3)
            os.set_inheritable(3, True)
            os.environ["LISTEN_PID"] = str(os.getpid())

        # LISTEN_PID must be the daemon's own, so a shell sets it and becomes the daemon.
        script = 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@"'
        daemon = subprocess.Popen(["/bin/sh", "-c", script, UCMD, "--set", "socket=" + self.socket, *SMALL],
                                  preexec_fn=lambda: (die_with_parent(), pass_it()), pass_fds=(3,),
                                  stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(self.stop, daemon)
        self.socket = self.dir + "/activated"
        self.healthy()
        daemon.send_signal(signal.SIGTERM)
        self.assertEqual(daemon.wait(TIMEOUT_S), 0)
        self.assertTrue(os.path.exists(self.socket), "the manager's socket is not the daemon's to remove")

    def test_a_second_daemon_is_refused(self):
        self.start("--set", "nvme.paths=" + self.dir, "--set", "nvme.size=64MiB", "--set", "nvme.segment=4MiB")
        self.healthy()
        for what, arguments in (("socket", ["--set", "socket=" + self.socket]),
                                ("cache file", ["--set", "socket=" + self.socket + "2", "--set",
                                                "nvme.paths=" + self.dir, "--set", "nvme.size=64MiB", "--set",
                                                "nvme.segment=4MiB"])):
            second = subprocess.run([UCMD, *SMALL, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
            self.assertEqual(second.returncode, 1, what)
            self.assertIn("another ucmd", second.stderr, what)
        self.healthy()

    def test_check_and_exit_codes(self):
        def run(*arguments):
            return subprocess.run([UCMD, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
        self.assertEqual(run("--version").stdout.split()[0], "ucmd")
        self.assertEqual(run("--check", "--set", "socket=" + self.socket).returncode, 0)
        self.assertFalse(os.path.exists(self.socket))
        bad = run("--check", "--set", "socket=" + self.socket, "--set", "arena.size=4GB")
        self.assertEqual(bad.returncode, 1)
        self.assertIn("GiB", bad.stderr)
        self.assertEqual(run("--chekc").returncode, 2)
        self.assertEqual(run("extra").returncode, 2)

    def refused_alike(self, text, line, says):
        """--check and the start refuse this with the same words, and leave no files."""
        with open(self.dir + "/ucmd.yaml", "w") as config:
            config.write(text)
        words = [UCMD, "--config", self.dir + "/ucmd.yaml", "--set", "socket=" + self.socket, *SMALL]
        told = [subprocess.run(words + more, capture_output=True, text=True, timeout=TIMEOUT_S)
                for more in (["--check"], [])]
        for done in told:
            self.assertEqual(done.returncode, 1, text)
            self.assertIn(f"ucmd.yaml:{line}: ", done.stderr)
            self.assertIn(says, done.stderr)
        self.assertEqual(told[0].stderr, told[1].stderr)
        self.assertFalse(os.path.exists(self.socket))

    def test_check_refuses_what_the_start_refuses(self):
        directory = self.dir + "/nvme"
        os.mkdir(directory)
        nvme = f"nvme:\n  size: 64MiB\n  segment: 4MiB\n  paths: [{directory}]\n"
        self.refused_alike("log:\n  level: info\nsocket_group: nosuchgroup\n", 3, "no group")
        self.refused_alike("arena:\n  persist_dir: /\n", 2, "not on a tmpfs")
        self.refused_alike("arena:\n  persist_dir: /nowhere\n", 2, "does not exist")
        self.refused_alike(nvme.replace("nvme]", "none]"), 4, "does not exist")
        self.refused_alike(nvme.replace("]", f", {directory}/]"), 4, "name each once")
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:  # no driver
            done = subprocess.run([UCMD, "--check", "--set", "socket=" + self.socket, "--set", "arena.size=64MiB",
                                   "--set", "device.cuda=required"], capture_output=True, text=True, timeout=TIMEOUT_S)
            self.assertIn("--set: device.cuda is required, but", done.stderr)
        cache = directory + "/ucmd.cache"
        with open(cache, "wb") as other:
            other.write(b"x" * 65536)
        self.refused_alike(nvme, 4, "is not a file of ucmd")
        os.unlink(cache)
        os.mkdir(cache)
        self.refused_alike(nvme, 4, "is not a regular file")
        os.rmdir(cache)
        daemon = self.start("--config", self.dir + "/ucmd.yaml")
        self.healthy()
        running = subprocess.run([UCMD, "--check", "--config", self.dir + "/ucmd.yaml", "--set",
                                  "socket=" + self.socket, *SMALL], capture_output=True, text=True, timeout=TIMEOUT_S)
        self.assertEqual(running.returncode, 0, "alongside the daemon that runs with it: " + running.stderr)
        daemon.terminate()
        daemon.wait(TIMEOUT_S)
        self.refused_alike(nvme.replace("4MiB", "8MiB"), 4, "set nvme.segment to that")


if __name__ == "__main__":
    unittest.main()
