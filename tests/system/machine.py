"""A Debian with systemd as PID 1, in namespaces of its own: no virtual machine, no container manager.

Needs root, and a kernel with overlayfs and cgroup2. Its disk is a copy-on-write view that ends with
it. Its network has only a loopback device. It can't show devices, nor limits of cgroups where the
host's cgroup2 has no controllers.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.abspath(os.environ.get("UCM_SYSTEM_BUILD", os.path.join(TOP, "build/system")))
TIMEOUT_S = 90
# Of this repository: worker.py and what it reads.
WORKER = ("tests/system/worker.py", "tests/integration/second_client.py", "tests/integration/daemon.py", "docs/protocol.md",
          "docs/methods.md", "docs/metrics.md")


def copy_worker(tree):
    """Lays worker.py and what it reads below the directory tree, as they lie in the repository."""
    for name in WORKER:
        target = os.path.join(tree, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy(os.path.join(TOP, name), target)


def cgroup2():
    """Where the host's cgroup2 is mounted."""
    with open("/proc/self/mounts") as mounts:
        return next((line.split()[1] for line in mounts if line.split()[2] == "cgroup2"), None)


def why_not():
    """What this host lacks, as a sentence, or None."""
    if os.geteuid() != 0:
        return "a machine with systemd needs root"
    if not shutil.which("debootstrap"):
        return "debootstrap is not installed"
    if not cgroup2():
        return "cgroup2 is not mounted"
    return None


class Failed(AssertionError):
    pass


class Machine:
    """layers: directories that lie over the root that root.sh made, the uppermost first."""

    def __init__(self, *layers):
        self.scratch = tempfile.mkdtemp(prefix="run.", dir=BUILD)
        self.group = os.path.join(cgroup2(), "ucmd-test-" + os.path.basename(self.scratch))
        self.pid = None
        os.mkdir(self.group)
        lower = ":".join([*layers, os.path.join(BUILD, "root")])
        with open(self.scratch + "/console", "wb") as console:
            self.process = subprocess.Popen(
                ["unshare", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--net", "--fork", "--kill-child",
                 os.path.join(HERE, "boot.sh"), lower, self.scratch],
                stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, preexec_fn=self.enter_group)
        try:
            self.wait_until(self.booted, "the machine does not come up")
        except BaseException:
            self.close()
            raise

    def enter_group(self):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        with open(self.group + "/cgroup.procs", "w") as procs:
            procs.write(str(os.getpid()))

    def booted(self):
        if self.process.poll() is not None:
            with open(self.scratch + "/console", errors="replace") as console:
                raise Failed("the machine did not start:\n" + console.read())
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as children:
            self.pid = children.read().strip()
        if not self.pid or os.readlink(f"/proc/{self.pid}/exe") != "/usr/lib/systemd/systemd":
            return False
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded")

    def wait_until(self, ready, what):
        """ready: called until it returns something true. Returns that."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = ready()
            if answer:
                return answer
            if time.monotonic() > deadline:
                raise Failed(what() if callable(what) else what)
            time.sleep(0.1)

    def run(self, *argv, check=True, user=None, **options):
        """Runs a command inside. Returns what it prints and its exit status. check: the status must
        be 0."""
        words = ["nsenter", "--target", self.pid, "--all", "--wdns=/", "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
                 "LANG=C.UTF-8", *(["setpriv", "--reuid", user, "--regid", user, "--init-groups"] if user else []), *argv]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              timeout=TIMEOUT_S, **options)
        if check and done.returncode != 0:
            raise Failed(f"{' '.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}{self.journal()[-4000:]}")
        return done

    def sh(self, script, **options):
        return self.run("sh", "-c", script, **options)

    def path(self, inside):
        """Where a path of the machine lies for this process."""
        return f"/proc/{self.pid}/root{inside}"

    def write(self, inside, text):
        os.makedirs(os.path.dirname(self.path(inside)), exist_ok=True)
        with open(self.path(inside), "w") as file:
            file.write(text)

    def read(self, inside):
        with open(self.path(inside)) as file:
            return file.read()

    def journal(self, unit="ucmd.service"):
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit, check=False).stdout

    def close(self):
        if self.pid and self.process.poll() is None:
            try:
                self.run("systemctl", "--no-block", "poweroff", check=False)
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                pass
        self.process.kill()
        self.process.wait()
        for directory, _, _ in os.walk(self.group, topdown=False):
            try:
                os.rmdir(directory)
            except OSError:
                pass  # its last process is still on its way out; an empty group costs nothing
        shutil.rmtree(self.scratch, ignore_errors=True)
