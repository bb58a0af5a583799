#!/usr/bin/python3
"""A file system that hangs: FUSE with a server that does not answer. Needs root and /dev/fuse;
HungMount raises OSError without them.

As a program, hung_mount.py DIRECTORY takes|leaves|opens is that server."""

import ctypes
import os
import signal
import struct
import subprocess
import sys

LOOKUP, OPEN, INIT, DETACH = 1, 14, 26, 2


class HungMount:
    """A mount over a directory that may be in use. Every open there hangs from now on. takes: the
    server takes each request, so that not even SIGKILL ends its caller. Otherwise it does not read
    requests, and SIGKILL works, as in most of the kernel's file systems. opens: the server takes
    requests, and lets files be opened: any name is a file whose close() hangs."""

    def __init__(self, directory, takes=True, opens=False):
        self.directory = directory
        self.server = subprocess.Popen([sys.executable, __file__, directory, "opens" if opens else "takes" if takes else "leaves"], stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, text=True)
        said = self.server.stdout.readline().strip()
        if said != "mounted":
            self.server.wait()
            self.server.stdout.close()
            raise OSError(said)

    @classmethod
    def within(cls, test, directory, **how):
        """A mount until the end of the test. Skips the test where no such mount is possible."""
        try:
            mount = cls(directory, **how)
        except OSError as e:
            test.skipTest(str(e))
        test.addCleanup(mount.close)
        return mount

    @classmethod
    def file_within(cls, test, directory):
        """Opens a file of it, whose close() hangs."""
        os.makedirs(directory, exist_ok=True)
        mount = cls.within(test, directory, opens=True)
        return mount, os.open(os.path.join(directory, "file"), os.O_RDWR)

    def close(self):
        """Ends the mount: callers that hang there get an error."""
        if self.server.returncode is None:
            self.server.kill()
            self.server.wait()
            self.server.stdout.close()
            ctypes.CDLL(None).umount2(self.directory.encode(), DETACH)


def answer(fd, number, *parts):
    words = b"".join(parts)
    os.write(fd, struct.pack("<IiQ", 16 + len(words), 0, number) + words)


def main():
    directory, takes, opens = sys.argv[1], sys.argv[2] != "leaves", sys.argv[2] == "opens"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError as e:
        return print(f"/dev/fuse: {e.strerror}", flush=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"hung", directory.encode(), b"fuse", 0, options.encode()) != 0:
        return print(f"mount: {os.strerror(ctypes.get_errno())}", flush=True)
    while takes:
        request = os.read(fd, 1 << 20)
        _, what, number = struct.unpack_from("<IIQ", request)
        if what == INIT:
            answer(fd, number, struct.pack("<IIIIHHIIHH7I", 7, 31, 65536, 0, 12, 10, 65536, 1, 1, 0, *[0] * 7))
            print("mounted", flush=True)
        if what == LOOKUP and opens:
            attributes = struct.pack("<6Q10I", 2, 0, 0, 0, 0, 0, 0, 0, 0, 0o100666, 1, 0, 0, 0, 4096, 0)
            answer(fd, number, struct.pack("<4Q2I", 2, 1, 3600, 3600, 0, 0), attributes)
        if what == OPEN and opens:
            answer(fd, number, struct.pack("<QII", 1, 0, 0))
    print("mounted", flush=True)
    return signal.pause()


if __name__ == "__main__":
    main()
