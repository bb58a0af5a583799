#!/usr/bin/python3 -IS
"""A backend that misbehaves: hostile_backend.py DIRECTORY [VERB:HOW]. It keeps files in DIRECTORY,
flat. It behaves, except when the verb (or `hello`) comes for the first time ever. DIRECTORY/done
says that it came."""

import mmap
import os
import socket
import struct
import sys
import threading
import time

sys.path.append("/usr/lib/python3/dist-packages")  # without -S the interpreter's start takes half as long again
import msgpack  # noqa: E402

directory = sys.argv[1]
verb, _, how = (sys.argv[2] if len(sys.argv) > 2 else "").partition(":")
sock = socket.socket(fileno=int(os.environ["UCM_BACKEND_FD"]))


def path(key):
    return os.path.join(directory, key.replace("/", "+"))


def send(*answers):
    sock.send(msgpack.packb(list(answers)))


def listing(prefix):
    start = prefix.replace("/", "+")
    return [[n[len(start):], os.stat(os.path.join(directory, n)).st_size, 1600000000000000000]
            for n in os.listdir(directory) if n.startswith(start)]


def answer(r, buffer):
    kind = r["verb"]
    if kind == "check":
        return {"id": r["id"], "status": "ok", **({"now": time.time_ns()} if r["sync"] else {})}
    if kind == "list":
        return {"id": r["id"], "status": "ok", "files": listing(r["prefix"])}
    if kind == "write":
        with open(path(r["key"]), "wb") as f:
            f.write(buffer[r["offset"]:r["offset"] + r["bytes"]])
        return {"id": r["id"], "status": "ok"}
    try:
        with open(path(r["key"]), "rb") as f:
            data = f.read()
    except FileNotFoundError:
        return {"id": r["id"], "status": "missing"}
    if kind == "remove":
        os.unlink(path(r["key"]))
    if kind == "read":
        buffer[r["offset"]:r["offset"] + r["bytes"]] = data.ljust(r["bytes"])[:r["bytes"]]
    return {"id": r["id"], "status": "ok", **({"bytes": len(data)} if kind in ("read", "find") else {})}


def scribble(buffer, r):
    end = time.monotonic() + 10  # a forked one outlives its test
    while time.monotonic() < end:
        buffer[r["offset"]:r["offset"] + r["bytes"]] = os.urandom(r["bytes"])
        time.sleep(0.001)


def endless(r):
    while True:
        send({"id": r["id"], "status": "more", "files": [[f"{'ab' * 16}-{'0' * 32}-00", 1, 1]] * 300})


def linger(good):
    """Sends a socket whose close() waits until its other side reads. A child keeps that side."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    left, leaves = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        sock.close()
        sender.close()
        os.write(leaves, b"x")
        time.sleep(60)  # the test ends it
        os._exit(0)
    os.read(left, 1)
    with open(os.path.join(directory, "holder"), "w") as f:
        f.write(str(pid))
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
    sender.setblocking(False)
    try:
        while True:
            sender.send(bytes(65536))
    except BlockingIOError:
        pass
    socket.send_fds(sock, [msgpack.packb([good])], [sender.fileno()])
    sender.close()


def misbehave(r, buffer):
    good = {} if r["verb"] == "hello" or how in ("die", "abort", "hang", "close", "fork") else answer(r, buffer)
    if how == "die":
        os._exit(3)
    elif how == "abort":
        os.abort()
    elif how == "hang":
        time.sleep(600)
    elif how == "close":
        sock.close()
        time.sleep(600)
    elif how == "twice":
        send(good, good)
    elif how == "stranger":
        send({**good, "id": good["id"] + 1025})
    elif how == "far":
        send({**good, "id": 2**64 - 1})
    elif how == "exists":
        send({"id": r["id"], "status": "exists"})
    elif how == "files":
        send({**good, "files": []})
    elif how == "no-bytes":
        send({"id": r["id"], "status": "ok"})
    elif how == "word":
        send({"id": r["id"], "status": "splendid"})
    elif how == "field":
        send({**good, "colour": "red"})
    elif how == "length":
        send({**good, "bytes": good["bytes"] + 1})
    elif how == "wrong":
        buffer[r["offset"] + 70] ^= 1
        send(good)
    elif how == "early":
        buffer[r["offset"]:r["offset"] + r["bytes"]] = bytes(r["bytes"])
        send(good)
    elif how == "scribble":
        threading.Thread(target=scribble, args=(buffer, r), daemon=True).start()
        send(good)
        return
    elif how == "garbage":
        sock.send(b"\xc1\xff" * 50)
    elif how == "empty":
        send()
    elif how == "deep":
        sock.send(b"\x91" * 5000)
    elif how == "huge":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sock.send(bytes(100000))
    elif how == "flood":
        while True:
            sock.send(b"\x91\x80")
    elif how == "endless":
        endless(r)
    elif how == "fds":
        socket.send_fds(sock, [msgpack.packb([good])], [0, 1, 2])
    elif how == "linger":
        linger(good)
    elif how == "fork":
        if os.fork() > 0:
            os._exit(0)
        os.setsid()
        scribble(buffer, r) if "offset" in r else time.sleep(10)
        os._exit(0)
    time.sleep(600)


def first_time(r):
    if r["verb"] != verb or os.path.exists(os.path.join(directory, "done")):
        return False
    open(os.path.join(directory, "done"), "w").close()
    return True


def main():
    packet, fds, _, _ = socket.recv_fds(sock, 65536, 1)
    hello = msgpack.unpackb(packet)[0]
    buffer = mmap.mmap(fds[0], hello["buffer"])
    r = {"verb": "hello", "id": 0}
    version = 1
    if first_time(r):
        if how != "version":
            misbehave(r, buffer)
        version = 2
    send({"hello": "hostile", "version": version, "depth": 1000, "abilities": ["touch", "list"]})
    while packet := sock.recv(65536):
        for r in msgpack.unpackb(packet):
            if first_time(r):
                misbehave(r, buffer)
            else:
                send(answer(r, buffer))


main()
