"""OpenStack Swift for tests: a process, buckets, and the file of its user's key. RuntimeError: this machine lacks what it needs."""

import hashlib
import hmac
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from daemon import TIMEOUT_S, TOP, halt

SERVER = os.path.join(TOP, "tests/integration/swift_server.py")


class Swift:
    """Its objects outlive it: start() after kill() serves them at the same port. before: words
    before its command, which enter another network."""

    def __init__(self, before=()):
        self.before = before
        disk = os.environ.get("UCM_TEST_DISK", "/tmp")
        self.directory, self.port, self.process = tempfile.mkdtemp(prefix="ucm-swift-", dir=disk), 0, None
        self.objects = os.path.join(self.directory, "devices", "d", "objects")
        try:
            os.setxattr(self.directory, "user.swift", b"x")
            self.start()
        except OSError as e:
            self.close()
            raise RuntimeError(f"Swift needs extended attributes in {disk}: {e}") from None
        except BaseException:
            self.close()
            raise

    def start(self):
        self.process = subprocess.Popen([*self.before, "/usr/bin/python3", "-B", SERVER, self.directory, str(self.port)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("Swift does not start: is python3-swift installed?")
        self.port = int(line)

    def ended(self):
        self.process.stdin.close()
        self.process.wait(TIMEOUT_S)
        self.process.stdout.close()
        self.process = None

    def kill(self):
        self.process.kill()
        self.ended()

    def halt(self):
        halt(self.process.pid)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def close(self):
        if self.process:
            self.ended()
        shutil.rmtree(self.directory, ignore_errors=True)

    def bucket(self, name):
        """Makes a bucket. Returns what the server answered, 200."""
        if not self.before:
            return signed(self.port, "PUT", f"/{name}")
        argv = [*self.before, "/usr/bin/python3", "-B", os.path.abspath(__file__), str(self.port), name]
        return int(subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True).stdout)


def key_write(directory, key="test:tester", secret="testing"):
    """Replaces the file, as a tool that rotates keys does it. Returns the file's path."""
    path = os.path.join(directory, "credentials")
    with open(path + ".new", "w", encoding="ascii") as f:
        f.write(f"# of a test\n[other]\naws_access_key_id = none\n[default]\naws_access_key_id={key}\naws_secret_access_key = {secret}\n")
    os.rename(path + ".new", path)
    return path


def signed(port, method, path):
    """Sends a request without a body, which this signs by itself (AWS's Signature Version 4).
    Returns the status."""
    host, payload = f"127.0.0.1:{port}", "UNSIGNED-PAYLOAD"
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope, names = f"{now[:8]}/us-east-1/s3/aws4_request", "host;x-amz-content-sha256;x-amz-date"
    asked = f"{method}\n{path}\n\nhost:{host}\nx-amz-content-sha256:{payload}\nx-amz-date:{now}\n\n{names}\n{payload}"
    key = b"AWS4testing"
    for word in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(asked.encode()).hexdigest()}"):
        key = hmac.digest(key, word.encode(), "sha256")
    server = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
    server.request(method, path, headers={
        "x-amz-content-sha256": payload, "x-amz-date": now,
        "Authorization": f"AWS4-HMAC-SHA256 Credential=test:tester/{scope}, SignedHeaders={names}, Signature={key.hex()}"})
    try:
        with server.getresponse() as answer:
            return answer.status
    finally:
        server.close()


if __name__ == "__main__":
    print(signed(int(sys.argv[1]), "PUT", f"/{sys.argv[2]}"))
