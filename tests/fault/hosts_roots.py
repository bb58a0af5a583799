"""Fleets of hosts for test_hosts.py, by the kind of root that they share. Each has `hosts`,
stored() and close(). `files` is the directory that blocks lie in, if there is one. `accidents` are
other things that may happen, by name: functions of a host and a random.Random."""

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(TESTS, "integration"))

import hosts  # noqa: E402
from hung_mount import HungMount  # noqa: E402
from s3_proxy import Proxy  # noqa: E402
from second_client import keys  # noqa: E402
from swift_case import Swift, key_write  # noqa: E402


MOONCAKE = os.environ.get("UCM_MOONCAKE_PYTHON", os.path.join(TESTS, "../build/mooncake-venv/bin/mooncake-python"))


def named(directory, names):
    there = {name.split("-")[0] for _, _, found in os.walk(directory) for name in found}
    return all(keys(name).hex() in there for name in names)


class Served:
    """What may happen to a server of its own."""

    def killed(self, _, chance):
        self.server.kill()
        time.sleep(chance.random())
        self.server.start()

    def stopped(self, _, chance):
        self.server.halt()
        time.sleep(chance.uniform(0.5, 4))
        self.server.go_on()


class Nfs(Served, hosts.Fleet):
    """An NFS server; hosts in namespaces, with cables."""

    def __init__(self, count, **options):
        super().__init__(count, **options)
        self.files = self.server.export
        self.accidents = {"server killed": self.killed, "server stopped": self.stopped, "cable pulled": self.cable}

    def cable(self, host, chance):
        self.network.cable(host.number, False)
        time.sleep(chance.uniform(0.2, 3))
        self.network.cable(host.number, True)

    def stored(self, _client, _ns, names):
        return named(self.files, names)


class Here:
    """Instead of a network: hosts are processes of this machine."""

    @staticmethod
    def inside(_):
        return []


class Plain:
    def __init__(self, count, **options):
        self.directory, self.hosts = tempfile.mkdtemp(prefix="hosts.", dir=os.environ.get("UCM_TEST_DISK")), []
        os.chmod(self.directory, 0o755)
        try:
            self.begin()
            for number in range(1, count + 1):
                self.hosts.append(hosts.Host(Here(), number, os.path.join(self.directory, f"host{number}"), self.root(number), **options))
        except BaseException:
            self.close()
            raise

    def stored(self, client, ns, names):
        return all(part["shared"] == "ready" for name in names for part in client.call("inspect", ns=ns, key=keys(name))["parts"])

    def close(self):
        for host in self.hosts:
            host.stop()
        self.end()
        shutil.rmtree(self.directory, ignore_errors=True)


class Directory(Plain):

    def begin(self):
        self.files, self.mount = os.path.join(self.directory, "kv"), None
        os.mkdir(self.files)
        self.accidents = {"directory away": self.away, "mount hangs": self.hangs}

    def root(self, _):
        return self.files

    def away(self, _, chance):
        os.rename(self.files, self.files + ".away")
        time.sleep(chance.uniform(0.2, 3))
        os.rename(self.files + ".away", self.files)

    def hangs(self, _, chance):
        try:
            self.mount = HungMount(self.files, takes=chance.random() < 0.5)
        except OSError:
            return
        time.sleep(chance.uniform(0.5, 4))
        self.mount.close()

    def stored(self, _client, _ns, names):
        return named(self.files, names)

    def end(self):
        if self.mount:
            self.mount.close()


class S3(Served, Plain):
    """A bucket of Swift; a proxy for each host, which is its cable."""

    def begin(self):
        self.proxies, self.server = {}, Swift()
        self.files = self.server.objects
        self.accidents = {"server killed": self.killed, "server stopped": self.stopped, "cable pulled": self.cable,
                          "server overloaded": self.overloaded, "answers cut": self.cut}
        self.secret = os.path.join(self.directory, "keys")
        os.mkdir(self.secret)
        key_write(self.secret)
        if self.server.bucket("kv-hosts") != 200:
            raise RuntimeError("Swift makes no bucket")

    def root(self, number):
        self.proxies[number] = Proxy(self.server.port)
        return (f"s3://kv-hosts?endpoint=http://127.0.0.1:{self.proxies[number].port}&credentials={self.secret}/credentials "
                f"read={self.secret} buffer=16MiB")

    def harmed(self, host, chance, kind):
        self.proxies[host.number].harm(kind, ("GET", "PUT", "HEAD", "DELETE"), 1 << 30)
        time.sleep(chance.uniform(0.2, 3))
        self.proxies[host.number].harm(None)

    def cable(self, host, chance):
        self.harmed(host, chance, "drop")

    def overloaded(self, host, chance):
        self.harmed(host, chance, "503")

    def cut(self, host, chance):
        self.harmed(host, chance, "cut")

    def end(self):
        for proxy in self.proxies.values():
            proxy.close()
        self.server.close()


class Mooncake(Plain):
    """A master and a process that gives it memory, from PyPI. Blocks that they forget are lost,
    which is allowed."""

    files = None

    def begin(self):
        self.accidents = {"master killed": self.ends("master", 1), "master stopped": self.stops("away", "back"),
                          "lender killed": self.ends("lender", 1), "lender stopped": self.stops("hang-lender", "wake-lender"),
                          "objects damaged": self.damaged, "objects removed": self.removed}
        argv = [MOONCAKE, "-B", os.path.join(TESTS, "integration/mooncake_server.py"), self.directory, MOONCAKE]
        with open(os.path.join(self.directory, "store.log"), "wb") as log:
            self.server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                           env={**os.environ, "UCM_MOONCAKE_TTL_S": "3"})
        line = self.server.stdout.readline().decode().split()
        if len(line) != 3:
            raise RuntimeError(f"Mooncake does not start: see {self.directory}")
        self.port, self.target, self.options = int(line[0]), line[1], line[2]

    def root(self, _):
        return f"{self.target}/hosts?{self.options} read={os.path.dirname(os.path.dirname(os.path.realpath(MOONCAKE)))} buffer=16MiB"

    def ask(self, method, path, data=None):
        server = http.client.HTTPConnection("127.0.0.1", self.port, timeout=hosts.TIMEOUT_S)
        try:
            server.request(method, f"/{path}", body=data)
            with server.getresponse() as answer:
                return answer.read() if answer.status < 300 else b""
        finally:
            server.close()

    def ends(self, who, seconds):
        def harm(_, chance):
            self.ask("POST", f"end-{who}")
            time.sleep(chance.uniform(0, seconds))
            self.ask("POST", f"begin-{who}")
        return harm

    def stops(self, stop, go):
        def harm(_, chance):
            self.ask("POST", stop)
            time.sleep(chance.uniform(0.5, 4))
            self.ask("POST", go)
        return harm

    def some(self, chance, most):
        names = json.loads(self.ask("GET", "?keys") or "[]")
        return chance.sample(names, min(most, len(names)))

    def damaged(self, _, chance):
        for name in self.some(chance, 3):
            data = bytearray(self.ask("GET", name))
            if data and chance.random() < 0.3:
                del data[chance.randrange(len(data)):]
            elif data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            if data:
                self.ask("PUT", name, bytes(data))

    def removed(self, _, chance):
        for name in self.some(chance, 100):
            self.ask("DELETE", name)

    def end(self):
        self.server.stdin.close()
        self.server.wait(hosts.TIMEOUT_S)
        self.server.stdout.close()


KINDS = {"nfs": Nfs, "directory": Directory, "s3": S3, "mooncake": Mooncake}


def why_not(kind):
    """What this machine lacks for it, or None."""
    if kind == "nfs":
        return hosts.why_not()
    if kind == "s3":
        try:
            Swift().close()
        except RuntimeError as e:
            return str(e)
    if kind == "mooncake" and not os.access(MOONCAKE, os.X_OK):
        return "Mooncake's client is not installed: make check-hosts KIND=mooncake gathers it"
    return None
