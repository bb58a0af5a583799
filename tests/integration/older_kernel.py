#!/usr/bin/env python3
"""older_kernel.py COMMAND...: runs it as on a kernel before 6.16, which has no SO_PASSRIGHTS."""

import ctypes
import os
import platform
import struct
import sys

SETSOCKOPT = {"x86_64": 54, "aarch64": 208}[platform.machine()]
SOL_SOCKET, SO_PASSRIGHTS, ENOPROTOOPT = 1, 83, 92
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


class Program(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def main():
    # Words of struct seccomp_data: the call's number, its second and its third argument.
    steps = [(LOAD, 0, 0, 0), (JUMP_EQUAL, 0, 5, SETSOCKOPT), (LOAD, 0, 0, 24), (JUMP_EQUAL, 0, 3, SOL_SOCKET),
             (LOAD, 0, 0, 32), (JUMP_EQUAL, 0, 1, SO_PASSRIGHTS), (RETURN, 0, 0, ERRNO | ENOPROTOOPT), (RETURN, 0, 0, ALLOW)]
    program = Program(len(steps), b"".join(struct.pack("<HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)):
        sys.exit(os.strerror(ctypes.get_errno()))
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
