"""Runs a program against a daemon of its own, and finds what no tenant may see and no cache may
say.

A Finding is one of these:
- another tenant's grain in anything that a tenant can read (regions, pools, mappings, answers), or
  in files where it should be encrypted
- bytes of a block that are not those that were stored
- a report of a sanitizer
- a daemon that ends, or that does not answer
"""

import mmap
import os
import re
import shutil
import struct
import tempfile
import time

import numpy as np

import pattern
from shapes import keys_of, u32
from subject import FIRST_UID, Daemon, Finding
from wire import HANDSHAKE, WAIT_S, Broken, Gone, Hung, Memory, Wire

OK = 0
NOTHING = 0x7ffffff0                     # a number that names nothing
GAUGES = ("sequences", "sequence_blocks", "summaries_held_bytes", "requests_active", "leases", "mapping_refs")


class Peer:
    def __init__(self, wire, tenant):
        self.wire, self.tenant, self.regions, self.late, self.mappings = wire, tenant, {}, [], {}
        self.encoded = set()              # fingerprints that encoding.open answered

    def close(self):
        self.wire.close()
        for region in self.regions.values():
            region.memory.close()
        for mapping in self.mappings.values():
            mapping.close()


class Region:
    """form: what its pages hold, as docs/protocol.md has it. Planes don't tell: those of an encoded
    form can be those of the raw one. holder: its namespace's fingerprint; of summaries, their
    base's."""

    def __init__(self, memory, op, size, form, holder):
        self.memory, self.op, self.size, self.form, self.holder, self.number = memory, op, size, form, holder, NOTHING


class Mapping:
    def __init__(self, op):
        self.op, self.number, self.table, self.slabs, self.answer = op, NOTHING, None, {}, {}

    def close(self):
        for slab in list(self.slabs.values()) + ([self.table] if self.table else []):
            slab.close()
        self.slabs, self.table = {}, None


class World:
    """counts: calls and their answers, which show whether a program does anything."""

    def __init__(self, program, trace=None):
        self.program, self.trace = program, trace
        self.directory = tempfile.mkdtemp(prefix="fuzz.")
        self.daemon = Daemon(program["options"], self.directory)
        self.forms = {}                   # a base's fingerprint: those of its encoded namespaces
        self.peers, self.answers, self.counts, self.root, self.rawly, self.summaries, self.sequences, self.at = {}, {}, {}, None, set(), {}, {}, None

    def run(self):
        """Returns counts, or raises a Finding."""
        try:
            self.step({"do": "start"})
            for self.at, op in enumerate(self.program["ops"]):
                self.step(op)
            for number in list(self.peers):
                self.step({"do": "settle", "c": number})
            self.step({"do": "left"})
            self.finish("term")
            self.encrypted()
            return self.counts
        finally:
            for peer in self.peers.values():
                peer.close()
            if self.root:
                self.root.close()
            if self.daemon.process and self.daemon.process.poll() is None:
                self.daemon.process.kill()
                self.daemon.process.wait()
            shutil.rmtree(self.directory, ignore_errors=True)
            if self.daemon.keep:
                shutil.rmtree(self.daemon.keep, ignore_errors=True)

    def step(self, op):
        try:
            if op["do"] == "start":
                self.daemon.start()
            elif op["do"] == "left":
                self.left()
            elif op["do"] == "restart":
                self.finish(op["how"])
                self.daemon.start()
            elif op["do"] == "connect":
                self.do_connect(op)
            elif op["c"] in self.peers:
                getattr(self, "do_" + op["do"])(self.peers[op["c"]], op)
        except Gone:
            self.gone(op)
        except Hung as hung:
            self.daemon.reports()
            raise Finding("hang", f"{hung} at {op}\n{self.daemon.log()}") from None
        except Broken as broken:
            raise Finding("answer", f"{broken} at {op}") from None

    def gone(self, op):
        """A connection ended: the daemon may have its reasons, but must live."""
        deadline = time.monotonic() + 0.3
        while self.daemon.process.poll() is None and time.monotonic() < deadline:
            try:
                Wire(self.daemon.socket, None).close()
                break
            except Gone:
                time.sleep(0.02)
        else:
            self.daemon.ended(f"at {op}")
        self.count("connection ended")
        peer = self.peers.pop(op.get("c"), None)
        if peer:
            peer.close()

    def finish(self, how):
        self.daemon.stop(how)
        for peer in self.peers.values():
            self.mappings(peer)
            for region in peer.regions.values():
                self.look(peer, bytes(region.memory.map), "a region")
            peer.close()
        self.peers, self.answers = {}, {}
        if self.root:
            self.root.close()
            self.root = None

    def left(self):
        """The daemon keeps nothing of connections that have ended."""
        for peer in self.peers.values():
            self.mappings(peer)
            peer.wire.close()
        deadline, stats = time.monotonic() + WAIT_S, None
        while stats is None or any(stats.values()):
            if time.monotonic() > deadline:
                raise Finding("left behind", f"of {stats}\n{self.daemon.log()}")
            time.sleep(0.01)
            stats = self.gauges()

    def gauges(self):
        """None: the daemon did not take or keep the connection this time."""
        root = None
        try:
            root = Peer(Wire(self.daemon.socket, None), None)
            self.call(root, "hello", HANDSHAKE)
            answer = self.call(root, "stats", {})
            return {name: answer["metrics"][name] for name in GAUGES} if answer else None
        except Gone:
            if self.daemon.process.poll() is not None:
                self.daemon.ended("at the end")
            return None
        finally:
            if root:
                root.close()

    def count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    # ---- values ----

    def value(self, value):
        if isinstance(value, dict):
            if "of" in value:
                found = self.answers.get(value["of"], {}).get(value["field"], NOTHING)
                return found if found else NOTHING
            if "hex" in value:
                return bytes.fromhex(value["hex"])
            if "keys" in value:
                return keys_of(value["keys"])
            if "u32" in value:
                return u32(*value["u32"])
        if isinstance(value, list):
            return [self.value(one) for one in value]
        return value

    # ---- calls ----

    def begin(self, peer, method, params, fds=()):
        self.count(method)
        return peer.wire.begin(method, params, fds)

    def end(self, peer, msgid, method, name=None, check=None):
        error, result, fds = peer.wire.wait(msgid)
        if self.trace:
            self.trace(self.at, method, error[:3:2] if error else {k: v.hex() if isinstance(v, bytes) and len(v) < 40 else v for k, v in result.items()
                                                                  if not isinstance(v, (bytes, list, dict)) or len(v) < 40})
        if error:
            self.count(f"{method} {error[1]}" + (": " + re.sub(r"\d+", "N", error[2]) if self.trace else ""))
            self.words(peer, method, error[2])
        else:
            self.words(peer, method, result)
            if name:
                self.answers[name] = result
        try:
            if check:
                check(result, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return result

    def call(self, peer, method, params, fds=(), name=None, check=None, late=False):
        msgid = self.begin(peer, method, params, fds)
        if late:
            peer.late.append((msgid, method, name, check))
            return None
        return self.end(peer, msgid, method, name, check)

    def settle(self, peer):
        while peer.late:
            msgid, method, name, check = peer.late.pop(0)
            self.end(peer, msgid, method, name, check)

    # ---- what a tenant sees ----

    def look(self, peer, data, where):
        found = pattern.foreign(data, peer.tenant)
        if found:
            at, other = found
            raise Finding(f"leak {where}", f"tenant {peer.tenant} has a grain of tenant {other} at {at} of {where}: "
                          f"{data[at:at + 16].hex()}, op {self.at}")

    def words(self, peer, method, answer):
        """No answer has another tenant's bytes or names, except root's."""
        if peer.tenant is None:
            return
        for found in scalars(answer):
            if isinstance(found, bytes):
                self.look(peer, found, f"answer of {method}")
            elif isinstance(found, str):
                for other in range(4):
                    if other != peer.tenant and (f"model-{'abcd'[other]}" in found or f"lora-{'abcd'[other]}" in found):
                        raise Finding(f"names in {method}", f"tenant {peer.tenant} reads {found!r}")

    # ---- ops ----

    def do_connect(self, op):
        uid = None if op["tenant"] is None else FIRST_UID + op["tenant"]
        peer = self.peers[op["c"]] = Peer(Wire(self.daemon.socket, uid), op["tenant"])
        self.call(peer, "hello", HANDSHAKE)

    def do_vanish(self, peer, op):
        self.mappings(peer)
        del self.peers[op["c"]]
        peer.close()

    def do_call(self, peer, op):
        params = {key: self.value(value) for key, value in op["p"].items()}

        def appended(result, _):
            """What a sequence holds, by its name."""
            found = [key for key, status in zip(op["p"]["keys"]["keys"], result["status"] if result else ()) if status]
            self.sequences.setdefault((peer, op["p"]["sequence"]["of"]), []).extend(found)

        def encoded(result, _):
            if result:
                peer.encoded.add(result["fingerprint"])
                self.forms.setdefault(self.fingerprint(op["p"]["ns"]), set()).add(result["fingerprint"])
        if op["m"] == "sequence.append":
            self.settle(peer)             # answers of earlier ones come first, as their blocks do
        check = {"sequence.append": appended, "encoding.open": encoded}.get(op["m"])
        self.call(peer, op["m"], params, name=op.get("as"), late=op.get("late"), check=check)

    def do_operator(self, peer, op):
        if not self.root:
            self.root = Peer(Wire(self.daemon.socket, None), None)
            self.call(self.root, "hello", HANDSHAKE)
        params = {key: self.value(value) for key, value in op["p"].items()}
        self.call(self.root, op["m"], params)

    def do_settle(self, peer, op):
        self.settle(peer)

    def do_cancel(self, peer, op):
        msgid = peer.late[0][0] if peer.late else 1
        self.call(peer, "cancel", {"msgid": msgid})

    def do_rekey(self, peer, op):
        self.daemon.rekey()
        self.do_operator(peer, {"m": "encryption_key.reload", "p": {}})

    def do_region(self, peer, op):
        fragments = [self.value(fragment) for fragment in op["fragments"]]
        if max(fragments) > 1 << 20:
            return                        # nothing is known of the summaries that it is for
        layers, layer_bytes = op["layers"], sum(fragments)
        block, planes = layers * layer_bytes, []
        for layer in range(layers):
            at = layer * layer_bytes
            for fragment in fragments:
                planes.append({"layer": layer, "offset": at, "stride": block, "block_bytes": fragment})
                at += fragment
        size = op["blocks"] * block
        holder, form = self.fingerprint(op["base"] or op["ns"]), op["form"]
        if form == "bytes" and self.fingerprint(op["ns"]) in peer.encoded:
            form = "encoded"
        region = Region(Memory(size), op, block, form, holder)
        region.layer_bytes = layer_bytes
        if op["as"] in peer.regions:
            peer.regions[op["as"]].memory.close()
        peer.regions[op["as"]] = region
        result = self.call(peer, "region.register", {"ns": self.value(op["ns"]), "part": op["part"], "blocks": op["blocks"], "device": "cpu",
                                                     "block_pool": op["pool"], "handles": [{"kind": 0, "bytes": size}], "planes": planes,
                                                     **op.get("more", {})},
                           [region.memory.fd], op["as"])
        if result:
            region.number = result["region"]

    def do_unregister(self, peer, op):
        region = peer.regions.get(op["region"])
        if region:
            self.call(peer, "region.unregister", {"region": region.number})
            self.settle(peer)
            if not region.memory.map.closed:
                self.look(peer, bytes(region.memory.map), "a region")
            region.memory.close()
            peer.regions.pop(op["region"], None)

    def fingerprint(self, ref):
        return self.answers.get(ref["of"], {}).get("fingerprint")

    def layer(self, peer, region, key, layer):
        """What a layer of this tenant's block holds."""
        op = region.op
        if region.form == "bytes" and key % 3 == 0:
            return pattern.hostile(key, layer, region.layer_bytes)
        label = op["raw" if region.form == "encoded" else "label"]
        return pattern.content(peer.tenant, label, key, op["part"] * 1024 + layer, region.layer_bytes)

    def do_dump(self, peer, op):
        region = peer.regions.get(op["region"])
        if not region or region.op["pool"]:
            return
        self.settle(peer)
        layers = region.op["layers"]
        for key, at in zip(op["keys"], op["at"]):
            if at >= region.op["blocks"]:
                continue
            start = at * region.size
            region.memory.map[start:start + region.size] = b"".join(self.layer(peer, region, key, s) for s in range(layers))
        if region.form == "bytes":
            self.rawly.add(region.holder)
        self.call(peer, "dump", {"region": region.number, "keys": keys_of(op["keys"]), "blocks": u32(*op["at"]), **self.more(op)},
                  late=op.get("late"))

    def more(self, op):
        return {key: self.value(value) for key, value in op["more"].items()}

    def do_load(self, peer, op):
        region = peer.regions.get(op["region"])
        if not region:
            return
        self.settle(peer)
        for at in op["at"]:
            if at < region.op["blocks"]:
                region.memory.map[at * region.size:(at + 1) * region.size] = bytes(region.size)
        more, method = self.more(op), op.get("m", "load")
        if method == "load_prefix":
            more = {key: value for key, value in more.items() if key not in ("lease", "shifts")}

        def check(result, _):
            for key, at, status in zip(op["keys"], op["at"], result["status"] if result else ()):
                data = region.memory.map[at * region.size:(at + 1) * region.size]
                self.look(peer, data, f"a {region.form} region")
                if status == OK:
                    self.count(f"loaded {region.form}" + (" re-rotated" if "shifts" in more else ""))
                if status == OK and "shifts" not in more:
                    first = more.get("layer", 0)
                    n = more.get("layers", 0) or region.op["layers"] - first
                    for layer in range(first, first + n):
                        self.right(peer, region, key, layer, data[layer * region.layer_bytes:(layer + 1) * region.layer_bytes])
        self.call(peer, method, {"region": region.number, "keys": keys_of(op["keys"]), "blocks": u32(*op["at"]), **more},
                  check=check, late=op.get("late"))

    def right(self, peer, region, key, layer, data):
        """Raw blocks have the stored bytes. If nobody stored encoded bytes by hand, decoded numbers
        lie in the tenant's own range, and a summary is always the same. Only the daemon knows what
        a region by hand holds."""
        op, want = region.op, self.layer(peer, region, key, layer)
        holders = {region.holder} | self.forms.get(region.holder, set())  # a base's loads find its encoded blocks
        if data == want or region.form == "bytes" or holders & self.rawly:
            return
        where = f"tenant {peer.tenant}, key {key}, layer {layer}"
        if region.form == "summary":
            first = self.summaries.setdefault((peer.tenant, op["crc"], op["part"], key, layer), data)
            if data != first:
                raise Finding("another summary", f"{where}: {difference(data, first)}, op {self.at}")
        elif region.form == "raw" or op["lossless"]:
            raise Finding("wrong bytes", f"{where}: {difference(data, want)}, op {self.at}")
        elif not pattern.is_wild(key):
            wrong = out_of_range(data, peer.tenant)
            if wrong:
                raise Finding("wrong numbers", f"{where}: {wrong}, op {self.at}")

    def do_gather(self, peer, op):
        region = peer.regions.get(op["region"])
        if not region or not region.op["pool"]:
            return
        self.settle(peer)
        region.memory.map[:] = bytes(len(region.memory.map))
        items = [number for item in op["items"] for number in item]

        def check(result, _):
            self.look(peer, bytes(region.memory.map), f"a pool of {region.form}")
            source = op["source"]
            keys = source["keys"]["keys"] if "keys" in source else self.sequences.get((peer, source["sequence"]["of"]), [])
            for (index, layer, slot), status in zip(op["items"], result["status"] if result else ()):
                if status == OK:
                    self.count(f"gathered {region.form}")
                    if index < len(keys):
                        self.right(peer, region, keys[index], layer, region.memory.map[slot * region.size:(slot + 1) * region.size])
        self.call(peer, "gather", {"region": region.number, "items": u32(*items),
                                  **{key: self.value(value) for key, value in op["source"].items()}}, check=check, late=op.get("late"))

    def do_select(self, peer, op):
        rows = len(op["sequences"]) * op["rows"] * op["heads"] * op["dim"]
        if rows > 1 << 17:
            return
        q = np.linspace(-1, 1, rows, dtype=np.float32).tobytes()
        self.call(peer, "select", {"sequences": self.value(op["sequences"]), "layers": op["layers"], "q": q, "q_heads": op["heads"],
                                   "rows": op["rows"], **op["more"]})

    # ---- mappings ----

    def do_mapping(self, peer, op):
        mapping = Mapping(op)

        def check(result, fds):
            if result:
                mapping.number, mapping.answer = result["mapping"], result
                mapping.table = mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)
                peer.mappings[op["as"]] = mapping
        self.call(peer, "mapping.open", {"ns": self.value(op["ns"]), "part": op["part"]}, name=op["as"], check=check)

    def do_ref(self, peer, op):
        mapping = peer.mappings.get(op["mapping"])

        def check(result, fds):
            if not (result and mapping):
                return
            for slab, fd in zip(result.get("granted", ()), fds):
                if slab in mapping.slabs:
                    mapping.slabs[slab].close()
                mapping.slabs[slab] = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            self.count("referenced")
            self.mappings(peer)
            keys = self.sequences.get((peer, op["sequence"]["of"]), [])[op["first"]:]
            for key, place in zip(keys, struct.iter_unpack("<IIQ", result["places"])):
                self.referenced(peer, mapping, key, *place)
        self.call(peer, "mapping.ref", {"mapping": mapping.number if mapping else NOTHING, "sequence": self.value(op["sequence"]),
                                       "first": op["first"], "n": op["n"]}, check=check)

    def referenced(self, peer, mapping, key, slab, slot, seq):
        """A worker's read: the bytes that it copied count if the sequence number is unchanged."""
        if slab not in mapping.slabs or not mapping.op["exact"]:
            return
        entry = 4096 + 8 * (slab * (mapping.answer["slab_bytes"] // 4096) + slot)
        at, n = slot * mapping.answer["slot_bytes"], mapping.op["layer_bytes"]
        for layer in range(mapping.op["layers"]):
            data = mapping.slabs[slab][at + layer * n:at + (layer + 1) * n]
            want = pattern.content(peer.tenant, mapping.op["label"], key, mapping.op["part"] * 1024 + layer, n)
            if struct.unpack("<Q", mapping.table[entry:entry + 8])[0] != seq:
                return
            self.count("read in a mapping")
            if data != want:
                raise Finding("wrong bytes in a mapping", f"tenant {peer.tenant}, key {key}, layer {layer}: {difference(data, want)}")

    def mappings(self, peer):
        for mapping in peer.mappings.values():
            for slab in mapping.slabs.values():
                self.look(peer, bytes(slab), "a mapping")

    def do_release(self, peer, op):
        mapping = peer.mappings.get(op["mapping"])
        if mapping and mapping.slabs:
            self.mappings(peer)
            slabs = sorted(mapping.slabs)
            for slab in mapping.slabs.values():
                slab.close()
            mapping.slabs = {}
            self.call(peer, "mapping.release", {"mapping": mapping.number, "slabs": slabs})

    def do_close(self, peer, op):
        mapping = peer.mappings.pop(op["mapping"], None)
        if mapping:
            self.call(peer, "mapping.close", {"mapping": mapping.number})
            for slab in mapping.slabs.values():
                self.look(peer, bytes(slab), "a mapping")
            mapping.close()

    # ---- files ----

    def encrypted(self):
        """The first tenant's bytes are nowhere in the clear, where it has keys."""
        if not self.program["options"]["encrypted"]:
            return
        for name in ("nvme", "shared"):
            for at, _, files in os.walk(os.path.join(self.directory, name)):
                for file in files:
                    with open(os.path.join(at, file), "rb") as opened:
                        data = opened.read()
                    found = pattern.foreign(data, 1)
                    if found and found[1] == 0:
                        raise Finding(f"in the clear in {name}", f"{file} at {found[0]}: {data[found[0]:found[0] + 16].hex()}")


def scalars(value):
    if isinstance(value, dict):
        for one in value.values():
            yield from scalars(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from scalars(one)
    else:
        yield value


def difference(data, want):
    at = next(i for i, (a, b) in enumerate(zip(data, want)) if a != b)
    return f"from byte {at} on {data[at:at + 16].hex()} in place of {want[at:at + 16].hex()}"


def out_of_range(data, tenant):
    """The first bf16 number whose magnitude is another tenant's; q4 spreads some, but no more than 8 binades."""
    bits = np.frombuffer(data[:len(data) // 2 * 2], np.uint16)
    exponent = (bits >> 7 & 0xff).astype(int)
    own = pattern.HIGH[tenant] * 2
    far = np.nonzero(exponent > own + 4)[0]
    return f"number {far[0]} is {bits[far[0]]:#06x}, of exponent {exponent[far[0]]}; its own have {own}" if len(far) else None

