"""What the tests of mappings share: a client that uses a mapping as the page says, and maps what
the daemon grants."""

import fcntl
import mmap
import os
import socket
import struct

import msgpack
from retrieval_case import IDENTITY, LAYERS, Retrieval
from second_client import PAGE, Client, Closed

SLAB = 1 << 20
PART = LAYERS * IDENTITY["layer_bytes"]
SLOTS = SLAB // PART
NONE = 0xFFFFFFFF
MAPPINGS = {"mapping.size": "4MiB"}


class Reader(Client):
    """A client that takes descriptors, and mappings' notifications."""

    def __init__(self, *args, **more):
        self.fds, self.revoked, self.flags = [], [], 0
        super().__init__(*args, **more)

    def receive(self):
        need = 4
        while len(self.input) < need or len(self.input) < (need := 4 + int.from_bytes(self.input[:4], "big")):
            try:
                data, fds, flags, _ = socket.recv_fds(self.socket, 1 << 20, 64)
            except (ConnectionResetError, BrokenPipeError):
                raise Closed from None
            if not data:
                raise Closed
            self.fds += fds
            self.flags |= flags
            self.input += data
        body = bytes(self.input[4:need])
        del self.input[:need]
        message = msgpack.unpackb(body, raw=False)
        if message[0] == 2 and message[1] == "mapping.revoke":
            PAGE.check_map("mapping.release", "in mapping.revoke", message[2])
            self.revoked += message[2]["slabs"]
            return self.receive()
        return body

    def take_fds(self):
        fds, self.fds = self.fds, []
        return fds


class SharedMapping:
    """A client's side of a mapping, as the page describes it."""

    def __init__(self, client, ns, **more):
        self.client, self.slabs = client, {}
        answer = client.call("mapping.open", ns=ns, **more)
        self.number, self.slot_bytes, self.slab_bytes = answer["mapping"], answer["slot_bytes"], answer["slab_bytes"]
        (fd,) = client.take_fds()
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_GROW, seals
        self.slots, self.part = self.slab_bytes // 4096, PART
        assert os.fstat(fd).st_size == 4096 + 8 * answer["slabs"] * self.slots
        self.table = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        header = struct.unpack("<8sIIQIIQ", self.table[:40])
        assert header[:6] == (b"UCMMAPP1", 1, 4096, self.slab_bytes, answer["slabs"], self.slots), header
        os.close(fd)

    def take(self, answer):
        """[place or None]"""
        fds = self.client.take_fds()
        assert len(fds) == len(answer.get("granted", ())), (fds, answer)
        for slab, fd in zip(answer.get("granted", ()), fds):
            assert slab not in self.slabs and os.fstat(fd).st_size == self.slab_bytes
            self.slabs[slab] = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            os.close(fd)
        places = list(struct.iter_unpack("<IIQ", answer["places"]))
        return [None if place[0] == NONE else place for place in places]

    def ref(self, sequence, n, first=0, **more):
        places, self.last = [], None
        while len(places) < n:
            self.last = self.client.call("mapping.ref", mapping=self.number, sequence=sequence, first=first + len(places),
                                         n=n - len(places), **more)
            places += self.take(self.last)
        return places

    def seq(self, place):
        at = 4096 + 8 * (place[0] * self.slots + place[1])
        return struct.unpack("<Q", self.table[at:at + 8])[0]

    def read(self, place):
        if place is None or place[0] not in self.slabs or self.seq(place) != place[2]:
            return None
        at = place[1] * self.slot_bytes
        data = self.slabs[place[0]][at:at + self.part]
        return data if self.seq(place) == place[2] else None

    def release(self, *slabs):
        for slab in slabs:
            self.slabs.pop(slab).close()
        self.client.call("mapping.release", mapping=self.number, slabs=list(slabs))


class Case(Retrieval):
    options = dict(MAPPINGS)

    def client(self, **how):
        client = Reader(self.daemon, **how)
        self.addCleanup(client.close)
        return client

    def referenced(self, blocks=None, client=None, **more):
        """A mapping with a sequence of stored blocks: (client, ns, mapping, sequence, kv)."""
        client, ns, _, kv = self.stored(blocks, client)
        # a block that waits to be written does not leave a mapping for others
        self.settled(client, ns)
        sequence, _ = self.sequence(client, self.summaries(client, ns), range(len(kv)))
        return client, ns, SharedMapping(client, ns, **more), sequence, kv

    def assert_read(self, mapping, places, kv):
        for place, block in zip(places, kv):
            self.assertEqual(mapping.read(place), block.tobytes(), place)
