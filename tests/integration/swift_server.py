#!/usr/bin/python3
"""OpenStack Swift with its S3 API on loopback: swift_server.py DIRECTORY [PORT]. All of its servers run in this one process, over one directory
that holds one copy of each object. Prints its port when it serves, and ends with its standard input.

A file DIRECTORY/away-BUCKET makes that bucket look as if nobody had made it."""

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
devices = {directory}/devices
mount_check = false
swift_dir = {directory}
bind_ip = 127.0.0.1
bind_port = {port}
log_address = {directory}/none
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
swift_dir = {directory}
bind_ip = 127.0.0.1
bind_port = {port}
log_address = {directory}/none
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
directory = {directory}
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
directory = {directory}
"""


class Cache:
    """Swift asks memcached for accounts and containers. Without it, each request looks them up by
    two requests of its own."""

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


def is_away(directory, bucket):
    return os.path.exists(os.path.join(directory, "away-" + bucket))


def cache_factory(_, directory, **__):
    cache = Cache()

    def made(app):
        def call(env, start):
            bucket = env["PATH_INFO"].split("/")[1]
            env["swift.cache"] = Cache() if is_away(directory, bucket) else cache
            return app(env, start)
        return call
    return made


def away_factory(_, directory, **__):
    def made(app):
        def call(env, start):
            words = env["PATH_INFO"].split("/")
            if len(words) > 3 and is_away(directory, words[3]):
                words[3] = "gone"
                env["PATH_INFO"] = "/".join(words)
            return app(env, start)
        return call
    return made


def write(directory, name, text):
    with open(os.path.join(directory, name), "w") as f:
        f.write(text)


def lay(directory, ports):
    os.makedirs(os.path.join(directory, "devices", "d"), exist_ok=True)
    write(directory, "swift.conf", "[swift-hash]\nswift_hash_path_suffix = test\nswift_hash_path_prefix = test\n"
                                "[storage-policy:0]\nname = only\ndefault = yes\n")
    for name in SERVERS:
        ring = RingBuilder(6, 1, 1)
        ring.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": ports[name], "device": "d", "weight": 1})
        ring.rebalance()
        ring.get_ring().save(os.path.join(directory, name + ".ring.gz"))
        write(directory, name + ".conf", BACK.format(directory=directory, name=name, port=ports[name]))
    write(directory, "proxy.conf", FRONT.format(directory=directory, port=ports["proxy"]))


def main():
    directory, said = os.path.realpath(sys.argv[1]), os.dup(1)
    os.dup2(2, 1)  # libraries print, too
    sys.modules["swift_server"] = sys.modules["__main__"]
    sockets = {name: eventlet.listen(("127.0.0.1", 0), backlog=4096, reuse_port=False) for name in SERVERS}
    sockets["proxy"] = eventlet.listen(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 0), backlog=4096, reuse_port=False)
    lay(directory, {name: s.getsockname()[1] for name, s in sockets.items()})
    utils.SWIFT_CONF_FILE = os.path.join(directory, "swift.conf")
    utils.validate_configuration()
    for name, s in sockets.items():
        app = wsgi.loadapp(os.path.join(directory, name + ".conf"), global_conf={"log_name": name})
        eventlet.spawn(eventlet.wsgi.server, s, app, log_output=False, max_size=1024, debug=False)
    os.write(said, b"%d\n" % sockets["proxy"].getsockname()[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_blocking(0, True)
    eventlet.tpool.execute(sys.stdin.buffer.read)
    os._exit(0)


if __name__ == "__main__":
    main()
