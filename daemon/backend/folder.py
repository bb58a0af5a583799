#!/usr/bin/python3
"""A backend of ucmd's shared tier that keeps blocks in a folder: folder.py FOLDER [THREADS].

docs/backends.md has the protocol. An example to begin with: ucmd serves folders without it."""

import errno
import mmap
import os
import socket
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgpack

STATUS = {errno.ENOENT: "missing", errno.ENOTDIR: "other", errno.EISDIR: "other", errno.ELOOP: "other",
          errno.ENXIO: "other", errno.ENODEV: "absent", errno.ENOSPC: "full", errno.EDQUOT: "full",
          errno.EROFS: "read_only", errno.EACCES: "denied", errno.EPERM: "denied"}
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
root, threads = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8
sock = socket.socket(fileno=int(os.environ["UCM_BACKEND_FD"]))


@contextmanager
def folder(path, make=False):
    """A descriptor of root/path. No link below the root is followed; the root itself is never made."""
    try:
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError:
        raise OSError(errno.ENODEV, "the folder does not exist: is it mounted?") from None
    try:
        for name in path.split("/") if path else ():
            if make:
                try:
                    os.mkdir(name, 0o700, dir_fd=fd)
                except FileExistsError:
                    pass
            above, fd = fd, os.open(name, FOLDER, dir_fd=fd)
            os.close(above)
        yield fd
    finally:
        os.close(fd)


def file_stat(name, at):
    st = os.stat(name, dir_fd=at, follow_symlinks=False)
    if not stat.S_ISREG(st.st_mode):
        raise OSError(errno.EISDIR, "not a file")
    return st


def find(r, at, name):
    return {"status": "ok", "bytes": file_stat(name, at).st_size}


def read(r, at, name):
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at), "rb", 0) as f:
        st, n = os.fstat(f.fileno()), 0
        while n < r["bytes"] == st.st_size:
            n += f.readinto(r["span"][n:]) or r["bytes"] + 1
    return {"status": "ok" if n == r["bytes"] else "other", "bytes": r["bytes"], "mtime": st.st_mtime_ns}


def write(r, at, name):
    try:
        if file_stat(name, at).st_size == r["bytes"]:
            return {"status": "exists"}
    except OSError as e:
        if STATUS.get(e.errno) not in ("missing", "other"):
            raise
    temp = os.path.basename(r["temp"])
    try:
        with open(os.open(temp, NEW, 0o600, dir_fd=at), "wb", 0) as f:
            n = 0
            while n < r["bytes"]:
                n += f.write(r["span"][n:])
            if r["sync"]:
                os.fdatasync(f.fileno())
        os.rename(temp, name, src_dir_fd=at, dst_dir_fd=at)
    except OSError:
        os.unlink(temp, dir_fd=at)
        raise
    return {"status": "ok"}


def remove(r, at, name):
    os.unlink(name, dir_fd=at)
    return {"status": "ok"}


def touch(r, at, name):
    os.utime(name, dir_fd=at, follow_symlinks=False)
    return {"status": "ok"}


def listing(r, send):
    files = []
    try:
        with folder(r["prefix"].rstrip("/")) as at:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
            with os.scandir(fd) as entries:
                for e in entries:
                    if not e.is_file(follow_symlinks=False) or len(e.name) > 128 or not e.name.isascii():
                        continue
                    try:
                        st = e.stat(follow_symlinks=False)
                        files.append([e.name, st.st_size, st.st_mtime_ns])
                    except FileNotFoundError:
                        continue
                    if len(files) == 300:
                        send({"id": r["id"], "status": "more", "files": files})
                        files = []
            os.close(fd)
    except OSError as e:
        if STATUS.get(e.errno) not in ("missing", "other"):
            raise
    return {"status": "ok", "files": files}


def check(r):
    with folder("") as at:
        os.stat(at)
    if not r["sync"]:
        return {"status": "ok"}
    path, name = os.path.split(r["temp"])
    with folder(path, make=True) as at:
        with open(os.open(name, NEW, 0o600, dir_fd=at), "wb", 0) as f:
            try:
                os.utime(f.fileno())
                now = os.fstat(f.fileno()).st_mtime_ns
            finally:
                os.unlink(name, dir_fd=at)
    return {"status": "ok", "now": now}


def send(answer):
    sock.send(msgpack.packb([answer]))  # one packet; any thread


def run(r, buffer):
    try:
        if time.monotonic() > r["until"]:
            answer = {"status": "timeout"}
        elif r["verb"] == "check":
            answer = check(r)
        elif r["verb"] == "list":
            answer = listing(r, send)
        else:
            if "offset" in r:
                r["span"] = buffer[r["offset"] : r["offset"] + r["bytes"]]
            path, name = os.path.split(r["key"])
            verbs = {"find": find, "read": read, "write": write, "remove": remove, "touch": touch}
            with folder(path, make=r["verb"] == "write") as at:
                answer = verbs[r["verb"]](r, at, name)
    except OSError as e:
        answer = {"status": STATUS.get(e.errno, "failed"), "reason": f"{root}: {e.strerror}"[:120]}
        if answer["status"] == "missing" and r["verb"] in ("write", "check"):
            answer["status"] = "failed"  # its folder was removed meanwhile: no answer about a file
    send({"id": r["id"], **answer})


def main():
    packet, fds, _, _ = socket.recv_fds(sock, 65536, 1)
    hello = msgpack.unpackb(packet)[0]
    buffer = memoryview(mmap.mmap(fds[0], hello["buffer"]))
    os.close(fds[0])
    send({"hello": "folder", "version": 1, "depth": hello["depth"], "abilities": ["touch", "list"]})
    with ThreadPoolExecutor(threads) as pool:
        while packet := sock.recv(65536):
            for r in msgpack.unpackb(packet):
                r["until"] = time.monotonic() + r["ms"] / 1000
                pool.submit(run, r, buffer)


main()
