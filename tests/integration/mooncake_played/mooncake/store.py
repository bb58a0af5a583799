"""Mooncake's client as the backend meets it, played over the directory that `metadata_server` names: a file for each object.

It behaves as real clients of version 0.3.13. A put of an existing object succeeds and changes
nothing. A put of no bytes stores nothing. Removing an object with a lease needs `force`. Files in
the directory do harm to keys PREFIX/...:
- `away-PREFIX`: the master can't be reached
- `throws-PREFIX`: calls throw
- `full-PREFIX`: the store has no room
- `half-PREFIX`: another client's put is never done
- `lease-PREFIX`: a lease ends during a read; that removes this file
"""

import ctypes
import os
import re

NOT_FOUND, HAS_LEASE, INVALID, NO_MASTER, LEASE_EXPIRED, NO_SPACE = -704, -706, -600, -900, -707, -200


class ReplicateConfig:
    replica_num = 1


class _Memory:
    def __init__(self, size):
        self.buffer_descriptor = self
        self.size = size


class _Replica:
    def __init__(self, size):
        self.memory = _Memory(size)

    def is_memory_replica(self):
        return True

    def get_memory_descriptor(self):
        return self.memory


class MooncakeDistributedStore:
    def setup(self, config):
        self.directory, self.spans = config["metadata_server"], []
        return 0

    def close(self):
        return 0

    def harm(self, name, key):
        return os.path.exists(self.harm_path(name, key))

    def harm_path(self, name, key):
        return os.path.join(self.directory, f"{name}-{key.partition('/')[0]}")

    def register_buffer(self, at, size):
        self.spans.append((at, size))
        return 0

    def registered(self, at, size):
        return any(first <= at and at + size <= first + n for first, n in self.spans)

    def path(self, key):
        return os.path.join(self.directory, "objects", key.replace("/", "%"))

    def get_size(self, key):
        if self.harm("throws", key):
            raise RuntimeError("the client throws")
        if self.harm("away", key):
            return NO_MASTER
        try:
            return os.stat(self.path(key)).st_size
        except FileNotFoundError:
            return NOT_FOUND

    def is_exist(self, key):
        size = self.get_size(key)
        return 1 if size >= 0 else 0 if size == NOT_FOUND else size

    def batch_is_exist(self, keys):
        return [self.is_exist(key) for key in keys]

    def batch_get_replica_desc(self, keys):
        sizes = {key: self.get_size(key) for key in keys}
        return {key: [_Replica(size)] for key, size in sizes.items() if size >= 0}

    def get_into(self, key, at, size):
        if self.harm("away", key):
            return NO_MASTER
        try:
            with open(self.path(key), "rb") as f:
                data = f.read()
        except FileNotFoundError:
            return NOT_FOUND
        if len(data) > size or not self.registered(at, size):
            return INVALID
        if self.harm("lease", key):
            os.unlink(self.harm_path("lease", key))
            ctypes.memset(at, 0x5a, size)
            return LEASE_EXPIRED
        ctypes.memmove(at, data, len(data))
        return len(data)

    def batch_get_into(self, keys, ats, sizes):
        return [self.get_into(*one) for one in zip(keys, ats, sizes)]

    def put_from(self, key, at, size, config=None):
        if self.harm("away", key) or not self.registered(at, size):
            return NO_MASTER if self.harm("away", key) else INVALID
        if self.harm("full", key):
            return NO_SPACE
        if self.is_exist(key) == 1 or size == 0 or self.harm("half", key):
            return 0
        os.makedirs(os.path.dirname(self.path(key)), exist_ok=True)
        temp = f"{self.path(key)}.{os.getpid()}~"
        with open(temp, "wb") as f:
            f.write(ctypes.string_at(at, size))
        try:
            os.link(temp, self.path(key))
        except FileExistsError:
            pass
        os.unlink(temp)
        return 0

    def batch_put_from(self, keys, ats, sizes, config=None):
        return [self.put_from(*one) for one in zip(keys, ats, sizes)]

    def remove_by_regex(self, pattern, force=False):
        directory = os.path.join(self.directory, "objects")
        keys = [name.replace("%", "/") for name in os.listdir(directory)]
        return sum(self.remove(key, force) == 0 for key in keys if re.search(pattern, key))

    def remove(self, key, force=False):
        found = self.is_exist(key)
        if found != 1:
            return NOT_FOUND if found == 0 else found
        if not force:
            return HAS_LEASE
        os.unlink(self.path(key))
        return 0
