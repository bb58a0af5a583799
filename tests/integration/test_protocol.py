#!/usr/bin/python3
"""docs/protocol.md and docs/methods.md against a real daemon, through second_client.py: the daemon
does what the pages say.

Here: vectors, the session byte by byte, frames, and every parameter, bound and field of every
method. test_protocol_blocks.py tests blocks.
"""

import faulthandler
import fcntl
import hashlib
import os
import pickle
import re
import signal
import socket
import struct
import time
import unittest

import msgpack

from second_client import (BIG, BUSY, DEADLINE, DEMO, DENIED, DEVICE, INVALID, NOT_FOUND, NO_ROOM, OK, OTHER_UID, PAGE,
                           NO_METHOD, TIMEOUT_S, UCMD, UNSUPPORTED, Case, Client, Closed, Pool, Refused, bounds,
                           fingerprint_form, fits, frame, keys, memfd, pack, pickled, required, u32)

SUITE_TIMEOUT_S = 300


class Vectors(unittest.TestCase):
    def test_fingerprint(self):
        self.assertEqual(fingerprint_form("uid:1000", DEMO), PAGE.hex["canonical form"])
        self.assertEqual(hashlib.sha256(PAGE.hex["canonical form"]).digest(), PAGE.hex["fingerprint"])

    def test_frames_have_the_fields_of_the_page(self):
        """Without a daemon: finds old names that a rename left in the session."""
        for name, data in PAGE.hex.items():
            method = name.partition(",")[0]
            if method not in PAGE.methods:
                continue
            message = msgpack.unpackb(data[4:], raw=False)
            PAGE.check_map(method, "Params" if ", answer" not in name else "Results", message[3])
            self.assertEqual(len(data), 4 + int.from_bytes(data[:4], "big"), name)
            for inner in ("handles", "planes"):
                for entry in message[3].get(inner, []):
                    PAGE.check_map(method, f"in {inner}", entry)

    def test_sha256_keys(self):
        key = bytes(32)
        for number, tokens in enumerate((range(1, 17), range(17, 33))):
            key = hashlib.sha256(b"ucm-block-1\0" + key + u32(*tokens)).digest()
            self.assertEqual(key, PAGE.hex[f"sha256 key {number}"])

    def test_md5_keys(self):
        meta = b"demo:1:torch.bfloat16:0"
        key = hashlib.md5(meta + pickle.dumps("UCM_HASH_SEED", protocol=5)).digest()
        self.assertEqual(key, PAGE.hex["md5 seed"])
        for number, tokens in enumerate((range(1, 17), range(17, 33))):
            key = hashlib.md5(meta + pickled(key, tokens)).digest()
            self.assertEqual(key, PAGE.hex[f"md5 key {number}"])

    def test_written_out_pickles_are_those_of_cpython(self):
        for step, count in ((1, 1), (255, 2), (256, 3), (65535, 4), (1 << 30, 5), (1, 21845), (4, 60000), (59999, 999)):
            tokens = tuple(number * step % (1 << 32) for number in range(1, count + 1))
            self.assertEqual(pickled(bytes(16), tokens), pickle.dumps((bytes(16), tokens), protocol=5), count)


class Session(Case):
    """The session of the page, byte by byte, on a daemon that has seen nothing else."""

    @unittest.skipUnless(os.geteuid() == 0, "takes another uid")
    def test_session(self):
        client = self.client(uid=OTHER_UID, hello=False)
        fd = memfd(8192000)
        self.addCleanup(os.close, fd)
        for name in ("hello", "namespace.open", "region.register", "dump", "lookup", "load"):
            client.send(PAGE.hex[name], [fd] if name == "region.register" else [])
            got, want = client.receive(), PAGE.hex[name + ", answer"]
            if name == "hello":  # these differ from start to start and from release to release
                mine, pages = msgpack.unpackb(got, raw=False), msgpack.unpackb(want[4:], raw=False)
                pages[3].update({field: mine[3][field] for field in ("instance", "server")})
                want = frame(pages)
            self.assertEqual(frame(got), want, name)
        failing = {"error, answer": [0, 7, "lookup", {"ns": 9, "keys": bytes(16)}],
                   "error, notification": b"\x93\x02\xa5err"}
        for name, body in failing.items():
            client.send(frame(body))
            got, want = (msgpack.unpackb(answer, raw=False) for answer in (client.receive(), PAGE.hex[name][4:]))
            for message in (got, want):  # but the sentence, which may change
                self.assertTrue(message[2].pop())
            self.assertEqual(got, want)
        self.assertRaises(Closed, client.receive)


class Frames(Case):
    options = {"nvme": False, "arena.size": "64MiB", "request.handshake": "1s"}

    def closes(self, data, msgid=None, code=INVALID, fds=()):
        """Sends bytes that break the protocol. Expects the page's error, and the connection's end.
        """
        client = self.client()
        client.send(data, fds)
        with self.assertRaises(Refused, msg=data[:64]) as caught:
            client.wait(client.next())
        self.assertEqual(caught.exception.code, code)
        self.assertEqual(len(caught.exception.args), 3 if msgid is not None else 4, (data[:64], caught.exception))
        self.assertEqual([], list(client.answers))
        self.assertRaises(Closed, client.receive)

    def test_bad_frames(self):
        most = PAGE.limits["bytes of a frame's body"]
        for header in (b"\0\0\0\0", struct.pack(">I", most + 1), b"GET / HTTP/1.1\r\n\r\n"):
            self.closes(header)
        for body in ([], {}, None, 7, [3, 1, "health", {}], [0, 1, "health"], [0, 1, "health", {}, 1], b"\xc1",
                     b"\x92\0", [0, -1, "health", {}], [0, 1 << 32, "health", {}], b"\xdd\xff\xff\xff\xff\0\1"):
            self.closes(frame(body))
        head = b"\x94\0\x05\xa6health"
        for tail in (b"\x81\xa1a\xc1", b"\x80\xc0", b"\x81\xa1a\xc6\xff\xff\xff\xff", b"\x81\xa1a\xd4\0\0",
                     b"\x81\xa1a", b"\x90", b"\xc0", b"\x81\xa1a\xd6\xff\0\0\0\0", b"\x81\xa1a" + b"\x91" * 7 + b"\1",
                     b"\x81\xa1a\xdc\xff\xfa" + b"\1" * 65530):
            self.closes(frame(head + tail), msgid=5)
        self.closes(frame([0, 5, b"health", {}]), msgid=5)

    def test_what_is_just_within_the_limits_is_a_bad_request_only(self):
        client, most = self.client(), PAGE.limits["bytes of a frame's body"]
        for params in ({"a": [[[[[[0]]]]]]}, {"a": [0] * 65529}, {"a": bytes(most - 18)}):
            self.refused(INVALID, client.call, "health", **params)
        self.assertEqual(len(pack([0, 1, "health", params])), most)
        self.refused(NO_METHOD, client.call, "helth")
        client.send(frame(b"\x94\0\1\xa6health\x81\xa2\xff\xfe\1"))
        client.methods[1] = "health"
        self.refused(INVALID, client.wait, 1)
        client.send(frame(b"\x94\xcc\0\xd3" + struct.pack(">q", (1 << 32) - 1) + b"\xdb\0\0\0\6health\xdf\0\0\0\0"))
        client.methods[(1 << 32) - 1] = "health"
        self.assertEqual(client.wait((1 << 32) - 1)["status"], "ok")

    def test_an_error_quotes_nothing_that_is_not_utf8(self):
        client = self.client()
        client.send(frame(b"\x94\0\1\xa4b\xff\xfed\x80"))
        self.assertEqual(msgpack.unpackb(client.receive(), raw=False)[2][0], NO_METHOD)

    def test_clocks(self):
        started, idle = time.monotonic(), self.client()
        self.closes(b"\0\0\0", code=DEADLINE)
        self.closes(b"\0\0\0\x20\x94\0\5\xa6heal", msgid=None, code=DEADLINE)
        self.assertGreater(time.monotonic() - started, 2)
        silent = self.client(hello=False)
        self.refused(DEADLINE, silent.next)
        self.assertRaises(Closed, silent.receive)
        self.assertEqual(idle.call("health")["status"], "ok")  # between frames a client may be silent for ever

    def test_the_clock_stands_still_for_a_stopped_client(self):
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:  # says hello, hands its socket over, and stops
            try:
                client = Client(self.daemon)
                socket.send_fds(theirs, [b"."], [client.socket.fileno()])
                os.kill(os.getpid(), signal.SIGSTOP)
            finally:
                os._exit(0)
        self.assertTrue(os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]))
        client = socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])
        data = frame([0, 9, "health", {}])
        client.sendall(data[:5])
        self.closes(b"\0\0\0", code=DEADLINE)  # one that began later, and is not stopped
        client.sendall(data[5:])
        client.settimeout(20)
        self.assertEqual(msgpack.unpackb(client.recv(65536)[4:], raw=False)[:2], [1, 9])
        os.kill(child, signal.SIGCONT)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        for one in (client, ours, theirs):
            one.close()

    def test_hello(self):
        client = self.client(hello=False)
        hello = {"version_min": 1, "version_max": 1, "client": "second"}
        self.refused(INVALID, client.call, "health")
        self.refused(UNSUPPORTED, client.call, "hello", **dict(hello, version_min=PAGE.limits["protocol version"] + 1, version_max=7))
        for wrong in ({"client": ""}, {"client": "a\x85"}, {"client": "a\n"}, {"client": b"a"}, {"version_min": 1.0}):
            self.refused(INVALID, client.call, "hello", **dict(hello, **wrong))
        answer = client.call("hello", **dict(hello, version_max=(1 << 32) - 1, client="\u00fc" * 128))
        self.assertEqual(answer["version"], PAGE.limits["protocol version"])
        self.assertLessEqual(answer["max_frame_bytes"], PAGE.limits["bytes of a frame's body"])
        self.assertLessEqual(answer["max_keys"], PAGE.limits["keys of a request"])
        self.assertLessEqual(answer["max_timeout_ms"], PAGE.limits["milliseconds of a timeout"])
        self.assertEqual(answer["instance"], self.client().limits["instance"])
        self.assertTrue(answer["admin"])  # as the daemon's own uid

    def test_a_version_max_below_version_min_is_invalid(self):
        self.refused(INVALID, self.client(hello=False).call, "hello", version_min=2, version_max=1, client="second")

    def test_no_answers_are_read(self):
        client = self.client()
        client.socket.settimeout(1)
        try:
            for client.msgid in range(1, 100000):
                client.send(frame([0, client.msgid, "stats", {}]))
            self.fail("a client that does not read is read from for ever")
        except TimeoutError:
            self.assertEqual(self.client().call("health")["status"], "ok")
        client.socket.settimeout(TIMEOUT_S)
        self.assertIsInstance(client.next(), int)

    def test_room(self):
        client, ns, region = self.worker(BIG, 132)
        self.assertEqual(set(region.dump(range(128), range(128))), {OK})
        lease = client.call("lookup", ns=ns, keys=keys(*range(128)), lease_ms=60000)
        self.assertEqual(lease["hits"], 128)
        self.assertEqual(region.dump(["x", "y"], [0, 1]), [NO_ROOM] * 2)
        client.call("release", lease=lease["lease"])
        self.assertEqual(region.dump(["x", "y"], [0, 1]), [OK] * 2)
        self.assertLess(client.call("lookup", ns=ns, keys=keys(*range(128)), per_key=True)["hits"], 128)
        self.assertEqual(client.call("evict", ns=ns, tier=1), {"blocks": 0, "busy": 128})  # they lie nowhere else
        self.assertEqual(client.call("evict", ns=ns, keys=keys("x", "gone")), {"blocks": 1, "missing": 1})

    def test_evict_from_nvme_changes_nothing_where_there_is_none(self):
        client, ns, region = self.worker()
        region.dump(["x"], [0])
        self.assertEqual(client.call("evict", ns=ns, tier=2)["blocks"], 0)


class Few(Case):
    options = {"nvme": False, "limits.connections": "3", "limits.namespaces": "2"}

    def test_busy(self):
        client = self.client()
        opened = client.open(DEMO), client.open(BIG)
        self.refused(BUSY, client.open, dict(DEMO, model="third"))
        self.assertEqual((client.open(DEMO), client.open(BIG)), opened)
        others = [self.client() for _ in range(2)]
        one_more = self.client(hello=False)
        self.refused(BUSY, one_more.next)
        self.assertRaises(Closed, one_more.next)
        others[0].close()
        self.until(lambda: client.metrics()["connections"] == 2, "the end of a connection")
        self.client()


class Requests(Case):
    options = {"events.memory": "1MiB"}

    def good(self):
        """Parameters with which each method of the page is answered by a result."""
        client, ns, region = self.worker()
        region.dump(range(2), range(2))
        one, move = {"ns": ns, "keys": keys(0)}, {"region": region.number, "keys": keys(0), "blocks": u32(3)}
        fd = memfd(8192)
        self.addCleanup(os.close, fd)
        handles = [{"kind": 0, "bytes": 8192}]
        planes = [{"stride": 4096, "block_bytes": 4096}, {"offset": 4096, "stride": 4096, "block_bytes": 4096, "layer": 1}]
        summary = {"ns": ns, "method": 1, "dtype": 1, "kv_heads": 1, "head_dim": 64, "k_token_stride": 128}
        derived = client.call("summary.open", **summary)["ns"]
        sequence = client.call("sequence.open", ns=derived)["sequence"]
        client.call("sequence.append", sequence=sequence, keys=keys(1))
        return client, fd, {
            "hello": {"version_min": 1, "version_max": 1, "client": "x"}, "namespace.open": dict(DEMO, model=self.id()),
            "region.register": {"ns": ns, "blocks": 1, "device": "cpu", "handles": handles, "planes": planes},
            "lookup": one, "release": {"lease": 1}, "load": move, "load_prefix": move, "dump": move, "prefetch": one, "cancel": {"msgid": 0},
            "pin": one, "unpin": one, "evict": one, "namespace.purge": one, "stats": {}, "health": {},
            "namespace.list": {}, "ls": {"ns": ns}, "inspect": {"ns": ns, "key": keys(1)}, "verify": {"ns": ns},
            "shared.gc": {}, "config.reload": {}, "config.get": {}, "encryption_key.list": {}, "encryption_key.reload": {},
            "bypass": {}, "trace": {"op": 1},
            "tenant.list": {}, "tenant.set": {"tenant": "uid:7", "settings": "weight=100"}, "tenant.reset": {"tenant": "uid:7"},
            "region.unregister": {"region": region.number}, "region.challenge": {},
            "ring.register": {"gpu": bytes(16), "ipc": bytes(64), "entry_bytes": 1 << 20, "entries": 4},
            "ring.unregister": {"ring": 1},
            "encoding.open": {"ns": ns, "encoding": "fp8", "dtype": "bf16", "k": [16, 1, 64], "v": [16, 1, 64]},
            "summary.open": summary, "summary.build": {"ns": derived, "keys": keys(1)}, "sequence.open": {"ns": derived},
            "gather": {"region": Pool(client, ns, 4096, 1).number, "sequence": sequence, "items": u32(0, 1, 0)},
            "sequence.append": {"sequence": sequence, "keys": keys(1)}, "sequence.prefetch": {"sequence": sequence, "index": u32(0)},
            "select": {"sequences": [sequence], "layers": [1], "q": bytes(128), "q_dtype": 1, "q_heads": 1},
            "sequence.close": {"sequence": sequence},
            "mapping.open": {"ns": ns}, "mapping.ref": {"mapping": 1, "sequence": sequence, "n": 1},
            "mapping.unref": {"mapping": 1, "sequence": sequence, "n": 1}, "mapping.release": {"mapping": 1, "slabs": [0]},
            "mapping.close": {"mapping": 1}, "lookup_table.open": {"ns": ns},
            "events": {}, "events.list": {"ns": ns}, "events.metadata": {"ns": ns, "keys": keys(1), "tokens": bytes(64)}}

    def wrong(self, params, table):
        """Params of which one field each time breaks what the page says of it."""
        for name, (words, *_) in table.items():
            limit, kind = bounds(words), re.match(r"[a-z]+", words)[0]
            values = [None, 1, -1, 1.5, True, "x" * 16, b"x" * 16, [1], {}]
            values = [value for value in values if value == -1 or not fits(value, kind)]
            if limit and kind == "float":
                values += [limit[0] - 0.5, limit[1] * 1.001, float("nan"), float("inf")]
            elif limit and kind == "uint":
                values += [number for number in (limit[0] - 1, limit[1] + 1) if number < 1 << 64]
            elif limit:
                unit = {"str": "x", "bin": b"x"}.get(kind, [1])
                values += [unit * count for count in (limit[0] - 1, limit[1] + 1) if count >= 0]
            for value in values:
                yield dict(params, **{name: value})
            if required(words):
                yield {other: params[other] for other in params if other != name}
        yield dict(params, unknown=0)

    def test_every_parameter_of_the_page(self):
        client, fd, good = self.good()
        self.assertEqual(sorted(good), sorted(PAGE.methods))
        lacking = {"ring.register": DEVICE, "ring.unregister": NOT_FOUND, "shared.gc": UNSUPPORTED,
                   "config.reload": UNSUPPORTED,  # GPU, shared, file
                   "mapping.open": UNSUPPORTED, "mapping.ref": NOT_FOUND, "mapping.unref": NOT_FOUND,
                   "mapping.release": NOT_FOUND, "mapping.close": NOT_FOUND}  # mapping.size
        for method, params in good.items():
            fds = [fd] if method in ("region.register", "ring.register") else []
            wrongs = list(self.wrong(params, PAGE.tables[method, "Params"]))
            for field, nested in (("handles", "in handles"), ("planes", "in planes")) if "planes" in params else ():
                wrongs += [dict(params, **{field: [entry] + params[field][1:]})
                           for entry in self.wrong(params[field][0], PAGE.tables[method, nested])]
            for bad in wrongs:
                self.refused(INVALID, client.call, method, fds, **bad)
            for name, value in params.items():
                twice = bytes([0x80 + len(params) + 1]) + pack(params)[1:] + pack(name) + pack(value)
                client.methods[0] = method
                client.send(frame(b"\x94\0\0" + pack(method) + twice), fds)
                self.refused(INVALID, client.wait, 0)
            if method in lacking:
                self.refused(lacking[method], client.call, method, fds, **params)
            else:
                client.call(method, fds, **params)

    @unittest.skipUnless(os.geteuid() == 0, "takes another uid")
    def test_who_may_call(self):
        """Methods that the page marks for operators are DENIED to others, and no other methods are.
        """
        _, _, good = self.good()
        other = self.client(uid=OTHER_UID)
        ns = other.open(dict(DEMO, model=self.id()))
        denied = set()
        for method, params in good.items():
            if method in ("hello", "namespace.open", "region.register", "ring.register"):
                continue
            try:
                other.call(method, **{name: ns if name == "ns" else value for name, value in params.items()})
            except Refused as refused:
                if refused.code == DENIED:
                    denied.add(method)
        self.assertEqual(denied, PAGE.operators)

    def test_rings(self):
        """Without a GPU no ring can be made. The connection goes on, and keeps no descriptor that
        came."""
        client, fd = self.client(), memfd(139264)
        good = {"gpu": bytes(16), "ipc": bytes(64), "entry_bytes": 1 << 20, "entries": 4}
        for change in ({}, {"entries": 8}, {"offset": 512}, {"gpu": b"\xff" * 16}):
            error = self.refused(DEVICE, client.call, "ring.register", [fd], **dict(good, **change))
            self.assertRegex(str(error), "GPU")
        self.refused(DEVICE, client.call, "ring.register", [], **good)
        self.refused(DEVICE, client.call, "ring.register", [fd, fd], **good)
        for wrong in ({"entries": 1}, {"entries": 9}, {"entry_bytes": 4096}, {"entry_bytes": 1 << 27}, {"gpu": b""},
                      {"ipc": bytes(63)}, {"fd": 64}):
            self.refused(INVALID, client.call, "ring.register", [fd], **dict(good, **wrong))
        self.refused(NOT_FOUND, client.call, "ring.unregister", ring=1)
        client.call("health")
        os.close(fd)

    def test_namespaces(self):
        client, tenant = self.client(), self.client().limits["tenant"]
        seen = set()
        for change in ({}, {"revision": "r"}, {"dtype": "fp8"}, {"layout": "\u00e4/2"}, {"block_tokens": 1},
                       {"parts": 3}, {"key_bytes": 32}, {"parts": 2, "layers": [2, 1]}, {"layers": [3]},
                       {"layer_bytes": 1}, {"salt": b"\0" * 1024}, {"salt": b"s"}, {"model": "m" * 256}):
            identity = dict(DEMO, **change)
            answer = client.call("namespace.open", **identity)
            self.assertEqual(answer["fingerprint"], hashlib.sha256(fingerprint_form(tenant, identity)).digest(), change)
            self.assertEqual(answer, client.call("namespace.open", tenant=tenant, **identity))
            written_out = dict({"revision": "", "salt": b"", "tenant": ""}, **identity)
            written_out["layers"] = (identity["layers"] * identity["parts"])[:identity["parts"]]
            self.assertEqual(answer, self.client().call("namespace.open", **written_out))
            seen.add(answer["ns"])
            want = dict(written_out, tenant=tenant)
            want.pop("salt")
            listed = [each for each in self.pages(client, "namespace.list", "namespaces") if each["ns"] == answer["ns"]]
            self.assertEqual({name: listed[0].get(name) for name in want}, want)
        self.assertEqual(len(seen), 13)
        self.refused(DENIED, client.call, "namespace.open", tenant="uid:77", **DEMO)
        for wrong in ({"parts": 3, "layers": [2, 2]}, {"layers": [0]}, {"layers": [1025]}, {"layer_bytes": 1 << 28}):
            self.refused(INVALID, client.call, "namespace.open", **dict(DEMO, **wrong))
        self.refused(NOT_FOUND, client.call, "lookup", ns=4000000, keys=keys(0))

    def test_regions(self):
        client, ns, region = self.worker()
        size = 1 << 20
        fd, both = memfd(size), {"stride": 8192, "block_bytes": 4096}
        base = {"ns": ns, "blocks": 16, "device": "cpu", "handles": [{"kind": 0, "bytes": size}],
                "planes": [both, dict(both, offset=4096, layer=1)]}
        one, two = base["planes"]

        def register(fds=(fd,), handle=None, planes=None, **change):
            handles = [dict(base["handles"][0], **handle)] if handle else base["handles"]
            params = dict(base, handles=handles, planes=planes or base["planes"])
            return client.call("region.register", fds, **dict(params, **change))["region"]

        number = register()
        self.assertNotEqual(number, region.number)
        for good in ({"blocks": 128}, {"handle": {"offset": 4096, "bytes": size - 4096}}, {"handle": {"bytes": 131072}},
                     {"fds": [fd, fd], "handles": [{"kind": 0, "bytes": size, "fd": 1}, {"kind": 0, "bytes": size}],
                      "planes": [one, dict(two, handle=1)]},
                     {"planes": [one]}, {"planes": [dict(one, block_bytes=1), dict(one, offset=1, block_bytes=4095), two]}):
            client.call("region.unregister", region=register(**good))
        handle = {"kind": 0, "bytes": size}
        for wrong in ({"part": 1}, {"blocks": 129}, {"fds": []}, {"handles": [handle, handle]},
                      {"handle": {"offset": 1}}, {"handle": {"bytes": size + 1}}, {"handle": {"fd": 1}},
                      {"handle": {"kind": 2}}):
            self.refused(INVALID, register, **wrong)
        for planes in ([two, one], [one, dict(one, offset=4095, layer=1)], [dict(one, block_bytes=4095), two],
                       [dict(one, stride=4095), dict(two, offset=1 << 19)], [one, dict(two, handle=1)],
                       [one, two, dict(two, layer=2, offset=1 << 19)], [one, dict(two, offset=size - 4095)],
                       [one, dict(two, offset=(1 << 63) - 4096)], [dict(one, stride=1 << 62), two]):  # these wrap round
            self.refused(INVALID, register, planes=planes)
        self.refused(NOT_FOUND, register, ns=4000000)
        handles = [{"kind": 1, "bytes": size, "ipc": bytes(64)}]
        self.refused(DEVICE, register, fds=(), device="cuda", gpu=bytes(16), handles=handles)  # the daemon has no GPU
        for other in (memfd(size, fcntl.F_SEAL_GROW), os.open(UCMD, os.O_RDONLY)):
            self.refused(INVALID, register, fds=[other])
            os.close(other)
        client.call("region.unregister", region=number)
        self.refused(NOT_FOUND, client.call, "region.unregister", region=number)
        self.refused(NOT_FOUND, self.client().call, "region.unregister", region=region.number)
        os.close(fd)

    def test_descriptors(self):
        client, fd, good = self.good()
        params = good["region.register"]
        self.refused(INVALID, client.call, "health", [fd])
        client.methods[900] = client.methods[901] = "region.register"
        data = frame([0, 900, "region.register", params])
        # the descriptors come with the first byte, the other bytes in pieces
        client.send(data[:1], [fd])
        for at in range(1, len(data)):
            client.send(data[at:at + 1])
        first = client.wait(900)["region"]
        client.send(data[:4] + data[4:], [fd])
        client.send(frame([0, 901, "region.register", params]), [fd])
        self.assertEqual(len({first, client.wait(900)["region"], client.wait(901)["region"]}), 3)
        handles = [{"kind": 0, "bytes": 8192, "fd": number} for number in range(64)]
        client.call("region.register", [fd] * 64, **dict(params, handles=handles))
        broken = self.client()
        broken.send(frame([0, 1, "health", {}]), [fd] * 65)
        self.assertEqual(self.refused(INVALID, lambda: broken.wait(broken.next())).code, INVALID)
        self.assertRaises(Closed, broken.receive)

    def test_a_descriptor_that_no_handle_names_is_refused(self):
        client, fd, good = self.good()
        self.refused(INVALID, client.call, "region.register", [fd, fd], **good["region.register"])


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
