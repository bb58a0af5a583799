"""A daemon for one program, and checks of what can be wrong with it."""

import ctypes
import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
import time

from wire import WAIT_S, Hung

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
UCMD = os.environ.get("UCMD", os.path.join(TOP, "build/ucmd"))
LIBC = ctypes.CDLL(None)
FIRST_UID = 1000


class Finding(Exception):
    """kind: for people and for comparing: one mistake is one kind."""

    def __init__(self, kind, words):
        super().__init__(f"{kind}: {words}")
        self.kind, self.words = kind, words


class Daemon:
    def __init__(self, options, directory):
        self.options, self.directory = options, directory
        self.socket, self.key_file = os.path.join(directory, "s"), os.path.join(directory, "keys")
        self.log_path = os.path.join(directory, "log")
        os.chmod(directory, 0o755)
        self.keys = [secrets.token_hex(32)]
        self.process = None
        for name in ("nvme", "shared"):
            os.makedirs(os.path.join(directory, name), exist_ok=True)
        self.keep = tempfile.mkdtemp(prefix="fuzz.", dir="/dev/shm") if options["keep"] else None
        self.rekey(0)

    def rekey(self, more=1):
        self.keys = [secrets.token_hex(32) for _ in range(more)] + self.keys
        with open(os.open(self.key_file + ".new", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write("".join(key + "\n" for key in self.keys))
        os.rename(self.key_file + ".new", self.key_file)

    def start(self):
        options = {"socket": self.socket, "socket_mode": "0666", "device.cuda": "off", "state": self.directory, "shutdown.drain": "5s",
                   "metrics.socket": "", "shared.negative": "50ms", **self.options["set"]}
        if self.options["nvme"]:
            options["nvme.paths"] = os.path.join(self.directory, "nvme")
        if self.options["shared"]:
            options["shared.roots"] = os.path.join(self.directory, "shared")
        if self.options["keep"]:
            options["arena.persist_dir"] = self.keep
        config = os.path.join(self.directory, "ucmd.yaml")
        with open(config, "w", encoding="ascii") as file:
            if self.options["encrypted"]:
                file.write(f'encryption:\n  tenants: ["uid:{FIRST_UID} file:{self.key_file}"]\n')
                if self.options["keep"]:
                    file.write("  allow_persistent_arena: true\n")
        argv = [UCMD, "--config", config] + [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
        environment = dict(os.environ)
        environment["ASAN_OPTIONS"] = ("detect_leaks=1:abort_on_error=0:symbolize=1:log_path=" + os.path.join(self.directory, "san")
                                       + ":" + os.environ.get("FUZZ_ASAN", ""))
        environment["UBSAN_OPTIONS"] = "print_stacktrace=1:log_path=" + os.path.join(self.directory, "san")
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                                            preexec_fn=lambda: LIBC.prctl(1, signal.SIGKILL))  # PR_SET_PDEATHSIG
        deadline = time.monotonic() + WAIT_S
        while True:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(self.socket) == 0:
                    return
            if self.process.poll() is not None:
                self.ended("at its start")
            if time.monotonic() > deadline:
                raise Hung("it does not start")
            time.sleep(0.01)

    def ended(self, when):
        """Says why it ended, when it should not have."""
        try:
            status = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise Finding("hang", f"{when}: it ended its connections, and lives") from None
        self.reports()
        raise Finding(f"end {status}", f"{when}\n{self.log()}")

    def reports(self):
        """What a sanitizer said; the first function of the project names it."""
        for name in sorted(os.listdir(self.directory)):
            if name.startswith("san."):
                with open(os.path.join(self.directory, name), encoding="utf-8", errors="replace") as file:
                    text = file.read()
                if not text.strip():
                    continue
                what = re.search(r"ERROR: (\w+: [\w-]+)|runtime error: (.{1,50})", text)
                frames = [f for f in re.findall(r"#\d+ \S+ in (\S+)", text) if not f.startswith("__") and "mem" not in f]
                raise Finding(f"{what.group(1) or what.group(2) if what else 'report'} {frames[0] if frames else '?'}", text[:6000])

    def stop(self, how):
        """True: it ended as it should."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM if how == "term" else signal.SIGKILL)
        try:
            status = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise Finding("hang", f"it does not stop\n{self.log()}") from None
        self.reports()
        if how == "term" and status != 0:
            raise Finding(f"end {status}", self.log())

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as file:
            return file.read()[-3000:]
