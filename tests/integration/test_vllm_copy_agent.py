#!/usr/bin/python3
"""The vLLM connector with a copy agent in its workers (docs/vllm.md, "Small fragments"), in the
small engine of tests/engines/vllm. On a GPU (UCM_VLLM_GPU) the agent is the real one, otherwise one
that needs no GPU."""

import os
import signal
import time
import unittest
from dataclasses import replace
from unittest import mock

from vllm_case import GPU, Case, Request, daemon, prompt, watch  # sets the paths
from daemon import halt
from ucmclient import Namespace, Status
from ucmclient.engine.vllm import copy_agent, worker
from ucmclient.engine.vllm.identity import Unsupported


@unittest.skipUnless(GPU, "there is no GPU: UCM_VLLM_GPU is not set")
class CopyAgentsOnGpu(Case):
    """The daemon moves everything through entries that it has."""

    STAGED = {"copy.strategy": "staged"}

    def setUp(self):
        self.daemon = daemon(**self.STAGED)
        self.addCleanup(self.stop)

    def staged(self):
        """Bytes that went through copy agents; and all."""
        devices = self.all_stats()["devices"]
        return (sum(d.get("staged_bytes", 0) for d in devices),
                sum(d["load_bytes"] + d["dump_bytes"] for d in devices))

    def through_copy_agents(self, tokens, least=0.5, **more):
        """One engine stores and another one loads. Most bytes go through entries; a late order goes
        straight."""
        before, all_before = self.staged()
        a, b = (self.engine(copy_agent="on", **more) for _ in range(2))
        self.check(a, Request("cold", tokens))
        self.check(b, Request("warm", tokens))
        self.assertGreater(b.loaded_tokens, 0)
        after, all_after = self.staged()
        self.assertGreater(after - before, least * (all_after - all_before))
        return a, b

    def test_bytes_go_through_it(self):
        for layout in ("split", "fused", "packed"):
            with self.subTest(layout):
                self.through_copy_agents(prompt(200, 150), layout=layout, salt=layout)

    def test_layer_after_layer_and_ranks(self):
        """Such loads go straight, because a layer is one small fragment of a slot."""
        self.through_copy_agents(prompt(201, 150), least=0.25, async_load=False, layerwise=True, ranks=2)

    def test_auto_uses_it(self):
        a = self.engine()
        self.check(a, Request("cold", prompt(202, 60)))
        self.assertGreater(self.staged()[0], 0)

    def test_off_does_not(self):
        a = self.engine(copy_agent="off")
        self.check(a, Request("cold", prompt(203, 60)))
        self.assertEqual(self.staged()[0], 0)

    def test_sleep(self):
        a, b = self.through_copy_agents(prompt(204, 100))
        a.sleep()
        a.wake()
        before = self.staged()[0]
        self.check(a, Request("new", prompt(205, 100)))
        self.assertGreater(self.staged()[0], before)

    def test_the_daemon_is_killed_and_started_again(self):
        a, b = self.through_copy_agents(prompt(206, 100))
        self.restart(**self.STAGED)
        self.eventually(lambda: self.loads(a, prompt(207, 100)))

        def staged():  # the library gives a new connection its ring a moment later
            self.check(a, Request(f"new{time.monotonic()}", prompt(time.monotonic_ns() % 10**9, 60)))
            return self.staged()[0] > 0
        self.eventually(staged)

    def test_a_connection_that_is_cut(self):
        a, b = self.through_copy_agents(prompt(208, 100))
        link = b.ranks[0].connector._worker.link
        link.cut()
        self.eventually(lambda: link.region is not None)
        before = self.staged()[0]
        self.check(b, Request("after", prompt(209, 100)))
        self.assertGreater(self.staged()[0], before)


@unittest.skipIf(GPU, "a GPU has the real library")
class CopyAgents(Case):
    """Workers with a copy agent, over a library that needs no GPU. The engine on the host passes
    for one on a GPU."""

    def setUp(self):
        import fake_copy_agent
        super().setUp()
        self.fake = fake_copy_agent.Fake(self)
        memory, register = worker.region_memory, Namespace.register

        def on_gpu(layout, _):
            return replace(memory(layout, False), gpu=bytes(16))

        def on_host(ns, memory, planes, *, gpu, **more):
            return register(ns, memory, planes, **more)
        def choice(settings, layout, _, writes):
            return copy_agent.WorkerCopyAgent(settings, layout, True, writes)
        for patch in (mock.patch.object(worker, "WorkerCopyAgent", choice), mock.patch.object(worker, "region_memory", on_gpu),
                      mock.patch.object(Namespace, "register", on_host)):
            patch.start()
            self.addCleanup(patch.stop)

    def test_blocks_go_through_its_region(self):
        a, b = self.engine(ranks=2), self.engine(ranks=2)
        tokens = prompt(300, 100)
        self.check(a, Request("cold", tokens))
        self.check(b, Request("warm", tokens))
        self.assertGreater(b.loaded_tokens, 0)
        self.assertEqual((self.fake.calls(), self.fake.copy_agents), ("OR" * 4, 4))
        a.close()
        self.assertEqual((self.fake.calls(), self.fake.copy_agents), ("UC" * 2, 2))

    def test_q4_has_more_and_smaller_entries(self):
        with mock.patch.object(copy_agent, "CopyAgent", wraps=copy_agent.CopyAgent) as opened:
            for encoding in ("fp8", "q4"):
                self.engine(encoding=encoding, dtype="bfloat16")
        self.assertEqual([(call.kwargs["entries"], call.kwargs["entry_bytes"]) for call in opened.call_args_list],
                         [(0, 0), (8, 8 << 20)])

    def test_sleep_gives_its_memory_back(self):
        a = self.engine()
        a.sleep()
        self.assertEqual(self.fake.copy_agents, 0)
        self.assertEqual(self.stats()["regions"], 0)
        a.wake()
        self.check(a, Request("awake", prompt(301, 60)))
        self.assertEqual((self.fake.calls(), self.fake.copy_agents), ("ORUCOR", 1))

    def test_one_that_can_not_register_when_it_wakes(self):
        a = self.engine(connect_timeout=1)
        a.sleep()
        self.fake.calls()
        self.fake.refuse(register=Status.BUSY)
        a.wake()
        self.assertEqual(self.fake.copy_agents, 0, "what can't be used is given back")
        self.fake.refuse()
        self.eventually(lambda: self.loads(a, prompt(310, 60)))
        self.assertEqual(self.fake.copy_agents, 1)

    def test_workers_that_just_shut_down(self):
        a = self.engine()
        a.ranks[0].connector.shutdown()
        self.assertEqual((self.fake.calls(), self.fake.copy_agents), ("ORA", 0))

    def test_what_it_refuses_goes_without(self):
        for refused in ({"open": Status.NO_MEMORY}, {"open": Status.UNSUPPORTED}, {"register": Status.DEVICE}):
            with self.subTest(refused):
                self.fake.refuse(**refused)
                with self.assertLogs("ucmclient.engine.vllm", "WARNING") as log:
                    a, b = self.engine(salt=str(refused)), self.engine(salt=str(refused))
                self.assertIn("without a copy agent", log.output[0])
                tokens = prompt(302, 60)
                self.check(a, Request("cold", tokens))
                self.check(b, Request("warm", tokens))
                self.assertGreater(b.loaded_tokens, 0)
                self.assertEqual(self.fake.copy_agents, 0)

    def test_on_does_not_start_without(self):
        self.fake.refuse(open=Status.NO_MEMORY)
        with self.assertRaisesRegex(Unsupported, 'copy_agent "on".*out of memory.*"auto"'):
            self.engine(copy_agent="on")
        self.eventually(lambda: self.stats()["regions"] == 0)

    def test_a_library_that_is_not_there(self):
        import fake_copy_agent
        with fake_copy_agent.named("/nonexistent.so"):
            a = self.engine()
            self.assertIn("/nonexistent.so", a.ranks[0].connector._worker.copy_agent.why)
            self.check(a, Request("without", prompt(308, 60)))
            self.assertTrue(self.loads(a, prompt(308, 60)))
            with self.assertRaisesRegex(Unsupported, 'copy_agent "on".*UCMCLIENT_CUDA_LIB.*/nonexistent.so'):
                self.engine(copy_agent="on")

    def test_off(self):
        a = self.engine(copy_agent="off")
        self.check(a, Request("without", prompt(309, 60)))
        self.assertEqual(self.fake.calls(), "")

    def test_on_goes_on_without_later(self):
        a = self.engine(copy_agent="on")
        self.fake.refuse(open=Status.NO_MEMORY)
        link = a.ranks[0].connector._worker.link
        link.cut()
        self.eventually(lambda: link.region is not None)
        self.check(a, Request("stored", prompt(303, 60)))
        self.assertTrue(self.loads(a, prompt(303, 60)))
        self.assertEqual(self.fake.copy_agents, 0)

    def test_a_daemon_that_comes_later(self):
        socket = self.daemon.socket
        self.daemon.stop()
        a = self.engine(socket=socket, connect_timeout=0.2, copy_agent="on")
        self.assertEqual(self.fake.calls(), "")
        os.makedirs(os.path.dirname(socket), exist_ok=True)
        self.daemon = daemon(socket=socket, nvme=False)
        self.eventually(lambda: self.loads(a, prompt(304, 60)))
        self.assertRegex(self.fake.calls(), "OR$")  # a slow start may take more than one
        self.assertEqual(self.fake.copy_agents, 1)

    def test_a_daemon_that_is_killed(self):
        a = self.engine(lookup_timeout=0.05)
        self.check(a, Request("before", prompt(305, 60)))
        self.restart()
        self.eventually(lambda: self.loads(a, prompt(306, 60)))
        self.assertEqual(self.fake.calls(), "OR")  # the library itself goes on with the new daemon

    def test_a_daemon_that_hangs(self):
        a, b = self.engine(), self.engine(async_load=False, transfer_timeout=0.2)
        tokens = prompt(307, 100)
        self.check(a, Request("cold", tokens))
        self.fake.calls()
        pid, start = self.daemon.process.pid, b.ranks[0].connector.start_load_kv

        def stopped(context):
            if b.ranks[0].connector._plan().loads:
                halt(pid)
            start(context)
        b.ranks[0].connector.start_load_kv = stopped
        b.add(Request("warm", tokens, outputs=1))
        began = time.monotonic()
        try:
            while "A" not in self.fake.calls() and time.monotonic() - began < 60:
                b.step()
        finally:
            os.kill(pid, signal.SIGCONT)
        b.ranks[0].connector.start_load_kv = start
        self.assertLess(time.monotonic() - began, 60, "the connection was not made again")
        self.check(b)
        self.eventually(lambda: b.ranks[0].connector._worker.link.region is not None)
        self.assertEqual(self.fake.copy_agents, 2)


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
