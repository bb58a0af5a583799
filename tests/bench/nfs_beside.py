#!/usr/bin/python3
"""An NFS server for one command: nfs_beside.py COMMAND [WORD...], where URL in a word becomes its export.

nfs-ganesha runs in a network namespace of its own, with a pair of virtual cables to the command's; its export lies in $UCM_TEST_DISK. Needs root."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../integration"))

import hosts  # noqa: E402


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # of a time limit: what was made goes
    if hosts.why_not():
        sys.exit(hosts.why_not())
    folder, network, server = tempfile.mkdtemp(prefix="nfs-beside.", dir=os.environ.get("UCM_TEST_DISK")), hosts.Network(1), None
    os.chmod(folder, 0o755)
    try:
        server = hosts.Server(network, folder)
        words = [word.replace("URL", server.url()) for word in sys.argv[1:]]
        return subprocess.run(network.inside(1) + words, check=False).returncode
    finally:
        if server:
            server.close()
        network.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
