"""Hosts that share an NFS server. Each is a network namespace with a ucmd in it, with a cable to
the server's.

Needs root, network namespaces, and nfs-ganesha on a file system that its VFS backend can serve.
why_not() says what is missing.
"""

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time

from daemon import TIMEOUT_S, Daemon, halt
from second_client import Client

NFS_PORT, MOUNT_PORT = 22049, 22048
SERVER_IP = "10.77.0.1"
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/bin"
GANESHA, RPCBIND = shutil.which("ganesha.nfsd", path=PATH), shutil.which("rpcbind", path=PATH)
# The directory of Ganesha's VFS backend, if that lies next to the program.
PLUGINS = os.path.dirname(GANESHA) if GANESHA and os.path.exists(os.path.join(os.path.dirname(GANESHA), "libfsalvfs.so")) else None
CONFIG = """
NFS_CORE_PARAM {{
    {plugins}
    NFS_Protocols = 3; NFS_Port = {nfs}; MNT_Port = {mount};
    Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false; mount_path_pseudo = true;
}}
NFSv4 {{ UseGetpwnam = true; }}
NFS_KRB5 {{ Active_krb5 = false; }}
EXPORT_DEFAULTS {{ Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Protocols = 3; }}
EXPORT {{ Export_Id = 1; Path = {directory}; Pseudo = /kv; FSAL {{ Name = VFS; }} }}
LOG {{ Default_Log_Level = WARN; }}
"""


def run(*argv, check=True):
    return subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=TIMEOUT_S, check=check)


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@functools.cache
def why_not():
    """What this machine lacks, as a sentence, or None. It starts and stops a server to find out."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip", path=PATH):
        return "ip (iproute2) is missing"
    if not GANESHA or not RPCBIND:
        return "nfs-ganesha or rpcbind is not installed"
    directory, network = tempfile.mkdtemp(prefix="hosts.", dir=os.environ.get("UCM_TEST_DISK")), None
    try:
        network = Network(1)
        run(*network.inside(1), "true")
        Server(network, directory).close()
    except subprocess.CalledProcessError as e:
        return f"network namespaces: {' '.join(e.cmd)}: {e.stdout.strip()}"
    except RuntimeError as e:
        return f"nfs-ganesha does not serve here: {str(e).strip().splitlines()[-1]}"
    finally:
        if network:
            network.close()
        shutil.rmtree(directory, ignore_errors=True)
    return None


class Network:
    """The server's namespace with a bridge, and one for each host, cabled to it."""

    def __init__(self, hosts):
        self.names = [f"ucm{os.getpid()}s"] + [f"ucm{os.getpid()}h{i}" for i in range(hosts)]
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            server = self.names[0]
            run("ip", "-n", server, "link", "add", "hub", "type", "bridge")
            run("ip", "-n", server, "addr", "add", f"{SERVER_IP}/24", "dev", "hub")
            run("ip", "-n", server, "link", "set", "hub", "up")
            for i, name in enumerate(self.names[1:]):
                run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"h{i}", "netns", server)
                run("ip", "-n", server, "link", "set", f"h{i}", "master", "hub", "up")
                run("ip", "-n", name, "addr", "add", f"10.77.0.{10 + i}/24", "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def inside(self, who):
        """The words before a command that is to run there; 0 is the server, hosts count from 1."""
        return ["ip", "netns", "exec", self.names[who]]

    def cable(self, host, up):
        run("ip", "-n", self.names[0], "link", "set", f"h{host - 1}", "up" if up else "down")

    def close(self):
        for name in self.names:
            run("ip", "netns", "del", name, check=False)


class Server:
    """nfs-ganesha in the server's namespace; its export outlives it."""

    def __init__(self, network, directory):
        self.network, self.directory, self.process = network, directory, None
        self.export = os.path.join(directory, "export")
        self.config, self.log = os.path.join(directory, "ganesha.conf"), os.path.join(directory, "ganesha.log")
        os.mkdir(self.export)
        open(self.log, "w").close()
        with open(self.config, "w") as file:
            file.write(CONFIG.format(plugins=f'Plugins_Dir = "{PLUGINS}";' if PLUGINS else "", nfs=NFS_PORT, mount=MOUNT_PORT, directory=self.export))
        # Ganesha does not start without rpcbind. The machine's own, if any, is in another namespace
        # and keeps its /run. as `daemon`, a user that every machine has
        words = f"mount -t tmpfs run /run && exec {RPCBIND} -f -w -s"
        self.names = self.begin(["unshare", "-m", "sh", "-c", words])
        try:
            self.await_port(self.names, 111)
            self.start()
        except BaseException:
            self.close()
            raise

    def begin(self, argv):
        return subprocess.Popen(self.network.inside(0) + argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def url(self):
        return f"nfs://{SERVER_IP}/kv?version=3&nfsport={NFS_PORT}&mountport={MOUNT_PORT}"

    def start(self):
        argv = [GANESHA, "-F", "-f", self.config, "-L", self.log, "-p", os.path.join(self.directory, "ganesha.pid")]
        self.process = self.begin(argv)
        self.await_port(self.process, NFS_PORT)

    def await_port(self, process, port):
        probe = f"import socket; socket.create_connection(('{SERVER_IP}', {port}), 1).close()"
        deadline = time.monotonic() + TIMEOUT_S
        while run(*self.network.inside(0), "python3", "-c", probe, check=False).returncode != 0:
            if process.poll() is not None or time.monotonic() > deadline:
                with open(self.log, errors="replace") as file:
                    raise RuntimeError(f"nothing answers at port {port}:\n" + file.read()[-2000:])
            time.sleep(0.1)

    def halt(self):
        halt(self.process.pid)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def close(self):
        self.kill()
        self.names.kill()
        self.names.wait()


class Host:
    """A ucmd in a namespace, with a disk of its own."""

    def __init__(self, network, number, directory, roots, **options):
        self.network, self.number, self.directory, self.daemon = network, number, directory, None
        self.options = {"shared.roots": roots, **options}
        os.mkdir(directory)
        self.start()

    def start(self):
        self.daemon = Daemon(before=self.network.inside(self.number), directory=self.directory, **self.options)

    def client(self):
        return Client(self.daemon)

    def kill(self):
        self.daemon.kill()

    def stop(self):
        return self.daemon.stop() if self.daemon else 0

    def forget(self):
        """Between two runs: its disk is lost."""
        shutil.rmtree(os.path.join(self.directory, "nvme"))


class Fleet:
    """A network, its server, and hosts 1 to n that share its export."""

    def __init__(self, hosts, **options):
        self.directory = tempfile.mkdtemp(prefix="hosts.", dir=os.environ.get("UCM_TEST_DISK"))
        self.hosts, self.server, self.network = [], None, None
        try:
            self.network = Network(hosts)
            self.server = Server(self.network, self.directory)
            for _ in range(hosts):
                self.add(**options)
        except BaseException:
            self.close()
            raise

    def add(self, **options):
        number = len(self.hosts) + 1
        self.hosts.append(Host(self.network, number, os.path.join(self.directory, f"host{number}"), self.server.url(),
                               **options))
        return self.hosts[-1]

    def close(self):
        for host in self.hosts:
            host.stop()
        if self.server:
            self.server.close()
        if self.network:
            self.network.close()
        shutil.rmtree(self.directory, ignore_errors=True)
