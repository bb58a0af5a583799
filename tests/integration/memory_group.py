"""A memory cgroup for a test's daemon."""

import os

V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


class Group:
    """A memory cgroup, of version 1 or 2; OSError where none can be made."""

    def __init__(self, name, limit):
        old = os.path.isdir(V1)
        if not old and "memory" not in open(f"{V2}/cgroup.subtree_control", encoding="ascii").read():
            raise OSError("no memory controller for groups below the first")
        self.path = f"{V1 if old else V2}/ucmd-test-{name}-{os.getpid()}"
        os.mkdir(self.path)
        self.usage_file = self.path + ("/memory.usage_in_bytes" if old else "/memory.current")
        try:
            with open(self.path + ("/memory.limit_in_bytes" if old else "/memory.max"), "w", encoding="ascii") as f:
                f.write(str(limit))
        except OSError:
            self.remove()
            raise
        self.words = ["/bin/sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"]

    def usage(self):
        with open(self.usage_file, encoding="ascii") as f:
            return int(f.read())

    def remove(self):
        os.rmdir(self.path)
