#!/usr/bin/python3
"""OpenStack Swift with its S3 API on loopback: swift_server.py FOLDER [PORT]. All of its servers run in this one process, over one folder
that holds one copy of each object. Prints its port when it serves, and ends with its standard input.

A file FOLDER/away-BUCKET makes that bucket look as if nobody had made it."""

import json
import os
import signal
import sys

import eventlet

eventlet.patcher.monkey_patch(all=False, socket=True, select=True, thread=True, time=True)
import eventlet.wsgi  # noqa: E402
from swift.common import utils, wsgi  # noqa: E402
from swift.common.ring import RingBuilder  # noqa: E402

SERVERS = ("account", "container", "object")
BACK = """[DEFAULT]
devices = {folder}/devices
mount_check = false
swift_dir = {folder}
bind_ip = 127.0.0.1
bind_port = {port}
log_address = {folder}/none
log_level = CRITICAL
disk_chunk_size = 262144
network_chunk_size = 262144
fallocate_reserve = 0
disable_fallocate = true
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""
FRONT = """[DEFAULT]
swift_dir = {folder}
bind_ip = 127.0.0.1
bind_port = {port}
log_address = {folder}/none
log_level = CRITICAL
client_chunk_size = 262144
object_chunk_size = 262144
[pipeline:main]
pipeline = catch_errors cache listing_formats s3api tempauth copy away proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
paste.filter_factory = swift_server:cache_factory
folder = {folder}
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
auth_pipeline_check = false
allow_multipart_uploads = false
storage_domain = localhost
max_bucket_listing = 20
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
user_test_tester3 = testing3 .admin
[filter:copy]
use = egg:swift#copy
[filter:away]
paste.filter_factory = swift_server:away_factory
folder = {folder}
"""


class Cache:
    """Swift asks memcached for accounts and containers; without it each request looks them up, by two requests of its own."""

    def __init__(self):
        self.texts = {}

    def get(self, key, *_, **__):
        text = self.texts.get(key)
        return text and json.loads(text)

    def set(self, key, value, *_, **__):
        self.texts[key] = json.dumps(value)

    def delete(self, key, *_, **__):
        self.texts.pop(key, None)

    def incr(self, *_, **__):
        return None

    decr = incr


def is_away(folder, bucket):
    return os.path.exists(os.path.join(folder, "away-" + bucket))


def cache_factory(_, folder, **__):
    cache = Cache()

    def made(app):
        def call(env, start):
            bucket = env["PATH_INFO"].split("/")[1]
            env["swift.cache"] = Cache() if is_away(folder, bucket) else cache
            return app(env, start)
        return call
    return made


def away_factory(_, folder, **__):
    def made(app):
        def call(env, start):
            words = env["PATH_INFO"].split("/")
            if len(words) > 3 and is_away(folder, words[3]):
                words[3] = "gone"
                env["PATH_INFO"] = "/".join(words)
            return app(env, start)
        return call
    return made


def write(folder, name, text):
    with open(os.path.join(folder, name), "w") as f:
        f.write(text)


def lay(folder, ports):
    os.makedirs(os.path.join(folder, "devices", "d"), exist_ok=True)
    write(folder, "swift.conf", "[swift-hash]\nswift_hash_path_suffix = test\nswift_hash_path_prefix = test\n"
                                "[storage-policy:0]\nname = only\ndefault = yes\n")
    for name in SERVERS:
        ring = RingBuilder(6, 1, 1)
        ring.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": ports[name], "device": "d", "weight": 1})
        ring.rebalance()
        ring.get_ring().save(os.path.join(folder, name + ".ring.gz"))
        write(folder, name + ".conf", BACK.format(folder=folder, name=name, port=ports[name]))
    write(folder, "proxy.conf", FRONT.format(folder=folder, port=ports["proxy"]))


def main():
    folder, said = os.path.realpath(sys.argv[1]), os.dup(1)
    os.dup2(2, 1)  # libraries print, too
    sys.modules["swift_server"] = sys.modules["__main__"]
    sockets = {name: eventlet.listen(("127.0.0.1", 0), backlog=4096, reuse_port=False) for name in SERVERS}
    sockets["proxy"] = eventlet.listen(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 0), backlog=4096, reuse_port=False)
    lay(folder, {name: s.getsockname()[1] for name, s in sockets.items()})
    utils.SWIFT_CONF_FILE = os.path.join(folder, "swift.conf")
    utils.validate_configuration()
    for name, s in sockets.items():
        app = wsgi.loadapp(os.path.join(folder, name + ".conf"), global_conf={"log_name": name})
        eventlet.spawn(eventlet.wsgi.server, s, app, log_output=False, max_size=1024, debug=False)
    os.write(said, b"%d\n" % sockets["proxy"].getsockname()[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_blocking(0, True)
    eventlet.tpool.execute(sys.stdin.buffer.read)
    os._exit(0)


if __name__ == "__main__":
    main()
