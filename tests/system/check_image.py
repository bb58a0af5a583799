#!/usr/bin/env python3
"""The image of config/container, built and run by podman as the DaemonSet says: `make
check-system`.

No registry is asked: Debian's image is made by debootstrap, and the packages are those of `make
deb`. The users, rights, mounts, variables and probes are read from the manifests. Other things that
a kubelet does are not tested.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import machine
from machine import BUILD, TOP, copy_worker

try:
    import yaml
except ImportError:
    yaml = None

CONTAINER = os.path.join(TOP, "config/container")
DEBIAN = os.path.join(BUILD, "debian.tar")
IMAGES = ("docker.io/library/debian:12", "docker.io/library/debian:12-slim")
MEMORY = 1 << 30  # frames and requests may take half of it
# Instead of a file. The manifest's sizes are those of a node.
SMALL = {"UCMD_ARENA_SIZE": "64MiB", "UCMD_ARENA_SLAB": "1MiB", "UCMD_NVME_SIZE": "64MiB", "UCMD_NVME_SEGMENT": "4MiB",
         "UCMD_DEVICE_CUDA": "off"}
VARIABLES = dict(SMALL, UCMD_NVME_PATHS="/var/lib/ucmd/nvme0", UCMD_SOCKET_GROUP="ucmd")
TIMEOUT_S = 300


def sh(*command, **how):
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, **how)


class Podman:
    """podman with a store of its own, which ends with it."""

    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="ucmd-image.", dir="/var/tmp")
        self.base = ["podman", "--root", self.directory + "/store", "--runroot", self.directory + "/run", "--runtime", "runc",
                     "--cgroup-manager", "cgroupfs", "--log-level", "error"]

    def __call__(self, *words, check=True, **how):
        done = sh(*self.base, *words, **how)
        if check and done.returncode != 0:
            raise AssertionError(f"podman {' '.join(words)}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done

    def close(self):
        if not shutil.which("podman"):
            os.rmdir(self.directory)
            return
        self("rm", "--all", "--force", "--time", "0", check=False)
        self("rmi", "--all", "--force", check=False)
        sh("umount", self.directory + "/store/overlay")
        # Never through a mount that is left.
        sh("rm", "-rf", "--one-file-system", self.directory)


def debian():
    """Debian as a registry's image has it, or nearly. Made once."""
    if os.path.exists(DEBIAN):
        return
    with tempfile.TemporaryDirectory(dir=BUILD) as directory:
        done = sh("bash", "-ec", '. "$1/tests/setup/debian.sh"; debian_make "$2/root" ca-certificates; '
                  'tar -C "$2/root" -cf "$2/tar" . && mv "$2/tar" "$3"', "debian", TOP, directory, DEBIAN)
        if done.returncode != 0:
            raise AssertionError(f"debootstrap: {done.stderr[-2000:]}")


def why_not(podman):
    """What this host lacks, as a sentence, or None."""
    if os.geteuid() != 0:
        return "directories of the image's user need root"
    if yaml is None:
        return "python3-yaml is not installed"
    for program in ("podman", "runc", "debootstrap"):
        if not shutil.which(program):
            return f"{program} is not installed"
    debian()
    tried = podman("import", DEBIAN, IMAGES[0], check=False)
    if tried.returncode != 0:
        return f"podman can't store an image here: {tried.stderr.strip()}"
    podman("tag", *IMAGES)
    tried = podman("run", "--rm", "--pull", "never", "--network", "none", *limits(), IMAGES[0], "true", check=False)
    if tried.returncode != 0:
        return f"podman can't run a container here: {tried.stderr.strip()}"
    return None


def limits():
    """podman raises the two ulimits by default, for which not every root has the right."""
    return ["--memory", str(MEMORY), "--ulimit", "nproc=4096:4096", "--ulimit", "nofile=4096:4096"]


class Image(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # Replaces the stage that compiles: has what the image would copy from there.
        built = PODMAN.directory + "/built/src/build/deb"
        shutil.copytree(os.environ["UCM_DEB"], built, ignore=lambda _, names: [n for n in names if not n.endswith(".deb")
                                                                               or "-dbgsym_" in n])
        PODMAN("build", "--isolation", "chroot", "--pull-never", "--build-context", f"build={PODMAN.directory}/built",
               "-f", CONTAINER + "/Containerfile", "-t", "ucmd", TOP)
        with open(CONTAINER + "/ucmd.yaml") as file:
            config, daemons = yaml.safe_load_all(file)
        cls.config = config["data"]
        cls.pod = daemons["spec"]["template"]["spec"]
        (cls.container,), (cls.init,) = cls.pod["containers"], cls.pod["initContainers"]
        with open(CONTAINER + "/engine.yaml") as file:
            cls.engine = yaml.safe_load(file)["spec"]["securityContext"]

    def setUp(self):
        """A node: its directories, as a runtime makes them where they are missing."""
        self.node = tempfile.mkdtemp(prefix="node.", dir=PODMAN.directory)
        self.addCleanup(PODMAN, "rm", "--all", "--force", "--time", "0", check=False)
        for directory in (self.node, PODMAN.directory):
            os.chmod(directory, 0o755)
        self.volumes = {"config": self.node + "/config"}
        for volume in self.pod["volumes"]:
            if "hostPath" in volume:
                self.volumes[volume["name"]] = self.node + volume["hostPath"]["path"]
        for directory in self.volumes.values():
            os.makedirs(directory, mode=0o755)
        for name, text in self.config.items():
            with open(f"{self.volumes['config']}/{name}", "w") as file:
                file.write(text)
        copy_worker(self.node + "/tree")
        self.run_container(self.init, "--rm")

    def options(self, container, without):
        """A container of the pod, as podman's options."""
        rights = {**self.pod["securityContext"], **container["securityContext"]}
        words = ["--user", f"{rights['runAsUser']}:{rights['runAsGroup']}", "--network", "none", "--pull", "never", *limits()]
        self.assertEqual(rights["seccompProfile"], {"type": "Unconfined"})
        words += ["--security-opt", "seccomp=unconfined"]
        words += [f"--cap-{what}={right}" for what in ("drop", "add") for right in rights["capabilities"].get(what, [])]
        if not rights.get("allowPrivilegeEscalation", True):
            words += ["--security-opt", "no-new-privileges"]
        if rights.get("readOnlyRootFilesystem"):
            words += ["--read-only", "--read-only-tmpfs=false"]
        if self.pod.get("hostPID"):
            words += ["--pid", "host"]
        for variable in container.get("env", []):
            words += ["--env", f"{variable['name']}={variable['value']}"]
        for mount in container["volumeMounts"]:
            if mount["name"] not in without:
                mode = ":ro" if mount["name"] == "config" else ""
                words += ["--volume", f"{self.volumes[mount['name']]}:{mount['mountPath']}{mode}"]
        if "command" in container:
            words += ["--entrypoint", json.dumps(container["command"])]
        return words

    def run_container(self, container, *words, variables=(), without=(), check=True):
        for name, value in dict(variables).items():
            words += ("--env", f"{name}={value}")
        return PODMAN("run", *words, *self.options(container, without), "ucmd", *container.get("args", []), check=check)

    def start(self, variables, without=()):
        self.run_container(self.container, "--detach", "--name", "ucmd", variables=variables, without=without)
        deadline = time.monotonic() + machine.TIMEOUT_S
        while self.probe("readiness") != 0:
            if time.monotonic() > deadline:
                self.fail("not ready\n" + self.log())
            time.sleep(0.2)
        self.assertEqual(self.probe("liveness"), 0)

    def probe(self, which):
        command = self.container[which + "Probe"]["exec"]["command"]
        return PODMAN("exec", "ucmd", *command, check=False).returncode

    def log(self):
        return PODMAN("logs", "ucmd", check=False).stderr[-3000:]

    def stop(self):
        """As the kubelet does: SIGTERM, then the grace period."""
        PODMAN("stop", "--time", str(self.pod["terminationGracePeriodSeconds"]), "ucmd")
        code = PODMAN("inspect", "--format", "{{.State.ExitCode}}", "ucmd").stdout.strip()
        self.assertEqual(code, "0", self.log())
        PODMAN("rm", "ucmd")

    def engine_does(self, verb, groups):
        user = self.engine["runAsUser"]
        return sh("/usr/bin/python3", "-B", self.node + "/tree/tests/system/worker.py", verb, "demo", "0", "16", user=user,
                  group=user, extra_groups=groups, cwd="/",
                  env={"UCM_SOCKET": self.volumes["run"] + "/ucmd.sock", "UCMD": "/bin/false", "PATH": "/usr/bin:/bin"})

    def worker(self, verb):
        """An engine with the user and groups of engine.yaml's pod."""
        done = self.engine_does(verb, self.engine["supplementalGroups"])
        self.assertEqual(done.returncode, 0, done.stderr + self.log())
        answer = json.loads(done.stdout)
        self.assertEqual((answer["ok"], answer["wrong"]), (16, 0))

    def test_a_node_serves_and_finds_its_cache_after_a_restart(self):
        self.start(VARIABLES, without=("config",))
        self.assertIn("PermissionError", self.engine_does("dump", []).stderr)
        self.worker("dump")
        self.worker("load")
        self.stop()
        # The other way of configuring: the manifest's own file, with a test's sizes.
        self.start(SMALL)
        self.worker("load")
        self.stop()

    def test_it_runs_with_the_rights_that_the_manifest_says(self):
        self.start(VARIABLES)
        pid = PODMAN("inspect", "--format", "{{.State.Pid}}", "ucmd").stdout.strip()
        with open(f"/proc/{pid}/status") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        self.assertEqual(status["Name"], "ucmd")
        self.assertEqual((status["Uid"].split(), status["Gid"].split()), (["900"] * 4, ["900"] * 4))
        self.assertEqual([int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")], [0] * 4)
        self.assertEqual((status["NoNewPrivs"], status["Seccomp"]), ("1", "0"))
        for directory in ("/", "/tmp", "/run", "/etc/ucmd"):
            done = PODMAN("exec", "ucmd", "touch", directory + "/x", check=False)
            self.assertNotEqual(done.returncode, 0, directory + " is writable")
        self.stop()

    def test_an_image_without_a_command_line_has_the_packages_user_and_file(self):
        image = json.loads(PODMAN("inspect", "--type", "image", "ucmd").stdout)[0]["Config"]
        self.assertEqual(image["User"], "ucmd")
        done = PODMAN("run", "--rm", "--pull", "never", "--network", "none", *limits(), "--env", "UCMD_ARENA_SIZE=64MiB",
                      "ucmd", *image["Cmd"], "--check")
        self.assertIn("64MiB", done.stdout)
        done = PODMAN("run", "--rm", "--pull", "never", "--network", "none", *limits(), "--entrypoint", "id", "ucmd")
        self.assertEqual(done.stdout.strip(), "uid=900(ucmd) gid=900(ucmd) groups=900(ucmd)")

    def test_an_arena_above_the_limit_of_memory_is_refused_with_both_numbers(self):
        done = self.run_container(self.container, "--rm", variables=dict(VARIABLES, UCMD_ARENA_SIZE="1GiB"), check=False)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("arena.size is 1GiB", done.stderr)
        self.assertRegex(done.stderr, "this cgroup's limit leaves 10[0-2][0-9] MiB")


if __name__ == "__main__":
    PODMAN = Podman()
    try:
        missing = why_not(PODMAN)
        if missing:
            print(f"check_image: {missing}; not tried", file=sys.stderr)
            sys.exit(77)
        unittest.main(verbosity=2)
    finally:
        PODMAN.close()
