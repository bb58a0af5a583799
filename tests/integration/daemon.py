"""A daemon for a test, in a folder of its own. $UCMD names another one than build/ucmd."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UCMD = os.environ.get("UCMD", os.path.join(TOP, "build/ucmd"))
TIMEOUT_S = 20


class Daemon:
    def __init__(self, nvme=True, **more):
        self.folder, self.clients = tempfile.mkdtemp(prefix="protocol."), []
        os.chmod(self.folder, 0o755)
        self.socket = more.get("socket", os.path.join(self.folder, "s"))
        self.store = os.path.join(self.folder, "nvme")
        os.mkdir(self.store)
        options = {"socket": self.socket, "socket_mode": "0666", "arena.size": "64MiB", "arena.extent": "1MiB",
                   "device.cuda": "off", "shutdown.drain": "10s"}
        if nvme:
            options.update({"nvme.paths": self.store, "nvme.size": "256MiB", "nvme.segment": "4MiB"})
        options.update(more)
        argv = [UCMD] + [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
        libc = ctypes.CDLL(None)
        with open(os.path.join(self.folder, "log"), "wb") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL))  # PR_SET_PDEATHSIG
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(self.socket)
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    with open(os.path.join(self.folder, "log"), errors="replace") as log:
                        words = log.read()
                    self.stop()
                    raise RuntimeError("the daemon did not start:\n" + words) from None
                time.sleep(0.02)

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
            shutil.rmtree(self.folder, ignore_errors=True)
