#!/usr/bin/env python3
"""GPU memory between a daemon and workers in other namespaces, as other users, in containers, and
under the shipped unit's sandbox. Shows which way works where, and what is said where it does not.

usage: isolation.py [--json FILE]
Needs root, a GPU, and the bundle around it ($UCM_BUNDLE; default three directories up). Exit status: 0 when all is as
docs/containers.md says.
"""

import argparse
import concurrent.futures
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
BUNDLE = os.environ.get("UCM_BUNDLE", str(HERE.parents[2]))
BUNDLE_AT = "/run/ucmd-bundle"  # in a sandbox
INSIDE = f"{BUNDLE_AT}/{HERE.relative_to(BUNDLE)}"
TIMEOUT_S = 60
WORKERS_AT_ONCE, DAEMONS_AT_ONCE = 6, 4

WAYS = ("handle", "descriptor", "event", "ring")
PID = ("--pid", "--fork", "--kill-child", "--mount-proc")
USER = ("--user", "--map-root-user")
OWN_SHM = ("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
APART = PID + ("--ipc", "--net", "--uts", "--mount")


def unshare(*flags, then=()):
    return ("unshare", *flags, *then)


def sandbox(kind, *options, before=()):
    return (*before, sys.executable, "-B", str(HERE / "sandbox.py"), kind, "--bundle", BUNDLE, *options, "--")


# The words before a worker's command. RUN is the directory of its daemon's socket.
RUN = "@RUN@"
STATE = "@STATE@"
WORKERS = {
    "host": (),
    "pid": unshare(*PID),
    "ipc": unshare("--ipc"),
    "mount, own /dev/shm": unshare("--mount", then=OWN_SHM),
    "net": unshare("--net"),
    "user": unshare(*USER),
    "all of them": unshare(*APART, *USER, then=OWN_SHM),
    "uid 1000": sandbox("user"),
    "uid 900": sandbox("user", "--uid", "900"),
    "pod": sandbox("pod", "--run", RUN, before=unshare(*APART)),
    "pod, user namespace": sandbox("pod", "--run", RUN, "--uid", "0", before=unshare(*APART, *USER)),
}
SOME = ("host", "uid 900", "uid 1000", "pod")
DAEMON_POD = ("pod", "--run", RUN, "--state", STATE, "--uid", "900")
UNIT = ("unit", "--run", RUN, "--state", STATE, "--report", f"{STATE}/../report")
# name: what comes before the daemon's command, and its workers.
DAEMONS = {
    "host": ((), tuple(WORKERS)),
    "uid 900": (sandbox("user", "--uid", "900"), SOME),
    "pid": (unshare(*PID), SOME),
    "ipc": (unshare("--ipc"), SOME),
    "mount, own /dev/shm": (unshare("--mount", then=OWN_SHM), SOME),
    "net": (unshare("--net"), SOME),
    "user": (unshare(*USER), SOME),
    "pod": (sandbox(*DAEMON_POD, before=unshare("--ipc", "--net", "--uts", "--mount")), SOME),
    "pod without hostPID": (sandbox(*DAEMON_POD, before=unshare(*APART)), SOME),
    "unit": (sandbox(*UNIT), SOME),
    "unit, MemoryDenyWriteExecute": (sandbox(*UNIT, "--set", "MemoryDenyWriteExecute=yes"), SOME),
}

# ---- what docs/containers.md says ----

BLIND = ("pid", "pod without hostPID")  # daemons that see no worker
SAME = ("uid 900", "unit", "unit, MemoryDenyWriteExecute")
EVENTS = {("host", worker) for worker in ("host", "ipc", "net", "user")} | {("ipc", "host"), ("net", "host")} | {
    (daemon, "uid 900") for daemon in SAME}


def expected(daemon, worker, way):
    """None: it works. Otherwise what the sentence has in it."""
    if way == "handle" and daemon in BLIND and worker == "pod":
        return "the daemon's own number"  # each is process 1 of its namespace
    if way == "ring" and daemon in BLIND:
        return "can't be seen"
    if way == "event" and (daemon, worker) not in EVENTS:
        return "\\x07"  # the status DEVICE; the daemon's log has the sentence
    return None


def wrong(daemon, worker, way, said):
    sentence = expected(daemon, worker, way)
    return said != "works" if sentence is None else sentence not in said


class Daemon:
    """One of the bundle's. Sandboxes have its directories elsewhere than the host."""

    def __init__(self, name, before, calibration):
        self.name = name
        self.directory = tempfile.mkdtemp(prefix="ucm-isolation.")
        self.run, self.state = f"{self.directory}/run", f"{self.directory}/state"
        inside = "sandbox.py" in " ".join(before)
        for path in (self.run, self.state):
            os.mkdir(path)
            os.chown(path, 900 if inside else 0, -1)
        os.chmod(self.directory, 0o755)
        for path in calibration:
            shutil.copy(path, self.state)
            os.chmod(f"{self.state}/{os.path.basename(path)}", 0o644)
        mounted = "pod" in before or "unit" in before
        run, state = ("/run/ucmd", "/var/lib/ucmd") if mounted else (self.run, self.state)
        bundle = BUNDLE_AT if inside else BUNDLE
        settings = {"socket": f"{run}/s", "socket_mode": "0666", "arena.size": "256MiB", "device.cuda": "required",
                    "copy.strategy": "staged", "copy.calibration": state, "nvme.paths": state, "nvme.size": "256MiB"}
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        libraries = ":".join(filter(None, (f"{bundle}/lib", os.environ.get("LD_LIBRARY_PATH"))))
        command = [*self.fit(before), "env", f"LD_LIBRARY_PATH={libraries}", f"{bundle}/ucmd", *sets]
        self.log = f"{self.directory}/log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))

    def fit(self, words):
        return [word.replace(RUN, self.run).replace(STATE, self.state) for word in words]

    def wait(self):
        """Until it listens. None, or what it said instead."""
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end and self.process.poll() is None:
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    return client.connect(f"{self.run}/s")
                except OSError:
                    time.sleep(0.02)
        return self.words()

    def words(self):
        return pathlib.Path(self.log).read_text(errors="replace")

    def worker(self, name):
        before = self.fit(WORKERS[name])
        here = INSIDE if "sandbox.py" in " ".join(before) else HERE
        path = "/run/ucmd/s" if "pod" in before else f"{self.run}/s"
        command = [*before, "python3", "-B", f"{here}/isolated_worker.py", path, name, *WAYS]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
            lines, words = done.stdout.splitlines(), done.stderr
        except subprocess.TimeoutExpired as late:
            lines, words = (late.stdout or b"").decode().splitlines(), "no answer in time"
        said = {}
        for line in lines:
            said.update(json.loads(line))
        return {way: said.get(way, (words.strip().splitlines() or ["it ended"])[-1]) for way in WAYS}

    def stop(self):
        """True for a clean end. In a PID namespace of its own it is a child, which gets the signal."""
        if self.process.poll() is not None:
            return False
        pid = self.process.pid
        try:
            children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            children = []
        for target in children or [str(pid)]:
            os.kill(int(target), signal.SIGTERM)
        try:
            clean = self.process.wait(TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            self.process.kill()
            clean = False
            self.process.wait()
        return clean


def refusals(daemon):
    """Why it opened no event: the log says it, as answers of dumps have no words."""
    return set(re.findall(r'copy-failed .*why="(.*)"', daemon.words()))


def play(name, pool, calibration):
    """What its workers said, and what is wrong with the daemon itself."""
    before, workers = DAEMONS[name]
    daemon = Daemon(name, before, calibration)
    trouble = daemon.wait()
    if trouble is not None:
        seen = {worker: dict.fromkeys(WAYS, "no daemon") for worker in workers}
    else:
        seen = dict(zip(workers, pool.map(daemon.worker, workers)))
    if not daemon.stop() and trouble is None:
        trouble = "did not stop cleanly\n" + daemon.words()
    return daemon, seen, trouble


def play_all():
    with concurrent.futures.ThreadPoolExecutor(WORKERS_AT_ONCE) as pool, concurrent.futures.ThreadPoolExecutor(DAEMONS_AT_ONCE) as few:
        first = play("host", pool, [])
        calibration = [str(path) for path in pathlib.Path(first[0].state).glob("copy-*")]
        return [first] + list(few.map(lambda name: play(name, pool, calibration), list(DAEMONS)[1:]))


def tell(played):
    """Prints the table, and what differs from it. Returns how many cases it checked, and how many
    differ."""
    failures, checks, sentences = 0, 0, set()
    print(f"{'daemon':30}{'worker':24}" + "".join(f"{way:12}" for way in WAYS))
    for daemon, seen, trouble in played:
        checks += 2
        if trouble is not None:
            failures += 1
            print(f"FAIL  {daemon.name}: {trouble[-1500:]}")
        for worker, ways in seen.items():
            marks = ["works" if said == "works" else "refused" for said in ways.values()]
            print(f"{daemon.name:30}{worker:24}" + "".join(f"{mark:12}" for mark in marks))
            sentences |= {said for way, said in ways.items() if way != "event"} - {"works"}
            for way, said in ways.items():
                checks += 1
                if wrong(daemon.name, worker, way, said):
                    failures += 1
                    print(f"FAIL  {daemon.name}, {worker}, {way}: {said}")
        foreign = refusals(daemon)
        sentences |= foreign
        if not foreign or not all("wait for the event in the worker" in why for why in foreign):
            failures += 1
            print(f"FAIL  {daemon.name}: the log says why no event was opened: {foreign}")
        report = pathlib.Path(daemon.directory) / "report"
        if report.exists():
            print(f"{daemon.name}: {report.read_text()}", end="")
    for sentence in sorted(sentences):
        print(f"refused: {sentence}")
    return checks, failures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    options = parser.parse_args()
    # Sandboxes mount on them.
    made = [path for path in (BUNDLE_AT, "/run/ucmd", "/var/lib/ucmd") if not os.path.exists(path)]
    for path in made:
        os.makedirs(path)
    begin = time.monotonic()
    played = play_all()
    checks, failures = tell(played)
    if options.json:
        found = {daemon.name: seen for daemon, seen, _ in played}
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1))
    for daemon, _, _ in played:
        shutil.rmtree(daemon.directory, ignore_errors=True)
    for path in filter(os.path.isdir, made):
        os.rmdir(path)
    print(f"{checks - failures} passed, {failures} failed, in {time.monotonic() - begin:.1f} s")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
