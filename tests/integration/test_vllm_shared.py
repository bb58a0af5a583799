#!/usr/bin/python3
"""The vLLM connector while the shared tier is slow, in the small engines of tests/engines/vllm.
Blocks of another host lie on a root. The test stops the root's process, and lets it go on. So the
root is as slow as the test wants, on any machine."""

import os
import shutil
import signal
import tempfile
import time
import unittest
from types import SimpleNamespace

from vllm_case import GPU, Case, Request, daemon, prompt, watch  # sets the paths
from daemon import halt
import test_vllm_hybrid

from hybrid_engine import ALL_KINDS
from ucmclient import WaitMode, PrefixHits
from ucmclient.engine.vllm import shared_wait
from ucmclient.engine.vllm.settings import Settings
from ucmclient.engine.vllm.shared_wait import SharedWait

LONG = 120.0


class Slow:
    """self.daemon is that of a host that has stored nothing. TOKENS lie on the shared tier, where
    another host has stored them."""

    KINDS = ()
    directory = None

    @classmethod
    def tearDownClass(cls):
        if cls.directory:
            shutil.rmtree(cls.directory)
        super().tearDownClass()

    def store(self):
        self.daemon = daemon(nvme=False, **{"shared.roots": self.directory})
        try:
            self.check(self.engine(*self.KINDS), Request("cold", self.TOKENS))
            self.eventually(lambda: self.stats()["shared_writes"] == self.stats()["dump_blocks"])
        finally:
            self.stop()

    def setUp(self):
        if self.directory is None:
            type(self).directory = tempfile.mkdtemp(prefix="ucm-shared-")
            self.store()
        self.daemon = daemon(nvme=False, **{"shared.roots": self.directory, "shared.timeout": "60s",
                                            "shared.lookup_timeout": "10s", "shared.negative": "0ms"})
        self.addCleanup(self.stop)
        self.eventually(lambda: self.root()["health"] == "up" and self.root()["pid"])

    def root(self):
        return self.all_stats()["shared_roots"][0]

    def hold(self):
        pid = self.root()["pid"]
        halt(pid)
        self.addCleanup(self.let_go, pid)
        return pid

    @staticmethod
    def let_go(pid):
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass  # the daemon has ended, and it with it


@unittest.skipIf(GPU, "of lookups the host's memory says enough")
class SlowShared(Slow, Case):
    TOKENS = prompt(900, 150)

    def test_others_go_on_while_a_request_waits_and_it_loads_then(self):
        e, other, waits = self.engine(shared_wait=LONG), Request("other", prompt(901, 5), outputs=30), Request("waits", self.TOKENS)
        e.add(other)  # it fills no block before the shared tier is held
        e.step()
        pid = self.hold()
        e.add(waits)
        while "other" in e.requests:
            e.step()
            self.assertEqual((waits.status, waits.num_computed_tokens), ("waiting", 0))
        before = self.stats()
        self.assertGreater(before["lookups_pending"], 0)
        self.assertEqual(before["lookups_waited"], 0)
        self.let_go(pid)
        self.same({"other": other})
        self.check(e)
        self.assertEqual(e.loaded_tokens, 144)
        self.assertEqual(self.stats()["lookups_waited"], 0, "no step waits for the shared tier")

    def test_it_waits_so_long_and_no_longer(self):
        e = self.engine(shared_wait=0.05)
        self.hold()
        self.check(e, Request("waits", self.TOKENS))
        self.assertEqual(e.loaded_tokens, 0)
        self.assertEqual(self.stats()["lookups_waited"], 0)
        self.check(e, Request("again", self.TOKENS))
        self.assertTrue(self.loads(self.engine(), self.TOKENS), "it was stored")

    def test_what_is_here_is_loaded_when_the_wait_ends(self):
        """This host has a prompt's beginning, and asks the shared tier for its end."""
        self.check(self.engine(shared_wait=LONG), Request("cold", prompt(902, 64)))
        e = self.engine(shared_wait=0.05)
        self.hold()
        self.check(e, Request("waits", prompt(902, 64) + prompt(903, 64)))
        self.assertEqual(e.loaded_tokens, 64)

    def test_an_abort_while_it_waits(self):
        e = self.engine(shared_wait=LONG)
        pid = self.hold()
        e.add(Request("gone", self.TOKENS))
        for _ in range(3):
            e.step()
        e.abort("gone")
        self.let_go(pid)
        self.check(e, Request("stays", self.TOKENS))
        self.assertEqual(e.loaded_tokens, 144)

    def test_two_requests_with_one_prompt_and_one_that_lies_nowhere(self):
        e = self.engine(shared_wait=LONG)
        pid = self.hold()
        requests = [Request("a", self.TOKENS), Request("b", self.TOKENS), Request("c", prompt(904, 100))]
        for request in requests:
            e.add(request)
        for _ in range(20):
            e.step()
        self.assertEqual([r.status for r in requests], ["waiting"] * 3)
        self.assertLessEqual(self.stats()["shared_probes"], 2, "of each prompt it is asked once")
        self.let_go(pid)
        self.check(e)
        self.assertGreaterEqual(e.loaded_tokens, 144)

    def test_without_it_a_lookup_waits(self):
        self.check(self.engine(shared_wait=0.0, lookup_timeout=20.0), Request("waits", self.TOKENS))
        after = self.stats()
        self.assertEqual(after["lookups_pending"], 0)
        self.assertGreater(after["lookups_waited"], 0)


@unittest.skipIf(GPU, "of lookups the host's memory says enough")
class SlowHybrid(Slow, test_vllm_hybrid.HybridCase):
    """Full attention, windows and states: several lookups of a request."""

    TOKENS = prompt(910, 200)
    KINDS = (ALL_KINDS,)

    def test_it_loads_when_the_shared_tier_has_answered(self):
        e, waits = self.engine(ALL_KINDS, shared_wait=LONG), Request("waits", self.TOKENS)
        pid = self.hold()
        e.add(waits)
        for _ in range(20):
            e.step()
        self.assertEqual(waits.status, "waiting")
        self.let_go(pid)
        self.check(e)
        self.assertEqual(e.loaded_tokens, 192)
        self.assertEqual(self.stats()["lookups_waited"], 0)

    def test_it_waits_so_long_and_no_longer(self):
        e = self.engine(ALL_KINDS, shared_wait=0.05)
        self.hold()
        self.check(e, Request("waits", self.TOKENS))
        self.assertEqual(e.loaded_tokens, 0)
        self.assertEqual(self.stats()["lookups_waited"], 0)


class Turns(unittest.TestCase):
    """The order of lookups, with a daemon that is always still asking the shared tier."""

    def setUp(self):
        self.asked, self.pending = [], True
        ns = SimpleNamespace(lookup_prefix=self.lookup)
        self.link = SimpleNamespace(ns=ns, ask=lambda call, *args, **named: call(*args, **named))

    def lookup(self, keys, wait_mode, request, **named):
        self.asked.append((request, wait_mode))
        return PrefixHits(0, 0, 0, pending=self.pending and wait_mode == WaitMode.LATER)

    def look(self, wait, name):
        if wait.holds(name):
            return None
        wait.begin(name)
        return wait.prefix(self.link, name, b"")

    def test_so_many_at_once_and_the_others_get_their_turn(self):
        wait = SharedWait(Settings(shared_wait=LONG))
        names = [str(i) for i in range(2 * shared_wait._MOST)]
        first = names[: shared_wait._MOST]
        for name in names:
            self.look(wait, name)
        self.assertEqual([name for name, _ in self.asked], first)
        self.assertFalse(wait.pending(names[-1]), "it is held, and not pending")
        self.pending = False
        while wait._pending:
            for name in first:
                self.look(wait, name)
        self.assertFalse(self.look(wait, names[-1]).pending)

    def test_at_its_deadline_it_takes_what_is_here(self):
        wait = SharedWait(Settings(shared_wait=0.02))
        while not (hits := self.look(wait, "r")) or hits.pending:
            time.sleep(0.001)
        self.assertEqual(self.asked[-1], ("r", WaitMode.HERE))
        self.assertFalse(wait.pending("r"))
        self.look(wait, "r")
        self.assertEqual(self.asked[-1], ("r", WaitMode.HERE), "it does not wait twice")
        wait.forget("r")
        self.look(wait, "r")
        self.assertEqual(self.asked[-1], ("r", WaitMode.LATER))
        wait.extend("r", 0.0)
        self.look(wait, "r")
        while not (hits := self.look(wait, "r")) or hits.pending:
            time.sleep(0.001)
        self.assertEqual(self.asked[-1], ("r", WaitMode.HERE))
        wait.extend("r", time.monotonic() + LONG)
        self.look(wait, "r")
        self.assertEqual(self.asked[-1], ("r", WaitMode.LATER), "another host still stores what it needs")
        wait.give_up("r")
        self.look(wait, "r")
        self.assertEqual(self.asked[-1], ("r", WaitMode.HERE))


if __name__ == "__main__":
    watch()
    unittest.main()
