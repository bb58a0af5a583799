"""A FUSE file system that shows a folder, read-only, and holds back what is read behind HELD_FROM while a file exists.

    slow_mount.py FOLDER ORIGIN FLAG     says "mounted" when it is; its process is the server

O_DIRECT is refused, so that who reads does it through the page cache, straight into its own memory."""

import ctypes
import errno
import os
import struct
import sys
import threading
import time

HELD_FROM = 65536
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR = 1, 2, 3, 14, 15, 17, 18, 25, 26, 27, 28, 29
BATCH_FORGET = 42
ANSWER = struct.Struct("<IiQ")


class Server:
    def __init__(self, folder, origin, flag):
        self.flag, self.paths, self.ids = flag, {1: origin}, {origin: 1}
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(1, 9)  # ends with its parent
        self.fd = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        if libc.mount(b"slow", folder.encode(), b"fuse", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), "mount")

    def reply(self, unique, data=b"", error=0):
        try:
            os.write(self.fd, ANSWER.pack(ANSWER.size + len(data), -error, unique) + data)
        except OSError:
            pass  # who asked is gone

    def attributes(self, path):
        s = os.lstat(path)
        number = self.ids.setdefault(path, len(self.ids) + 1)
        self.paths[number] = path
        times = (int(s.st_atime), int(s.st_mtime), int(s.st_ctime))
        return number, struct.pack("<6Q10I", number, s.st_size, s.st_blocks, *times, 0, s.st_mtime_ns % 10**9, 0, s.st_mode, 1, s.st_uid,
                                   s.st_gid, 0, 4096, 0)

    def entry(self, path):
        number, attributes = self.attributes(path)
        return struct.pack("<4Q2I", number, 1, 1, 1, 0, 0) + attributes

    def listing(self, path):
        out = b""
        for i, name in enumerate(os.listdir(path)):
            entry = struct.pack("<QQII", self.attributes(os.path.join(path, name))[0], i + 1, len(name.encode()), 0) + name.encode()
            out += entry + bytes(-len(entry) % 8)
        return out

    def read(self, unique, path, at, size):
        while at >= HELD_FROM and os.path.exists(self.flag):
            time.sleep(0.01)
        with open(path, "rb") as file:
            file.seek(at)
            self.reply(unique, file.read(size))

    def serve(self, code, unique, path, body):
        if code == LOOKUP:
            self.reply(unique, self.entry(os.path.join(path, body.rstrip(b"\0").decode())))
        elif code == GETATTR:
            self.reply(unique, struct.pack("<QII", 1, 0, 0) + self.attributes(path)[1])
        elif code in (OPEN, OPENDIR):
            self.reply(unique, struct.pack("<QII", 1, 0, 0))
        elif code == READ:
            _, at, size, _, _, flags = struct.unpack_from("<QQIIQI", body)
            if flags & os.O_DIRECT:
                self.reply(unique, error=errno.EINVAL)
            else:
                threading.Thread(target=self.read, args=(unique, path, at, size), daemon=True).start()
        elif code == READDIR:
            self.reply(unique, self.listing(path) if struct.unpack_from("<QQ", body)[1] == 0 else b"")
        elif code == STATFS:
            self.reply(unique, struct.pack("<5Q4I6I", 1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 19, 4096, 255, 4096, 0, *[0] * 6))
        elif code == INIT:
            self.reply(unique, struct.pack("<IIIIHHIIHH7I", 7, 31, 1 << 17, 0, 12, 10, 1 << 20, 1, 256, 0, *[0] * 7))
            print("mounted", flush=True)
        elif code in (RELEASE, RELEASEDIR, FLUSH):
            self.reply(unique)
        elif code not in (FORGET, BATCH_FORGET):
            self.reply(unique, error=errno.EROFS if code in (8, 9, 35, 4, 10, 12, 16) else errno.ENOSYS)

    def run(self):
        while True:
            try:
                packet = os.read(self.fd, 1 << 21)
            except OSError:
                return
            _, code, unique, node = struct.unpack_from("<IIQQ", packet)
            try:
                self.serve(code, unique, self.paths.get(node, ""), packet[40:])
            except OSError as e:
                self.reply(unique, error=e.errno)


if __name__ == "__main__":
    Server(*sys.argv[1:4]).run()
