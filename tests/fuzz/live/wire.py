"""A connection to ucmd that sends any bytes, and waits for nothing longer than it must."""

import array
import fcntl
import mmap
import os
import select
import socket
import struct
import time

import msgpack

WAIT_S = float(os.environ.get("FUZZ_WAIT_S", "120"))
HANDSHAKE = {"version_min": 1, "version_max": 5, "client": "fuzz"}


class Gone(Exception):
    """The daemon has ended the connection."""


class Hung(Exception):
    """The daemon does not answer."""


class Broken(Exception):
    """An answer is malformed."""


def memfd(size):
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)      # the daemon refuses holes
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class Wire:
    """answers: by msgid. news: notifications. Descriptors belong to the last frame of what came with them, as the kernel gives
    nothing after it in that call."""

    def __init__(self, path, uid):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.input, self.fds, self.msgid, self.answers, self.news = b"", [], 0, {}, []
        if uid is not None:
            os.setegid(uid)
            os.seteuid(uid)
        try:
            self.socket.connect(path)
        except OSError as error:
            self.socket.close()
            raise Gone(str(error)) from None
        finally:
            if uid is not None:
                os.seteuid(0)
                os.setegid(0)
        self.socket.settimeout(WAIT_S)

    def close(self):
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def send(self, data, fds=()):
        """Answers are read meanwhile, as the page asks for."""
        self.socket.setblocking(False)
        deadline = time.monotonic() + WAIT_S
        try:
            while data:
                readable, writable, _ = select.select([self.socket], [self.socket], [], 1)
                if readable:
                    self.read()
                if writable:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                    try:
                        data, fds = data[self.socket.sendmsg([data], rights):], ()
                    except BlockingIOError:
                        pass
                if time.monotonic() > deadline:
                    raise Hung("it reads nothing")
        except (ConnectionResetError, BrokenPipeError):
            raise Gone from None
        finally:
            if self.socket.fileno() >= 0:
                self.socket.settimeout(WAIT_S)

    def read(self):
        room = socket.CMSG_SPACE(64 * 4)
        # No further than the end of the frame that descriptors came with.
        most = self.missing() if self.fds else 1 << 20
        try:
            data, control, _, _ = self.socket.recvmsg(most, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except socket.timeout:
            raise Hung("it answers nothing") from None
        except (ConnectionResetError, BrokenPipeError):
            data, control = b"", []
        for _, _, numbers in control:
            got = array.array("i")
            got.frombytes(numbers[:len(numbers) - len(numbers) % 4])
            self.fds += got
        if not data:
            raise Gone
        self.input += data
        self.take()

    def missing(self):
        if len(self.input) < 4:
            return 4 - len(self.input)
        return 4 + int.from_bytes(self.input[:4], "big") - len(self.input)

    def take(self):
        while len(self.input) >= 4 and self.missing() <= 0:
            end = 4 + int.from_bytes(self.input[:4], "big")
            body, self.input = self.input[4:end], self.input[end:]
            try:
                message = msgpack.unpackb(body, raw=False, strict_map_key=False)
            except (ValueError, msgpack.UnpackException) as error:
                raise Broken(f"{error} in {body[:60]!r}") from None
            if message[0] == 1:
                fds = [] if self.input else self.fds
                self.answers[message[1]] = message[2], message[3], fds
                self.fds = self.fds if self.input else []
            else:
                self.news.append(message[1:])

    def begin(self, method, params, fds=()):
        self.msgid += 1
        body = msgpack.packb([0, self.msgid, method, params], use_bin_type=True)
        self.send(struct.pack(">I", len(body)) + body, fds)
        return self.msgid

    def wait(self, msgid):
        """(error, result, descriptors)"""
        while msgid not in self.answers:
            self.read()
        return self.answers.pop(msgid)


class Memory:
    """What the client shares with the daemon."""

    def __init__(self, size):
        self.fd = memfd(size)
        self.map = mmap.mmap(self.fd, size)

    def close(self):
        if not self.map.closed:
            self.map.close()
            os.close(self.fd)
