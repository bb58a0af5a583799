"""A daemon for a test, in a directory of its own. $UCMD names another one than build/ucmd, $UCM_TEST_CUDA what it does with GPUs."""

import ctypes
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UCMD = os.environ.get("UCMD", os.path.join(TOP, "build/ucmd"))
UCMCTL = os.environ.get("UCMCTL", os.path.join(TOP, "build/ucmctl"))
TIMEOUT_S = 60


def until(true, what="it", limit_s=TIMEOUT_S):
    """Waits until the function returns something true, and returns that. what: names it for the
    error, or is a function that returns the name."""
    end = time.monotonic() + limit_s
    while not (result := true()):
        if time.monotonic() > end:
            raise AssertionError(f"{what() if callable(what) else what} did not come about in {limit_s} s")
        time.sleep(0.02)
    return result


def script_of(path):
    """A Python program, by its place in the tree, as a module."""
    sys.dont_write_bytecode = True
    loader = importlib.machinery.SourceFileLoader(os.path.basename(path).replace("-", "_"), os.path.join(TOP, path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def listens(path):
    """Whether a process listens at this socket. The socket's file is there a little earlier."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def halt(pid):
    """Stops it by SIGSTOP, and returns when none of its threads runs. After kill() alone, threads
    run on until the one that got the signal gets a core."""
    os.kill(pid, signal.SIGSTOP)
    until, directory = time.monotonic() + TIMEOUT_S, f"/proc/{pid}/task"
    while not all(state_of(directory, thread) in "TXZ" for thread in os.listdir(directory)):
        if time.monotonic() > until:
            raise RuntimeError(f"process {pid} does not stop")
        time.sleep(0.001)


def state_of(directory, thread):
    try:
        with open(os.path.join(directory, thread, "stat"), encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def logged(pid):
    """Returns when the daemon has written all that it has logged by now. A thread of its own
    writes, and sleeps when there is nothing to write. That thread gets its name when it first runs;
    until then it has the process's. A program that starts a daemon has another name, and no such
    thread."""
    until, directory, sleeps = time.monotonic() + TIMEOUT_S, f"/proc/{pid}/task", 0
    while sleeps < 3 and state_of(directory, str(pid)) not in "XZ" and time.monotonic() < until:
        threads = list(threads_named(directory, "log"))
        threads = threads or list(threads_named(directory, "ucmd"))[1:]
        sleeps = sleeps + 1 if all(state_of(directory, thread) in "SXZ" for thread in threads) else 0
        time.sleep(0.0005)


def threads_named(directory, name):
    for thread in os.listdir(directory) if os.path.isdir(directory) else []:
        try:
            with open(os.path.join(directory, thread, "comm"), encoding="utf-8") as comm:
                if comm.read().strip() == name:
                    yield thread
        except (FileNotFoundError, ProcessLookupError):
            pass


def ctl(socket, *words, **options):
    """What `ucmctl` does with these words at the daemon of this socket: its output, its complaint and its exit status."""
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 2 * TIMEOUT_S, **options}
    return subprocess.run([UCMCTL, "--socket", socket, *map(str, words)], **options)


class Daemon:
    """stderr: in place of its log. before: words before its command. directory: one that outlives
    the daemon, and may hold blocks of an earlier one. recovered: the daemon has found all of those
    when this returns. config: the text of its configuration file, which `more` overrides."""

    def __init__(self, nvme=True, before=(), directory=None, recovered=True, config=None, stderr=None, **more):
        self.directory, self.clients, self.kept = directory or tempfile.mkdtemp(prefix="protocol."), [], directory is not None
        os.chmod(self.directory, 0o755)
        self.socket = more.get("socket", os.path.join(self.directory, "s"))
        self.store = os.path.join(self.directory, "nvme")
        earlier = os.path.exists(self.store)
        os.makedirs(self.store, exist_ok=True)
        options = {"socket": self.socket, "socket_mode": "0666", "arena.size": "16MiB", "arena.slab": "1MiB", "arena.prefault": "false",
                   "device.cuda": os.environ.get("UCM_TEST_CUDA", "off"), "shutdown.drain": "10s", "state": self.directory}
        if nvme:
            options.update({"nvme.paths": self.store, "nvme.size": "256MiB", "nvme.segment": "4MiB"})
        if "shared.roots" in more:  # a root's process has a buffer for each thread, and all its pages from the start
            options["shared.threads"] = "4"
        options.update(more)
        self.config = os.path.join(self.directory, "ucmd.yaml")
        if config is not None:
            self.configure(config)
        argv = [*before, UCMD, *(["--config", self.config] if config is not None else [])] + [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
        libc = ctypes.CDLL(None)
        with open(os.path.join(self.directory, "log"), "ab") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log if stderr is None else stderr,
                                            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL))  # PR_SET_PDEATHSIG
        self.deadline = time.monotonic() + TIMEOUT_S
        self.until(self.answers, "did not start")
        if earlier and recovered:
            self.until(lambda: not re.search("recovering|of the snapshot looked at", self.health()), "did not find all that an earlier one stored")

    def until(self, condition, otherwise):
        while not condition():
            if self.process.poll() is not None or time.monotonic() > self.deadline:
                words = self.log()
                self.stop()
                raise RuntimeError(f"the daemon {otherwise}:\n{words}")
            time.sleep(0.02)

    def answers(self):
        return listens(self.socket)

    def ctl(self, *words, **options):
        return ctl(self.socket, *words, **options)

    def health(self):
        return self.ctl("health").stdout

    def stats(self):
        return json.loads(self.ctl("stats", "--json", check=True).stdout)

    def metrics(self):
        return self.stats()["metrics"]

    def configure(self, text):
        with open(self.config, "w", encoding="utf-8") as file:
            file.write(text)

    def log(self):
        if self.process.poll() is None:
            logged(self.process.pid)
        with open(os.path.join(self.directory, "log"), encoding="utf-8", errors="replace") as log:
            return log.read()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            if not self.kept:
                shutil.rmtree(self.directory, ignore_errors=True)


class DaemonCase(unittest.TestCase):
    """One daemon for each class, which must outlive its tests and end in order."""
    options = {}

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(**cls.options)

    @classmethod
    def tearDownClass(cls):
        status = cls.daemon.stop()
        assert status == 0, f"the daemon ended with {status}"
