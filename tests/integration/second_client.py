"""A client for ucmd that knows only what docs/protocol.md and docs/methods.md say.

It also reads the pages: what they list checks every result, and test_protocol.py sends and compares
their hex. Needs python3-msgpack.
"""

import array
import collections
import fcntl
import functools
import hashlib
import mmap
import os
import re
import shutil
import socket
import struct
import tempfile
import time

import msgpack

from daemon import TIMEOUT_S, UCMD, Daemon, DaemonCase, until  # noqa: F401  re-exported

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEMO = {"model": "demo", "dtype": "bf16", "layout": "nhd/1", "block_tokens": 16, "key_bytes": 16, "parts": 1,
        "layers": [2], "layer_bytes": 4096}
BIG = dict(DEMO, layer_bytes=262144)
OTHER_UID = 1000
INVALID, UNSUPPORTED, DENIED, NOT_FOUND, BUSY, DEADLINE, _, DEVICE, _, _, SHUTDOWN, _, NO_METHOD = range(1, 14)
OK, MISS, FAILED, NO_ROOM, EXISTS, IN_PROGRESS, CANCELLED = range(7)


class Page:
    """What the pages promise: hex, lists of fields by method and title, error codes and limits."""

    def __init__(self):
        with open(os.path.join(TOP, "docs/protocol.md"), encoding="utf-8") as file:
            text = file.read()
        with open(os.path.join(TOP, "docs/methods.md"), encoding="utf-8") as file:
            methods = file.read()
        with open(os.path.join(TOP, "docs/metrics.md"), encoding="utf-8") as file:
            names = re.findall(r"`(?:ucmd_)?(?:(?:tenant|tier|shared_root|device|arena_node)_)?(\w+?)(?:_total)?`", file.read())
            self.metrics = set(names)
        self.hex = {name: bytes.fromhex(digits) for name, digits in
                    re.findall(r"<!-- (?:vector|frame): (.+?) -->\n```\n(.+?)```", text, re.S)}
        self.tables = collections.defaultdict(dict)
        section, table, common = "", {}, {}
        for line in re.sub(r"(?<!\n)\n *(?=\S)(?!- |#)", " ", methods).splitlines():
            same = re.match(r"(Params|Results): \[`(.+?)`\]", line)
            begins = re.match(r"(?:(Params|Results)|In `(.+?)`).*?:(?: (?=`)|$)", line)
            if line.startswith("#"):
                section, table = line.strip("# `"), common if line == "## Common fields" else {}
            if begins:
                table = self.tables[section, begins[1] or f"in {begins[2]}"]
                line = "- " + line[begins.end():].removesuffix(".")
            if same:
                self.tables[section, same[1]].update(self.tables[same[2], same[1]])
            if line.startswith("- "):
                table.update(fields(line.removeprefix("- "), common))
        errors = text[text.index("\n## Errors"):text.index("\n## Limits")]
        self.errors = {int(code): name for code, name in re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", errors, re.M)}
        limits = text[text.index("\n## Limits"):text.index("\n## Descriptors")]
        self.limits = {what: int(most) for what, most in re.findall(r"^\| (.+?) \| (\d+) \|", limits, re.M)}
        self.methods = re.findall(r"^### `(.+?)`", methods, re.M)
        self.operators = {part.partition("`")[0] for part in methods.split("\n### `") if "\n**For operators.**\n" in part}

    @functools.cache
    def required(self, method, heading):
        return frozenset(name for name, row in self.tables[method, heading].items() if required(row[0]))

    def check_map(self, method, heading, fields):
        table = self.tables[method, heading]
        missing = self.required(method, heading) - fields.keys()
        assert not missing, f"{method}: {missing} missing in {fields}"
        for name, value in fields.items():
            if method in ("stats", "tenant.list") and heading.startswith("in ") and name not in table and name in self.metrics:
                continue
            assert name in table, f"{method}: {name} is not on the page"
            assert fits(value, table[name][0]), f"{method}: {name} is {value}"
            if table[name][0].startswith("maps") and (method, f"in {name}") in self.tables:
                for entry in value:
                    self.check_map(method, f"in {name}", entry)


def fields(item, common):
    """Name and [type, meaning] of each field of an item: "`a`?, `b`? uint(0..5): MEANING", or without a meaning "`a`? uint(0..5), `b`";
    there b is of the common fields. Of an item that begins otherwise, none."""
    found = []
    while each := re.match(r"`(\w+)`(\??)( [a-z]\w*(?:\([^)]*\))?)?(, (?=`)|: |$)", item):
        found.append([each[1], each[2], (each[3] or "").strip()])
        item = item[each.end():]
        if each[4] == ": ":
            return [(name, [found[-1][2] + mark, item]) for name, mark, _ in found]
    return [(name, [(kind or common[name][0]) + mark, item]) for name, mark, kind in found] if not item else []


def required(words):
    return not words.endswith("?")


def bounds(words):
    """Of "uint(0..2^32-1)?"."""
    found = re.search(r"\((\d[^.)]*)(?:\.\.([^)]+))?\)", words)
    return tuple(amount(end) for end in (found[1], found[2] or found[1])) if found else None


def amount(words):
    base, _, power = words.removesuffix("-1").partition("^")
    return int(base) ** int(power or 1) - words.endswith("-1")


@functools.cache
def rule(words):
    """Kind, Python's type and bounds."""
    kind = re.match(r"[a-z]+", words)[0]
    types = {"uint": int, "float": float, "str": str, "bin": bytes, "bool": bool, "map": dict, "uints": list, "strs": list,
             "maps": list}
    return kind, types[kind], bounds(words)


def fits(value, words):
    kind, of, limit = rule(words)
    if not isinstance(value, of) or (kind == "uint" and (isinstance(value, bool) or value < 0)):
        return False
    return limit is None or limit[0] <= (value if kind in ("uint", "float") else len(value)) <= limit[1]


PAGE = Page()


def pack(value):
    return msgpack.packb(value, use_bin_type=True)


def frame(body):
    body = body if isinstance(body, bytes) else pack(body)
    return struct.pack(">I", len(body)) + body


def keys(*names, size=16):
    return b"".join(hashlib.sha256(str(name).encode()).digest()[:size] for name in names)


def u32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


def fingerprint_form(tenant, identity):
    text = [tenant] + [identity.get(name, "") for name in ("model", "revision", "dtype", "layout")]
    layers = identity["layers"] * (identity["parts"] if len(identity["layers"]) == 1 else 1)
    salt = identity.get("salt", b"")
    return (b"ucm-namespace-1\0" + b"".join(u32(len(word.encode())) + word.encode() for word in text)
            + u32(identity["block_tokens"], identity["key_bytes"], identity["parts"], *layers)
            + struct.pack("<Q", identity["layer_bytes"]) + u32(len(salt)) + salt)


def pickled(parent, tokens):
    """The pickle of the MD5 hash chain, as client/lib/keys.c writes it."""
    def token(number):
        if number < 1 << 8:
            return b"\x4b" + bytes([number])
        if number < 1 << 16:
            return b"\x4d" + number.to_bytes(2, "little")
        return b"\x4a" + u32(number) if number < 1 << 31 else b"\x8a\x05" + number.to_bytes(5, "little")
    few = len(tokens) <= 3
    values = [b"\x43\x10" + parent + b"\x94", b"" if few else b"\x28"] + [token(number) for number in tokens]
    values.append((bytes([0x84 + len(tokens)]) if few else b"\x74") + b"\x94\x86\x94\x2e")
    frames = [b""]
    for at, value in enumerate(values):
        begins = at not in (1, len(values) - 1)
        if begins and len(frames[-1]) >= 65536:
            frames.append(b"")
        frames[-1] += value
    return b"\x80\x05" + b"".join(b"\x95" + struct.pack("<Q", len(part)) + part for part in frames)


class Refused(Exception):
    def __init__(self, code, name, sentence):
        super().__init__(code, name, sentence)
        assert PAGE.errors[code] == name and sentence, (code, name, sentence)
        self.code = code


class Closed(Exception):
    pass


class Client:
    def __init__(self, daemon, uid=None, hello=True, timeout_s=TIMEOUT_S):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(timeout_s)
        if uid is not None:
            os.seteuid(uid)
        try:
            self.connect(daemon.socket, time.monotonic() + timeout_s)
        except OSError:
            self.socket.close()
            raise
        finally:
            if uid is not None:
                os.seteuid(0)
        self.input, self.output, self.answers, self.methods, self.progress, self.msgid = bytearray(), b"", {}, {}, {}, 0
        daemon.clients.append(self)
        try:
            if hello:
                self.limits = self.call("hello", version_min=1, version_max=1, client="second")
        except BaseException:
            self.close()
            raise

    def connect(self, path, deadline):
        """A socket with a timeout does not wait for a place in the daemon's full backlog."""
        while True:
            try:
                return self.socket.connect(path)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def close(self):
        self.socket.close()

    def send(self, data, fds=()):
        """Sends the descriptors with the first byte of data."""
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                data = data[self.socket.sendmsg([data], [rights]):]
            if data:
                self.socket.sendall(data)
        except (ConnectionResetError, BrokenPipeError):
            raise Closed from None

    def receive(self):
        """The next body, as bytes."""
        need = 4
        while len(self.input) < need or len(self.input) < (need := 4 + int.from_bytes(self.input[:4], "big")):
            try:
                data = self.socket.recv(1 << 20)
            except (ConnectionResetError, BrokenPipeError):
                data = b""
            if not data:
                raise Closed
            self.input += data
        body = bytes(self.input[4:need])
        del self.input[:need]  # in place: a flood of answers is not copied for each
        return body

    def next(self):
        """The next answer's msgid; the answer is kept for wait(). None: it was a load's progress,
        which is kept, too."""
        message = msgpack.unpackb(self.receive(), raw=False)
        if message[0] == 2 and message[1] == "progress":
            PAGE.check_map("load", "in progress", message[2])
            self.progress.setdefault(message[2]["msgid"], []).append(message[2])
            return None
        if message[0] == 2:
            assert message[1] == "error" and len(message) == 3, message
            error = Refused(*message[2])
            error.args += ("notification",)
            raise error
        kind, msgid, error, result = message
        assert kind == 1 and (error is None) != (result is None), message
        self.answers[msgid] = message
        return msgid

    def begin(self, name, fds=(), _more=False, **params):
        """Sends a request, together with those before it that had _more set."""
        self.msgid += 1
        self.methods[self.msgid] = name
        self.output += frame([0, self.msgid, name, params])
        if not _more:
            data, self.output = self.output, b""
            self.send(data, fds)
        return self.msgid

    def wait(self, msgid):
        while msgid not in self.answers:
            self.next()
        _, _, error, result = self.answers.pop(msgid)
        if error is not None:
            raise Refused(*error)
        PAGE.check_map(self.methods[msgid], "Results", result)
        return result

    def drain(self):
        """The results of all requests whose answers the socket has now. It has some."""
        self.next()
        while len(self.input) >= 4 and len(self.input) >= 4 + int.from_bytes(self.input[:4], "big"):
            self.next()
        return [self.wait(msgid) for msgid in list(self.answers)]

    def call(self, name, fds=(), **params):
        return self.wait(self.begin(name, fds, **params))

    def metrics(self):
        return self.call("stats")["metrics"]

    def open(self, identity):
        return self.call("namespace.open", **identity)["ns"]

    def hits(self, ns, *names):
        return self.call("lookup", ns=ns, keys=keys(*names))["hits"]

    def tiers(self, ns, *names):
        return list(self.call("lookup", ns=ns, keys=keys(*names), per_key=True)["status"])


class Region:
    """Blocks of one part in a memfd, one after the other."""

    def __init__(self, client, ns, identity, blocks, part=0):
        layers, self.client = identity["layers"][part], client
        self.size = layers * identity["layer_bytes"]
        fd = memfd(blocks * self.size)
        self.memory = mmap.mmap(fd, blocks * self.size)
        planes = [{"layer": layer, "offset": layer * identity["layer_bytes"], "stride": self.size,
                   "block_bytes": identity["layer_bytes"]} for layer in range(layers)]
        try:
            self.number = client.call("region.register", [fd], ns=ns, part=part, blocks=blocks, device="cpu",
                                      handles=[{"kind": 0, "bytes": blocks * self.size}], planes=planes)["region"]
        finally:
            os.close(fd)

    def fill(self, block):
        self.memory[block * self.size:(block + 1) * self.size] = os.urandom(self.size)
        return self.bytes(block)

    def bytes(self, block):
        return self.memory[block * self.size:(block + 1) * self.size]

    def begin(self, method, names, blocks, size=16, **more):
        return self.client.begin(method, region=self.number, keys=keys(*names, size=size), blocks=u32(*blocks), **more)

    def call(self, method, names, blocks, **more):
        return self.client.wait(self.begin(method, names, blocks, **more))

    def dump(self, names, blocks, **more):
        return list(self.call("dump", names, blocks, **more)["status"])

    def load(self, names, blocks, **more):
        return list(self.call("load", names, blocks, **more)["status"])


class Pool:
    """Slots of single layers in a memfd, one after the other. tensors: how many planes a layer has.
    apart: each plane has all slots one after another."""

    def __init__(self, client, ns, layer_bytes, slots, part=0, tensors=1, apart=False):
        self.client, self.size, fragment = client, layer_bytes, layer_bytes // tensors
        fd = memfd(slots * layer_bytes)
        self.memory = mmap.mmap(fd, slots * layer_bytes)
        planes = [{"offset": i * fragment * (slots if apart else 1), "stride": fragment if apart else layer_bytes, "block_bytes": fragment}
                  for i in range(tensors)]
        try:
            self.number = client.call("region.register", [fd], ns=ns, part=part, blocks=slots, device="cpu", block_pool=True,
                                      handles=[{"kind": 0, "bytes": slots * layer_bytes}], planes=planes)["region"]
        finally:
            os.close(fd)

    def bytes(self, slot):
        return self.memory[slot * self.size:(slot + 1) * self.size]

    def clear(self):
        self.memory[:] = bytes(len(self.memory))

    def begin(self, items, **source):
        """items: (index, layer, slot) each."""
        return self.client.begin("gather", region=self.number, items=u32(*(n for item in items for n in item)), **source)

    def gather(self, items, **source):
        return list(self.client.wait(self.begin(items, **source))["status"])


def memfd(size, seals=fcntl.F_SEAL_SHRINK):
    fd = os.memfd_create("blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if size:
        os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Case(DaemonCase):
    def client(self, **how):
        client = Client(self.daemon, **how)
        self.addCleanup(client.close)
        return client

    def worker(self, identity=DEMO, blocks=16, **more):
        """A client that has opened a namespace of this test's own, its number, and a region."""
        client, identity = self.client(), dict(identity, model=self.id(), **more)
        ns = client.open(identity)
        return client, ns, Region(client, ns, identity, blocks)

    def refused(self, code, call, *args, **named):
        with self.assertRaises(Refused, msg=f"{args} {named}") as caught:
            call(*args, **named)
        self.assertEqual(caught.exception.code, code, (caught.exception, named))
        return caught.exception

    until = staticmethod(until)

    def pages(self, client, method, field, **params):
        """What all pages hold together, or the pages themselves."""
        entries, cursor = [], 0
        while True:
            answer = client.call(method, cursor=cursor, limit=3, **params)
            entries += answer[field] if field else [answer]
            self.assertLessEqual(len(answer[field]) if field else answer["checked"], 3)
            cursor = answer.get("next", 0)
            if not cursor:
                return entries

    def settled(self, client, ns):
        def written():
            blocks = client.call("ls", ns=ns, limit=4096)["blocks"]
            return all(block["nvme"] == block["ready"] for block in blocks if block["complete"])
        self.until(written, "every complete block on NVMe")

    def spoil(self, start, at=99):
        """Flips a bit where these bytes lie on NVMe, `at` bytes after their start. The daemon may
        be running."""
        spoiled = 0
        for path in [os.path.join(directory, name) for directory, _, names in os.walk(self.daemon.store) for name in names]:
            with open(path, "r+b") as file:
                data, begin = file.read(), -1
                while (begin := data.find(start, begin + 1)) >= 0:
                    file.seek(begin + at)
                    file.write(bytes([data[begin + at] ^ 4]))
                    spoiled += 1
        self.assertGreater(spoiled, 0)


class OwnDaemons:
    """A base class, put before Case, for tests that start daemons themselves, over a directory of
    each test's own."""

    @classmethod
    def setUpClass(cls):
        pass

    @classmethod
    def tearDownClass(cls):
        pass

    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="own.")
        self.addCleanup(shutil.rmtree, self.directory, True)
