#!/usr/bin/python3
"""The vLLM connector's parts by themselves: decisions of the scheduler's half, what tells engines
apart, refusals. No daemon. test_vllm_layouts.py has where tensors keep blocks."""

import importlib.util
import json
import os
import re
import tempfile
import unittest
from dataclasses import fields
from types import SimpleNamespace
from unittest import mock

from vllm_paths import TOP  # sets the paths of the others
from extra import extra_of

import numpy

import engine
import engine_pages
from daemon import until
from engine import BLOCK, Request
import ucmclient
from ucmclient import BlockResult, TableHits, PrefixHits, SharedMemory, Status, UcmError
from ucmclient.engine.vllm import copy_agent, identity, inputs, layout, settings
from ucmclient.engine.vllm.connector import UcmConnector
from ucmclient.engine.vllm.link import Link
from ucmclient.engine.vllm.nvme import NvmeRate
from ucmclient.engine.vllm.plan import Copy, Plan
from ucmclient.engine.vllm.scheduler import SchedulerHalf
from ucmclient.engine.vllm.worker import WorkerHalf
from vllm.distributed.kv_transfer.kv_connector.v1 import base


class Decisions(unittest.TestCase):
    """The scheduler's half, step by step, with a daemon that has nothing."""

    def half(self, **more):
        ns = SimpleNamespace(lookup_prefix=lambda keys, **_: PrefixHits(0, 0, 0), lookup_table_open=lambda timeout: None,
                             lookup_table_read=lambda keys: None, identity=SimpleNamespace(key_bytes=32))
        half = SchedulerHalf(settings.Settings(**more), BLOCK)
        half.link = SimpleNamespace(ns=ns, ask=lambda call, *a, **k: call(*a, **k), tell=lambda call, *a, **k: call(*a, **k),
                                    release=lambda lease: None)
        return half

    def output(self, request, blocks, tokens, preempted=(), resumed=False):
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        new = []
        if resumed:
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens = ["r"], [(blocks,)], [0]
            cached.resumed_req_ids = {"r"}
        else:
            new = [SimpleNamespace(req_id="r", block_ids=(blocks,), num_computed_tokens=0)]
        return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached, preempted_req_ids=set(preempted),
                               num_scheduled_tokens={"r": tokens})

    def test_a_block_that_decoding_fills_is_stored_when_the_next_one_comes(self):
        half, request = self.half(), Request("r", range(3 * BLOCK))
        half.matched_tokens(request, 0)
        half.allocated(request, [1, 2, 3], 0)
        self.assertEqual([c.blocks for c in half.step(self.output(request, [1, 2, 3], 3 * BLOCK - 1)).stores], [[1, 2]])
        for computed, added, stored in ((3 * BLOCK - 1, None, []), (3 * BLOCK, ([4],), [[3]]), (3 * BLOCK + 1, None, [])):
            out = self.output(request, [], 1)
            out.scheduled_new_reqs, of = [], out.scheduled_cached_reqs
            of.req_ids, of.new_block_ids, of.num_computed_tokens = ["r"], [added], [computed]
            self.assertEqual([c.blocks for c in half.step(out).stores], stored, computed)
            request.append(7)
        request.num_computed_tokens = 4 * BLOCK
        for token in range(BLOCK):
            request.append(token)
        self.assertTrue(half.finished(request, [1, 2, 3, 4])[0], "its end stores what is left")
        self.assertEqual([c.blocks for c in half.step(self.output(SimpleNamespace(request_id="r"), [], 0)).stores], [[4]])

    def test_preempted_and_resumed_in_one_step(self):
        for resumed in (True, False):  # the older and the newer model runner
            half, request = self.half(), Request("r", range(40))
            half.matched_tokens(request, 0)
            half.allocated(request, [1, 2, 3], 0)
            self.assertEqual([c.blocks for c in half.step(self.output(request, [1, 2, 3], 40)).stores], [[1, 2]])
            request.num_preemptions = 1
            half.matched_tokens(request, 0)
            half.allocated(request, [4, 5, 6], 0)
            plan = half.step(self.output(request, [4, 5, 6], 40, preempted="r", resumed=resumed))
            self.assertEqual((plan.preempted, [c.blocks for c in plan.stores]), ({"r"}, [[4, 5]]))
            request.num_computed_tokens = 40
            self.assertTrue(half.finished(request, [4, 5, 6])[0], "its blocks would be given back while they are read")

    def loading(self, lost, anew=False):
        """A load within a step fails, but its request is gone before that is known. Then the engine
        gives the same blocks to another request as its own hits. Returns what is stored of that."""
        half, request, later = self.half(async_load=False), Request("r", range(40)), Request("later", range(40))
        hits = [PrefixHits(2, 2, 1)]
        half.link.ns.lookup_prefix = lambda keys, **_: hits[0]
        self.assertEqual(half.matched_tokens(request, 0), (32, False))
        half.allocated(request, [1, 2, 3], 32)
        output = self.output(request, [1, 2, 3], 8)
        output.scheduled_new_reqs[0].num_computed_tokens = 32
        number = half.step(output).number
        self.assertGreater(number, 0)
        if lost == "aborted":
            half.finished(request, [1, 2, 3])
        elif lost == "preempted":
            request.num_preemptions = 1
            half.matched_tokens(request, 0)
        half.received((), {2}, number)
        if lost == "aborted when it was known":
            half.finished(request, [1, 2, 3])
        hits[0] = PrefixHits(1, 1, 2)
        half.matched_tokens(later, 32)
        half.allocated(later, [1, 2, 9], 0)
        output = self.output(later, [1, 2, 9], 8)
        output.scheduled_new_reqs[0].req_id, output.num_scheduled_tokens = "later", {"later": 40 if anew else 8}
        output.scheduled_new_reqs[0].num_computed_tokens = 0 if anew else 32
        return [copy.blocks for copy in half.step(output).stores]

    def test_what_a_failed_load_left_behind_is_not_stored(self):
        for lost in ("aborted", "preempted", "aborted when it was known"):
            with self.subTest(lost):
                self.assertEqual(self.loading(lost), [])
                self.assertEqual(self.loading(lost, anew=True), [[2]], "it was computed again")

    def test_a_lookup_of_which_the_lookup_table_says_that_nothing_is_there_is_told_and_not_awaited(self):
        half, told, asked, advice = self.half(), [], [], [None]
        half.link.ns.lookup_table_read = lambda keys: advice[0]
        half.link.ns.lookup_note = lambda keys, **_: told.append(len(keys))
        half.link.ns.lookup_prefix = lambda keys, **_: asked.append(len(keys)) or PrefixHits(1, 1, 7)
        steps = [(None, True), (TableHits(0, 0, 0, True, False), False),  # the first one opens the table
                 # the block may be there all the same
                 (TableHits(0, 0, 0, False, False), True), (TableHits(0, 0, 0, True, True), True),
                 (TableHits(2, 2, 0, True, False), True)]
        for i, (advice[0], asks) in enumerate(steps):
            request = Request(f"r{i}", range(40))
            for _ in range(3):  # as vLLM does while the request waits
                self.assertEqual(half.matched_tokens(request, 0), (16 if asks else 0, asks))
            self.assertEqual(len(asked), asks, f"step {i}")
            self.assertEqual(len(told), not asks, f"step {i}")
            asked.clear(), told.clear()
            half.finished(request, [])
        counts = half.lookup_table.counts
        self.assertEqual((counts.asked, counts.spared, counts.false_hits, counts.false_misses), (4, 3, 1, 0))

    def test_a_daemon_that_can_be_told_no_more_is_not_taken_for_silent(self):
        def fails(status):
            raise UcmError(status, "")

        link = Link(settings.Settings(socket="/nonexistent", connect_timeout=0.1, retry_interval=100.0), None, "test")
        self.addCleanup(link.close)
        link._ns = object()
        link.tell(fails, Status.BUSY)
        self.assertIsNotNone(link.ns)
        link.tell(fails, Status.DEADLINE)
        self.assertIsNone(link.ns)

    def test_a_daemon_before_lookup_tables(self):
        half, opens = self.half(), []

        def refuse(timeout):
            opens.append(timeout)
            raise UcmError(Status.UNSUPPORTED, "older")

        half.link.ns.lookup_table_open = refuse
        for i in range(3):
            self.assertEqual(half.matched_tokens(Request(f"r{i}", range(40)), 0), (0, False))
        self.assertEqual(len(opens), 1)

    def keys(self, half=None, **more):
        request = Request("r", range(4 * BLOCK))
        for name, value in more.items():
            setattr(request, name, value)
        tracked = (half or self.half())._tracked(request)
        packed = tracked.keys(0, tracked.hashed)
        return [packed[i : i + 32] for i in range(0, len(packed), 32)]

    def alike(self, one, other):
        """How many keys are the same from the first on."""
        return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))

    def test_which_places_are_tokens_counts(self):
        """vLLM's hash has the embeddings and the tokens, but not which of the two the model takes
        at a place."""
        def masked(*tokens):
            return self.keys(prompt_embeds=object(), prompt_is_token_ids=[i in tokens for i in range(4 * BLOCK)])
        self.assertEqual(self.alike(masked(3), masked(3)), 4)
        self.assertEqual([self.alike(masked(3), masked(4)), self.alike(masked(3), masked(3, 2 * BLOCK)), self.alike(masked(), masked(4 * BLOCK - 1))], [0, 2, 3])
        self.assertEqual(self.alike(self.keys(), self.keys(prompt_is_token_ids=[True] * (4 * BLOCK))), 4, "no embeddings")

    def test_what_a_client_named_is_known_by_its_bytes(self):
        class Pixels:
            dtype, shape = "u8", (4,)
            untyped_storage = None

            def __init__(self, data):
                self.data = self
                self.bytes = data

        def image(name, data, place=BLOCK + 3):
            data = {"pixels": Pixels(data)} if data is not None else None
            return SimpleNamespace(identifier=name, mm_hash=name, mm_position=SimpleNamespace(offset=place, length=4), data=data)

        def keys(*images, half=None):
            return self.keys(half, mm_features=list(images))
        with mock.patch.object(inputs, "_bytes", lambda tensor: tensor.bytes):
            self.assertEqual(self.alike(keys(image("mine", b"a")), keys(image("mine", b"a"))), 4)
            self.assertEqual(self.alike(keys(image("mine", b"a")), keys(image("mine", b"b"))), 1, "blocks before it are anybody's")
            self.assertEqual(self.alike(keys(image("mine", b"a")), keys(image("mine", b"a"), image("more", b"a", 3 * BLOCK))), 3)
            self.assertEqual(self.alike(keys(image("mine", None)), keys(image("mine", None))), 1)
            self.assertEqual(self.alike(keys(image(inputs.CHOSEN + "ab" * 32, b"a")), keys(image(inputs.CHOSEN + "ab" * 32, b"b"))), 1)
            self.assertEqual(self.alike(keys(image("ab" * 32, b"a")), keys()), 4, "vLLM's own hash of an image is in its hashes of blocks")
            ahead = [SchedulerHalf(settings.Settings(), BLOCK, reads_next=True) for _ in range(2)]
            found = [keys(image("mine", data, 3 * BLOCK), half=half) for data, half in zip((b"a", b"b"), ahead)]
            self.assertEqual((len(found[0]), self.alike(*found)), (3, 2), "a draft reads the place after a block, too")

    def test_what_a_pooling_model_is_given_besides_is_nobody_elses(self):
        more = {"pooling_params": SimpleNamespace(extra_kwargs={"token_types": [0, 1]})}
        self.assertEqual(self.alike(self.keys(**more), self.keys(**more)), 0)

    def test_a_reset_lets_nothing_through(self):
        for lost in (False, True):
            half, request = self.half(), Request("r", range(40))
            half.matched_tokens(request, 0)
            half.allocated(request, [1, 2, 3], 0)
            before = half.step(self.output(request, [1, 2, 3], 20)).stores
            request.num_preemptions = int(lost)
            half.reset()
            half.matched_tokens(request, 0)
            half.allocated(request, [1, 2, 3], 0)
            after = half.step(self.output(request, [1, 2, 3], 40, preempted="r" if lost else (), resumed=lost)).stores
            self.assertEqual([c.blocks for c in after], [[1, 2]] if lost else [])
            self.assertNotIn(before[0].keys, [c.keys[: len(before[0].keys)] for c in after])

    def test_a_request_with_nothing_to_store_keeps_no_blocks(self):
        half, request = self.half(), Request("r", range(10))
        half.matched_tokens(request, 0)
        half.allocated(request, [1], 0)
        self.assertEqual(half.step(self.output(request, [1], 10)).stores, [])
        self.assertFalse(half.finished(request, [1])[0])

    def test_chains_longer_than_a_request_to_the_daemon(self):
        half, request = self.half(), Request("r", [])
        request.block_hashes = [bytes(32)] * 40000
        request.tokens = [0] * (40000 * BLOCK)
        half.matched_tokens(request, 0)
        half.allocated(request, list(range(1, 40001)), 0)
        plan = half.step(self.output(request, list(range(1, 40001)), 40000 * BLOCK))
        self.assertEqual([len(c.blocks) for c in plan.stores], [16384, 16384, 7232])

    def test_nvme_is_measured(self):
        rate = NvmeRate(settings.Settings(prefill_rate=1000.0))
        self.assertTrue(rate.worth(1000, 1000))
        rate.measured(1000, 2.0)
        self.assertFalse(rate.worth(1000, 1000))
        self.assertTrue(rate.worth(1000, 400))  # most of it is in DRAM
        for _ in range(10):
            rate.measured(4000, 1.0)
        self.assertTrue(rate.worth(1000, 1000))
        self.assertTrue(NvmeRate(settings.Settings()).worth(1, 1))


class Away(unittest.TestCase):
    def test_who_waits_for_a_daemon_waits_once(self):
        """A restarted daemon has retry_interval to come up. After that nobody waits until a daemon
        answers."""
        now, missing = [100.0], UcmError(Status.NO_DAEMON, "none")
        with mock.patch("ucmclient.engine.vllm.link.Client"), mock.patch("ucmclient.engine.vllm.link.time.monotonic", lambda: now[0]):
            link = Link(settings.Settings(retry_interval=1.0), SimpleNamespace(kv_tensors=None), "test")
            for after, error, away in ((0, missing, False), (0.5, missing, False), (0.5, missing, True), (9, UcmError(Status.BUSY, ""), True),
                                       (1, None, False), (9, UcmError(Status.DEADLINE, ""), False), (1, missing, False), (1, missing, True)):
                now[0] += after
                with mock.patch.object(link, "_look_for_it"):
                    link.ask(mock.Mock(side_effect=error))
                self.assertEqual(link.away, away, (now[0], error))
            link.cut()
            self.assertTrue(link.away)
            link.close()


class Moves(unittest.TestCase):
    def half(self, link, event=lambda: None, **more):
        """A worker's half, whose daemon is what `link` plays."""
        memory = SharedMemory(8 * 4096)
        view = engine_pages.Tensor(numpy.frombuffer(memory.buffer, numpy.uint8).reshape(8, 4096))
        half = WorkerHalf(settings.Settings(socket="/nonexistent", connect_timeout=0.1, **more), None, layout.layout_of({"0": view}, 8),
                          name="test", part=0, writes=True, on_gpu=False, event=event)
        half.close()
        half.link = link
        return half

    def test_a_daemon_that_falls_silent_costs_one_timeout(self):
        asked = []

        class Silent:
            @property
            def region(self):
                return None if asked else SimpleNamespace(dump=None, load=None, gpu_busy=lambda now: None)

            def ask(self, call, keys, *_, **__):
                asked.append(keys)

        half = self.half(Silent())
        copies = [Copy(str(i), bytes([i]), [i]) for i in range(4)]
        half.start_stores(Plan(stores=[Copy(c.request, 9 * c.keys, 9 * c.blocks) for c in copies], ended={"0", "3"}))
        self.assertEqual(asked, [9 * bytes([0])])
        asked.clear()
        half.start_loads(Plan(loads=copies))
        self.assertEqual(asked, [bytes([0])])
        self.assertEqual(half.finished(), ({"0", "3"}, set("0123")))
        self.assertEqual(half.failed_blocks(), {0, 1, 2, 3})

    def test_events_that_the_daemon_can_not_open(self):
        """The worker itself waits for the events, and stores the refused blocks again."""
        come, given, tasks = [False], [], []

        class Event:
            def ipc_handle(self):
                return bytes(64)

            def query(self):
                return come[0]

        class Refused:
            """A dump's task: refused with an event, done without."""

            def __init__(self, event):
                self.result = SimpleNamespace(blocks=bytes([BlockResult.DEVICE if event else BlockResult.OK]), all_ok=not event)
                self.closed = False
                tasks.append(self)

            def check(self):
                return self.result

            def close(self):
                self.closed = True

        class Link:
            region = SimpleNamespace(dump=None, gpu_busy=lambda now: None)

            def ask(self, call, keys, blocks, *, cuda_event, **__):
                given.append((keys, cuda_event is not None))
                return Refused(cuda_event)

        half = self.half(Link(), Event)
        half.start_stores(Plan(stores=[Copy("a", b"a", [0])], ended={"a"}))
        with self.assertLogs("ucmclient.engine.vllm", "WARNING") as log:
            self.assertEqual(half.finished(), (set(), set()), "blocks that are to be stored again are given back")
        self.assertIn("docs/containers.md", log.output[0])
        half.start_stores(Plan(stores=[Copy("b", b"b", [1]), Copy("c", b"c", [2])], ended={"b"}))
        self.assertEqual(half.finished(), (set(), set()))
        self.assertEqual(given, [(b"a", True)], "the event has not come")
        half.preempted(Plan(preempted={"c"}))
        come[0] = True
        self.assertEqual(half.finished(), (set(), set()))
        self.assertEqual(half.finished(), ({"a", "b"}, set()))
        self.assertEqual(given, [(b"a", True), (b"a", False), (b"b", False)])
        self.assertTrue(all(task.closed for task in tasks))

    def test_what_requests_fill_in_a_step_goes_together(self):
        """One dump for all requests that decode. If one of them is preempted, its blocks are no
        longer read, and the others' are stored."""
        given, log, told = [], [], []

        class Task:
            result = None

            def check(self):
                return self.result

            def cancel(self, timeout):
                log.append("cancel")
                self.result = SimpleNamespace(blocks=bytes([BlockResult.CANCELLED]), all_ok=False)

            def wait(self, timeout):
                log.append("wait")

            def close(self):
                log.append("close")

        class Link:
            region = SimpleNamespace(dump=None, gpu_busy=told.append)

            def ask(self, call, keys, blocks, *, request, raw, **__):
                given.append((keys, blocks, request, raw))
                log.append("ask")
                return Task()

        half = self.half(Link())
        half.start_stores(Plan(stores=[Copy("a", b"a", [0]), Copy("b", b"bb", [1, 2]), Copy("c", b"c", [3], raw=True),
                                       Copy("d", b"d" * 9, list(range(9)))]))
        self.assertEqual(given, [(b"d" * 9, list(range(9)), "d", False), (b"abb", [0, 1, 2], "", False), (b"c", [3], "c", True)])
        given.clear()
        log.clear()
        half.preempted(Plan(preempted={"b"}))
        self.assertEqual((given, log), ([(b"a", [0], "a", False)], ["cancel", "wait", "close", "ask"]))
        half.start_stores(Plan(ended={"a", "b"}))
        self.assertEqual(half.finished(), ({"b"}, set()), "the blocks of a are still read")
        self.assertEqual(told, 4 * [False])
        half.start_loads(Plan(computes=True))
        half.start_stores(Plan(stores=[Copy("e", b"e", [4])], computes=True))
        self.assertEqual(told[4:], [True], "the daemon does not learn that the engine computes")

    def test_an_event_that_never_comes(self):
        link = SimpleNamespace(region=SimpleNamespace(dump=None, gpu_busy=lambda now: None))
        half = self.half(link, lambda: SimpleNamespace(query=lambda: False), transfer_timeout=0.05)
        half._events_refused = True
        half.start_stores(Plan(stores=[Copy("a", b"a", [0])], ended={"a"}))
        until(lambda: half.finished() == ({"a"}, set()), "the store's end")


class CopyAgents(unittest.TestCase):
    """Which workers have a copy agent. test_vllm_copy_agent.py tests what it does for them."""

    def choice(self, setting, fragment=4096, on_gpu=True, missing=None, writes=True, **more):
        one = layout.Layout(((layout.Fragment(0, 1 << 20, 64), layout.Fragment(0, 1 << 20, fragment)),), 8, fragment, "", {})
        with mock.patch.object(copy_agent, "require", side_effect=missing):
            return copy_agent.WorkerCopyAgent(settings.Settings.parse(extra_of({"copy_agent": setting, **more})), one, on_gpu, writes)

    def test_auto(self):
        missing = ucmclient.CopyAgentMissing("tried libucmclient_cuda.so.0: no such file")
        for more, used, words in (({}, True, "4 KiB"), ({"fragment": (512 << 10) - 1}, True, "small fragments"),
                                  ({"fragment": 512 << 10}, False, "512 KiB"), ({"on_gpu": False}, False, "GPU"),
                                  ({"missing": missing}, False, "no such file"),
                                  ({"store": False}, True, "small fragments"),
                                  ({"layerwise": True, "async_load": False}, True, "small fragments"),
                                  ({"layerwise": True, "async_load": False, "store": False}, False, "stores nothing"),
                                  ({"load": False, "writes": False}, False, "stores nothing")):
            with self.subTest(more):
                choice = self.choice("auto", **more)
                self.assertEqual(choice.used, used)
                self.assertIn(words, choice.why)

    def test_on_is_refused_with_the_remedy(self):
        self.assertTrue(self.choice("on", fragment=1 << 20).used)
        missing = ucmclient.CopyAgentMissing("tried libucmclient_cuda.so.0: no such file")
        for more, words in (({"on_gpu": False}, "GPU"), ({"missing": missing}, "UCMCLIENT_CUDA_LIB")):
            with self.subTest(more), self.assertRaisesRegex(identity.Unsupported, f'copy_agent "on".*{words}.*"auto"'):
                self.choice("on", **more)

    def test_off(self):
        with mock.patch.object(copy_agent, "require", side_effect=AssertionError("it was looked for")):
            self.assertFalse(copy_agent.WorkerCopyAgent(settings.Settings.parse(extra_of({"copy_agent": "off"})), None, True, True).used)


class Refusals(unittest.TestCase):
    def refused(self, words, change):
        config, kv_config = engine.configuration(8, 1, False, {})
        change(config, kv_config)
        with self.assertRaises(identity.Unsupported) as caught:
            identity.check_engine(config)
            identity.check_one_group(kv_config)
        self.assertIn(words, str(caught.exception))

    def test_engines_that_can_not_share(self):
        self.refused("prefix-caching", lambda c, k: setattr(c.cache_config, "enable_prefix_caching", False))
        self.refused("--prefill-context-parallel-size 1", lambda c, k: setattr(c.parallel_config, "prefill_context_parallel_size", 2))
        self.refused("scales", lambda c, k: setattr(c.cache_config, "calculate_kv_scales", True))
        self.refused("sha256", lambda c, k: setattr(c.cache_config, "prefix_caching_hash_algo", "builtin"))
        sliding = type("SlidingWindowSpec", (), {"block_size": BLOCK})()
        self.refused("SlidingWindowSpec", lambda c, k: setattr(k.kv_cache_groups[0], "kv_cache_spec", sliding))
        several = type("UniformTypeKVCacheSpecs", (), {"block_size": BLOCK, "kv_cache_specs": {"0": sliding}})()
        self.refused("SlidingWindowSpec", lambda c, k: setattr(k.kv_cache_groups[0], "kv_cache_spec", several))
        self.refused("must agree", lambda c, k: setattr(k, "hash_block_size", BLOCK // 2))

    def test_what_tells_engines_apart(self):
        def name(change=lambda c: None, backend="FLASH_ATTN"):
            config, kv_config = engine.configuration(8, 1, False, {})
            config.model_config.hf_config = SimpleNamespace(
                to_dict=lambda: {"rope_theta": 1e4}, rope_scaling={"original_max_position_embeddings": 4096})
            config.model_config.max_model_len = 4096
            change(config)
            view = engine_pages.Tensor(numpy.zeros((8, 2, BLOCK, 4), numpy.float16))
            return identity.identity_of(config, kv_config, layout.layout_of({"0": view}, 8), identity.Ranks(0, 1, True),
                                        settings.Settings(), {"backends": [backend]})

        def hf(config, **more):
            for key, value in more.items():
                setattr(config.model_config.hf_config, key, value)
        with tempfile.TemporaryDirectory() as directory:
            weights = os.path.join(directory, "model.safetensors")
            open(weights, "w").close()
            local = [name(lambda c: setattr(c.model_config, "model", directory))]
            os.utime(weights, (1, 1))
            local.append(name(lambda c: setattr(c.model_config, "model", directory)))
        others = [*local, name(backend="FLASHINFER"), name(lambda c: setattr(c.model_config, "max_model_len", 8192)),
                  name(lambda c: hf(c, _commit_hash="abc")), name(lambda c: hf(c, to_dict=lambda: {"rope_theta": 1e6})),
                  name(lambda c: setattr(c.cache_config, "cache_dtype", "fp8")),
                  name(lambda c: setattr(c.model_config, "quantization", "awq")),
                  name(lambda c: setattr(c, "load_config", SimpleNamespace(load_format="dummy")))]
        self.assertEqual(len({name(), *others}), 1 + len(others))
        self.assertEqual(name(), name())

    def test_engines_that_are_too_old(self):
        with mock.patch.object(base, "KVConnectorTransferResults"):
            del base.KVConnectorTransferResults
            with self.assertRaisesRegex(ImportError, "needs 0.32"):
                spec = importlib.util.find_spec("ucmclient.engine.vllm.connector")
                spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def test_seeds_that_differ_between_processes(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("PYTHONHASHSEED", None)
            with self.assertRaisesRegex(identity.Unsupported, "PYTHONHASHSEED=0"):
                identity.check_hash("xxhash")
            os.environ["PYTHONHASHSEED"] = "random"
            with self.assertRaises(identity.Unsupported):
                identity.check_hash("sha256")
            os.environ["PYTHONHASHSEED"] = "0"
            self.assertEqual(identity.check_hash("sha256"), 32)

    def test_the_layout_that_is_asked_for(self):
        for extra, wanted in (({}, "BLNHC"), ({"layerwise": True, "async_load": False}, None), ({"advanced": {"block_layout": False}}, None)):
            config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
            self.assertEqual(UcmConnector.get_required_kvcache_layout(config), wanted)

    def test_the_manual_has_every_setting(self):
        with open(os.path.join(TOP, "docs/vllm.md"), encoding="utf-8") as manual:
            section = manual.read().partition("## Settings")[2].partition("\n## ")[0]
        kinds = settings.kinds()
        for kind, table in zip(("plain", "advanced"), section.split("`advanced`", 1)):
            told = {}
            for names, defaults in re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.M):
                told.update(dict.fromkeys(re.findall(r"`(\w+)`", names), defaults.strip("`")))
            self.assertEqual(set(told), {name for name in kinds if kinds[name] == kind})
            for field in fields(settings.Settings):
                if field.name in told and field.default is not None:
                    with self.subTest(field.name):
                        self.assertEqual(json.loads(told[field.name]), field.default)

    def test_settings_say_what_would_be_right(self):
        for extra, words in (({"sockt": "x"}, "there are .*socket"), ({"advanced": {"lease": "long"}}, "must be a number"),
                             ({"advanced": {"lease": -1}}, "at least 0"), ({"layerwise": True}, "async_load false"),
                             ({"load": 1}, "must be a bool"), ({"advanced": {"copy_agent": "yes"}}, "one of auto, on, off"),
                             ({"encoding": "fp4"}, "one of none, fp8, int8, q4, lossless"), ({"advanced": {"raw_first": 16}}, "set encoding, too"),
                             ({"advanced": {"copy_agent": True}}, "must be a str"), ({"advanced": {"lookup_table": False}}, "has no setting 'lookup_table'"),
                             ({"lease": 1.0}, 'lease stands in the object "advanced"'), ({"advanced": {"load": True}}, "load stands among the others"),
                             ({"advanced": True}, "must be an object")):
            with self.subTest(extra), self.assertRaisesRegex(ValueError, words):
                settings.Settings.parse(extra)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    unittest.main(verbosity=2)
