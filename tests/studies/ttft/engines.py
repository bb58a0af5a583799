"""A daemon and engines, each a process with PyTorch, for ttft.py. An engine is an object whose methods are called by name
with JSON; what it prints goes to standard error."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
UCMD = os.environ.get("UCMD", os.path.join(TOP, "build/ucmd"))
UCMCTL = os.environ.get("UCMCTL", os.path.join(os.path.dirname(UCMD), "ucmctl"))
sys.path.insert(0, os.environ.get("UCM_PYTHON", os.path.join(TOP, "client/python")))


def serve(make):
    """The engine's side: makes the engine, says so, and answers calls until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch
    with torch.inference_mode():
        engine = make()
        answers.write("{}\n")
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            answers.write(json.dumps(getattr(engine, name)(*arguments)) + "\n")


class Process:
    """engine("load", 1024, 50) calls load(1024, 50) of the engine. Before that, answer() waits until it is ready."""

    def __init__(self, program, options):
        self.process = subprocess.Popen([sys.executable, program, "--engine", json.dumps(options)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("an engine ended early")
        return json.loads(line)

    def __call__(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)


class Daemon:
    """words: its configuration."""

    def __init__(self, words, folder):
        self.socket = words["socket"]
        argv = [UCMD]
        argv += [w for key, value in words.items() for w in ("--set", f"{key}={value}")]
        self.process = subprocess.Popen(argv, stdout=open(os.path.join(folder, "log"), "a"), stderr=subprocess.STDOUT)
        end = time.monotonic() + 60
        while not os.path.exists(self.socket):
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the daemon did not start:\n" + open(os.path.join(folder, "log")).read())
            time.sleep(0.05)

    def ctl(self, *words):
        return subprocess.run([UCMCTL, "--socket", self.socket, *words], capture_output=True, check=True).stdout

    def metrics(self):
        return json.loads(self.ctl("--json", "stats"))["metrics"]

    def to_nvme(self):
        """Waits until everything lies on NVMe, and drops it from DRAM."""
        end = time.monotonic() + 180
        while time.monotonic() < end:
            now = self.metrics()
            if now["nvme_writes"] + now["nvme_write_dropped"] >= now["dump_blocks"]:
                break
            time.sleep(0.1)
        for namespace in json.loads(self.ctl("--json", "namespaces"))["namespaces"]:
            self.ctl("evict", str(namespace["ns"]), "--tier", "dram", "--yes")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def bus(torch):
    """Bytes a second from pinned memory to the GPU."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return (1 << 30) / statistics.median(times)
