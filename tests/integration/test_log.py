#!/usr/bin/python3
"""The daemon's log where nobody reads it, and where a tenant writes much of it."""

import array
import fcntl
import os
import re
import termios
import threading
import time
import unittest

from second_client import DEMO, OK, OTHER_UID, TIMEOUT_S, Case, Daemon, OwnDaemons, Region, keys

LONG = dict(DEMO, model="m" * 250)
MANY = 6000  # lines of operators: more than the pipe and the daemon's ring of 1 MiB take


def values(line):
    return dict(re.findall(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|\S*)', line))


class Stopped(OwnDaemons, Case):
    """Standard error is a pipe, which is read only when a test says so."""

    def setUp(self):
        self.pipe, end = os.pipe()
        self.addCleanup(os.close, self.pipe)
        self.text, self.reader = b"", None
        try:
            self.daemon = Daemon(nvme=False, stderr=end)
        finally:
            os.close(end)
        self.addCleanup(self.daemon.stop)
        fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, 4096)

    def waiting(self):
        n = array.array("i", [0])
        fcntl.ioctl(self.pipe, termios.FIONREAD, n)
        return n[0]

    def read(self):
        def take():
            while piece := os.read(self.pipe, 65536):
                self.text += piece
        self.reader = threading.Thread(target=take)
        self.reader.start()

    def fills_the_pipe(self):
        """The lines are of a tenant's calls, if this user may call as another one."""
        tenant = self.client(uid=OTHER_UID if os.geteuid() == 0 else None)
        ns = tenant.open(LONG)
        region = Region(tenant, ns, LONG, 1)
        for _ in range(40):
            self.assertEqual(region.dump("a", [0]), [OK])
            tenant.call("evict", ns=ns, keys=keys("a"))
        self.until(lambda: self.waiting() > 3000, "a full pipe")

    def test_a_reader_that_stops_stops_nobody(self):
        self.fills_the_pipe()
        client = self.client()
        ns = client.open(LONG)
        region = Region(client, ns, LONG, 2)
        self.assertEqual((region.dump("b", [0]), region.load("b", [1])), ([OK], [OK]))
        for _ in range(MANY):
            client.call("evict", ns=ns, keys=keys("none"))
        self.read()
        self.until(lambda: b" log lost " in self.text, "the number of lines that were lost")
        client.call("pin", ns=ns, keys=keys("b"))
        self.until(lambda: b" audit pin " in self.text, "the next line")
        self.assertEqual(self.daemon.stop(), 0)
        self.reader.join(TIMEOUT_S)
        lines = self.text.decode().splitlines()
        lost = [int(values(line)["lines"]) for line in lines if " warn log lost " in line]
        there = sum(" audit evict " in line and " keys=1 blocks=0 " in line for line in lines)
        self.assertEqual(len(lost), 1, lost)
        self.assertLess(there, MANY)
        self.assertGreaterEqual(there + lost[0], MANY)
        self.assertIn(" server stopping ", lines[-1])

    def test_the_daemon_ends(self):
        self.fills_the_pipe()
        self.assertEqual(self.daemon.stop(), 0)


@unittest.skipUnless(os.geteuid() == 0, "takes another uid")
class Flood(Case):
    options = {"nvme": False}

    def test_a_tenant_fills_no_log(self):
        tenant, operator, calls = self.client(uid=OTHER_UID), self.client(), 1500
        ns, own = tenant.open(DEMO), operator.open(DEMO)
        region = Region(tenant, ns, DEMO, 1)
        begun = time.monotonic()
        for n in range(calls):
            region.dump("a", [0])
            tenant.call("evict", ns=ns, keys=keys("a"))
            if n == calls // 2:
                operator.call("evict", ns=own, keys=keys("none"))
        took_s = time.monotonic() - begun

        def lines(event, tenant):
            return [values(line) for line in self.daemon.log().splitlines()
                    if f" info audit {event} " in line and values(line)["tenant"] == tenant]

        def counted(name):
            return sum(int(line[name]) for line in lines("held", f"uid:{OTHER_UID}"))
        mine = len(lines("evict", f"uid:{OTHER_UID}"))
        self.assertLessEqual(mine, 101 + 10 * took_s)
        self.until(lambda: mine + counted("calls") == calls, "each call, alone or in sum")
        self.assertEqual(mine + counted("blocks"), calls)
        self.assertEqual(len(lines("evict", operator.limits["tenant"])), 1)

    def test_of_many_tenants(self):
        """More tenants than have places of their own. Each call is counted all the same."""
        seen = len(self.daemon.log())
        tenants = [self.client(uid=OTHER_UID + n) for n in range(1, 25)]
        spaces = [tenant.open(DEMO) for tenant in tenants]
        begun = time.monotonic()
        for tenant, ns in zip(tenants, spaces):
            for _ in range(120):
                tenant.call("namespace.purge", ns=ns)
                tenant.call("evict", ns=ns, keys=keys("a"))

        took_s = time.monotonic() - begun

        def counted():
            lines = [line for line in self.daemon.log()[seen:].splitlines() if " info audit " in line]
            return sum(int(values(line)["calls"]) if " held " in line else 1 for line in lines)
        self.until(lambda: counted() == 24 * 240, "each call, alone or in sum")
        alone = [line for line in self.daemon.log()[seen:].splitlines() if " info audit " in line and " held " not in line]
        self.assertLessEqual(len(alone), 17 * (101 + 10 * took_s))


if __name__ == "__main__":
    unittest.main()
