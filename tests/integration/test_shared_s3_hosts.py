#!/usr/bin/python3
"""Roots that are buckets, through real daemons and OpenStack Swift. Hosts find each other's blocks.
A harmful server or network costs hits, and never brings a wrong byte. Credentials change while they
are in use."""

import faulthandler
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import unittest

from second_client import DEMO, TIMEOUT_S, TOP, Case, OwnDaemons
from s3_proxy import Proxy
from shared_case import SMALL, Host
from swift_case import Swift, key_write

BLOCKS = 4
swift = {}


def setUpModule():
    try:
        swift["server"] = Swift()
    except RuntimeError as e:
        raise unittest.SkipTest(str(e)) from None
    swift["port"] = swift["server"].port


def tearDownModule():
    swift["server"].close()


class Buckets(OwnDaemons, Case):
    def setUp(self):
        super().setUp()
        self.secret = tempfile.mkdtemp(prefix="keys.")
        self.addCleanup(shutil.rmtree, self.secret, True)
        os.chmod(self.secret, 0o755)  # where a user ucmd-backend is
        self.credentials("test:tester", "testing")
        self.proxy = self.made(Proxy(swift["port"]))
        self.proxy.objects = {}  # Swift takes a processor ten times as long
        self.bucket = "kv-%x" % time.time_ns()
        self.assertEqual(swift["server"].bucket(self.bucket), 200)
        self.identity = dict(DEMO, model=self.id(), parts=1, layers=DEMO["layers"][:1])

    def made(self, proxy):
        self.addCleanup(proxy.close)
        return proxy

    def credentials(self, key, secret):
        key_write(self.secret, key, secret)

    def host(self, port=None, query="", words="", scheme="http", name="127.0.0.1", **options):
        root = f"s3://{self.bucket}/a/b?endpoint={scheme}://{name}:{port or self.proxy.port}" \
               f"{query or f'&credentials={self.secret}/credentials'} read={self.secret} buffer=4MiB {words}"
        host = Host(root.strip(), self.identity, 16, **{**SMALL, **options})
        self.addCleanup(lambda: self.assertEqual(host.daemon.stop(), 0))
        self.addCleanup(lambda: self.assertNotIn("testing", host.daemon.log()))
        return host

    def written(self, host, first=0):
        return host.written(range(first, first + BLOCKS))

    def test_another_host_reads_what_one_wrote(self):
        right = self.written(self.host(swift["port"]))
        other = self.host(swift["port"], query=f"&credentials={self.secret}/credentials&style=virtual", name="localhost")
        self.assertEqual(other.loaded(right), BLOCKS)
        root = other.root()
        self.assertEqual((root["backend"], root["program"], root["health"], root["backend_ends"]), ("s3", "s3", "up", 0))
        shown = other.daemon.ctl("shared").stdout
        self.assertIn(f"s3://{self.bucket}/a/b", shown)
        self.assertNotIn("testing", shown)

    def test_requests_are_as_many_as_the_study_of_fleets_takes(self):
        text = pathlib.Path(TOP, "tests/reference/shared_costs.h").read_text(encoding="ascii")
        cost = {name: int(n) for name, n in re.findall(r"COST_S3_(\w+) (\d+)", text)}

        def asked(*what):
            seen, self.proxy.asked = sorted(self.proxy.asked), []
            self.assertEqual(seen, sorted(what))

        hosts = [self.host(), self.host()]
        right = self.written(hosts[0])
        asked(*["PUT"] * cost["WRITE"] * BLOCKS)
        hosts[1].look(*right, 100, 101, 102, per_key=True)
        asked(*["HEAD"] * cost["FIND"] * (BLOCKS + 3))
        self.assertEqual(hosts[1].loaded(right), BLOCKS)
        asked(*["GET"] * cost["READ"] * BLOCKS)
        self.written(self.host())
        asked(*["PUT"] * cost["AGAIN_PUT"] * BLOCKS, *["HEAD"] * cost["AGAIN_HEAD"] * BLOCKS)

    def certificate(self):
        """A file with a key, and one with the certificates that clients trust."""
        made, trusted = os.path.join(self.directory, "server.pem"), os.path.join(self.secret, "ca.pem")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj",
                        "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", made, "-out", trusted],
                       check=True, capture_output=True, timeout=TIMEOUT_S)
        with open(made, "a", encoding="ascii") as f, open(trusted, encoding="ascii") as of:
            f.write(of.read())
        return made, trusted

    @unittest.skipIf(not shutil.which("openssl"), "no openssl")
    def test_certificates_are_verified(self):
        made, trusted = self.certificate()
        port = self.made(Proxy(swift["port"], made)).port
        query = f"&credentials={self.secret}/credentials"
        right = self.written(self.host(port, scheme="https", query=f"{query}&ca={trusted}&payload=signed"))
        self.assertEqual(self.host(port, scheme="https", query=f"{query}&ca={trusted}").loaded(right), BLOCKS)
        doubting = self.host(port, scheme="https", query=query)
        # A busy host's first checks may time out. The next is half a minute later at most.
        self.until(lambda: (root := doubting.root())["health"] == "down" and "certificate" in root["reason"], "its doubt", 3 * TIMEOUT_S)
        self.assertEqual(doubting.loaded(right), 0)

    def test_what_passes_is_tried_again(self):
        kinds = "503", "drop", "cut", "slow"
        writer, host = self.host(), self.host()
        right = {kind: self.written(writer, first=BLOCKS * i) for i, kind in enumerate(kinds)}
        for kind in kinds:
            with self.subTest(kind):
                self.proxy.harm(kind, ("GET",), BLOCKS)
                self.assertEqual(host.loaded(right[kind]), BLOCKS)
                self.assertGreater(self.proxy.done, 0)
                self.assertEqual((host.root()["health"], host.root()["failures"]), ("up", 0))
        self.assertIn("GET is tried again in ", host.daemon.log())
        for i, kind in enumerate(kinds[:2]):
            with self.subTest(kind, what="writes"):
                self.proxy.harm(kind, ("PUT",), 2)
                more = self.written(writer, first=100 + BLOCKS * i)
                self.assertEqual(self.proxy.done, 2)
                self.assertEqual(host.loaded(more), BLOCKS)

    def test_wrong_answers_are_misses(self):
        writer, host = self.host(), self.host()
        for i, kind in enumerate(("wrong bytes", "wrong length")):
            with self.subTest(kind):
                right = self.written(writer, first=BLOCKS * i)
                self.proxy.harm(kind, ("GET",), 2)
                self.assertEqual(host.loaded(right), BLOCKS - 2)
                self.assertEqual(host.root()["health"], "up")

    def test_a_server_that_fails_for_long(self):
        right = self.written(self.host())
        host = self.host(**{"shared.timeout": "2s", "shared.lookup_timeout": "2s"})
        self.until(lambda: host.root()["health"] == "up")
        self.proxy.harm("503", ("GET",), 1 << 30)
        self.assertEqual(host.loaded(right), 0)
        root = host.root()
        self.assertGreater(root["failures"] + root["timeouts"], 0)
        self.assertIn("503: SlowDown", host.daemon.log())
        self.proxy.harm(None)
        self.until(lambda: host.loaded(right) == BLOCKS, "its recovery")

    def test_keys_that_expire_are_fetched_again(self):
        right = self.written(self.host())
        host = self.host()
        self.until(lambda: host.root()["health"] == "up")
        self.credentials("test:tester3", "testing3")
        self.proxy.expired = {"test:tester"}
        self.until(lambda: host.root()["failures"] > 0 or host.loaded(right) == BLOCKS, "the new key")
        self.assertEqual(host.root()["failures"], 0, "a lookup's answer has no word of why")
        self.assertIn("test:tester3", self.proxy.keys)

    def test_no_keys(self):
        os.unlink(os.path.join(self.secret, "credentials"))
        host = self.host()
        self.until(lambda: host.root()["health"] == "down")
        self.assertIn("No such file", host.root()["reason"])
        self.credentials("test:tester", "testing")
        self.until(lambda: host.root()["health"] == "up", "its key")
        self.assertEqual(self.host().loaded(self.written(host)), BLOCKS)

    def test_a_command_brings_keys_again_and_again(self):
        command = os.path.join(self.secret, "keys.sh")
        with open(command, "w", encoding="ascii") as f:
            f.write("#!/bin/sh\nu=tester\n[ ! -e \"$0.other\" ] || u=tester3\n"
                    "printf '{\"Version\": 1, \"AccessKeyId\": \"test:%s\", \"SecretAccessKey\": \"testing%s\", \"Expiration\": \"%s\"}' "
                    "$u \"${u#tester}\" \"$(date -u -d '+4 seconds' +%Y-%m-%dT%H:%M:%SZ)\"\n")
        os.chmod(command, 0o755)
        host = self.host(query=f"&command={command}")
        right = self.written(host)
        self.assertEqual(self.proxy.keys, {"test:tester"})
        with open(command + ".other", "w", encoding="ascii"):
            pass

        def other():
            host.look(time.time_ns() % 10**9, per_key=True)
            return "test:tester3" in self.proxy.keys
        self.until(other, "the next key")
        self.assertEqual(self.host(query=f"&command={command}").loaded(right), BLOCKS)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(280, exit=True)
    unittest.main()
