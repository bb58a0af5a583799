#!/usr/bin/python3
"""The vLLM connector for models whose layers keep their KV in several ways, against a real daemon.
The small engine has a pool of blocks as vLLM's (tests/engines/vllm/hybrid_engine.py). Logits are
the same bit for bit as without a cache. Only blocks that a request can use are stored and loaded.
"""

import dataclasses
import unittest
from types import SimpleNamespace
from unittest import mock

from vllm_case import BLOCK, MODEL, Case, Request, finish, numpy, prompt, run, watch
from extra import extra_of

from hybrid_engine import ALIKE, ALL_KINDS, INSIDE, ONLY_STATES, ONLY_WINDOWS, STATES, UNLIKE, Group, HybridEngine, Pool
from ucmclient.client import Task
from ucmclient.engine.vllm import groups as groups_module
from ucmclient.engine.vllm import identity, settings, worker
from ucmclient.engine.vllm.connector import UcmConnector

EXPECTED = {}


def expected(tokens, outputs, groups):
    key = (tuple(tokens), outputs, groups)
    if key not in EXPECTED:
        EXPECTED[key] = run(HybridEngine(MODEL, groups=groups, blocks=160), Request("alone", tokens, outputs))["alone"].logits
    return EXPECTED[key]


class HybridCase(Case):
    def engine(self, groups=ALIKE, **more):
        e = HybridEngine(MODEL, UcmConnector, groups, **{
            "socket": self.daemon.socket, "retry_interval": 0.05, "lookup_timeout": 2.0, "blocks": 160, **more})
        self.addCleanup(e.close)
        return e

    def check(self, e, *requests, but=(), **more):
        for r in run(e, *requests, **more).values():
            if r.request_id not in but:
                self.right(e, r)
        for _ in range(500):
            if e.pool.idle():
                return
            e.step()  # the workers' reports of what they stored
        self.fail("blocks were never given back")


    def right(self, e, r):
        want = expected(r.tokens[: r.prompt_tokens], r.outputs, e.groups)
        self.assertEqual(len(r.logits), len(want))
        for a, b in zip(r.logits, want):
            self.assertTrue(numpy.array_equal(a, b), r.request_id)


class Hits(HybridCase):
    def two(self, groups, **more):
        return [self.engine(groups, **more) for _ in range(2)]

    def test_another_engine_loads_what_one_has_computed(self):
        for name, groups in (("alike", ALIKE), ("unlike", UNLIKE), ("windows", ONLY_WINDOWS), ("states", STATES), ("all", ALL_KINDS),
                             ("inside", INSIDE), ("only states", ONLY_STATES)):
            with self.subTest(name):
                _, b = self.handed_on(*self.two(groups, salt=name), prompt(1, 200), 192)
                self.check(b, Request("local", prompt(1, 200)))
                self.assertEqual(b.loaded_tokens, 192)

    def test_two_ranks(self):
        for name, groups in (("alike", ALIKE), ("states", STATES)):
            with self.subTest(name):
                self.handed_on(*self.two(groups, ranks=2, salt=name), prompt(1, 200), 192)

    def test_a_full_hit_leaves_the_last_token(self):
        """The engine computes it itself. No state is taken back, so with states a hit ends a block
        before."""
        for name, groups, loaded in (("alike", ALIKE, 191), ("unlike", UNLIKE, 191), ("states", STATES, 176), ("all", ALL_KINDS, 176)):
            with self.subTest(name):
                self.handed_on(*self.two(groups, salt=name), prompt(2, 192), loaded)

    def test_states_that_a_step_leaves_in_its_midst(self):
        """A prompt of one step. The kernels leave its state at 48."""
        self.handed_on(*self.two(INSIDE), prompt(5, 60), 48, outputs=1)
        self.assertEqual(self.stats()["dump_blocks"], 3 + 2)

    def test_the_next_turn_of_a_chat(self):
        """While an answer comes, a state is stored each 32 tokens. The first comes 32 tokens after
        the prompt's last state, at 96."""
        for name, groups, outputs in (("alike", ALIKE, 100), ("states", STATES, 110)):
            with self.subTest(name):
                a, b = self.two(groups, salt=name)
                cold = Request("cold", prompt(3, 100), outputs)
                self.check(a, cold)
                self.check(b, Request("next", cold.tokens + prompt(4, 20)))
                self.assertEqual(b.loaded_tokens, 192)

    def test_they_are_stored_and_loaded_where_a_hit_may_end(self):
        """Full attention stores all of 40 blocks. Two layers have windows of 40 tokens, or states.
        A window is stored at each multiple of 160 (four windows) and at the prompt's end. It lies,
        with one token more, in 3 blocks. A state is stored where a step ends: at each 64 tokens and
        at 640. A hit loads one window or state."""
        for name, groups, stored, loaded in (("alike", ALIKE, 4 * 3, 3), ("states", STATES, 10, 1)):
            with self.subTest(name):
                before = self.stats()
                self.handed_on(*self.two(groups, blocks=200, salt=name), prompt(5, 650), 640, outputs=1)
                self.assertEqual(self.stats()["dump_blocks"] - before["dump_blocks"], 40 + 2 * stored)
                self.assertEqual(self.stats()["load_blocks_dram"] - before["load_blocks_dram"], 40 + 2 * loaded)

    def test_a_beginning_that_requests_share_is_a_hit_from_the_third_on(self):
        """The second request finds full attention's blocks, but no window or state that ends there.
        So it stores the window, or lets the engine end a step there."""
        for name, groups in (("alike", ALIKE), ("states", STATES), ("all", ALL_KINDS)):
            engines = [self.engine(groups, window_interval=1 << 20, salt=name) for _ in range(3)]
            for i, e in enumerate(engines):
                self.check(e, Request("r", prompt(10 + i, 300, shared=200)))
            self.assertEqual([e.loaded_tokens for e in engines], [0, 0, 192])

    def test_a_hit_ends_at_the_last_multiple_of_the_interval(self):
        a, b = self.engine(window_interval=64), self.engine(window_interval=64)
        self.check(a, Request("first", prompt(20, 300, shared=180)))
        self.check(b, Request("second", prompt(21, 300, shared=180)))
        self.assertEqual(b.loaded_tokens, 128)

    def test_engines_of_other_groups_do_not_share(self):
        """They don't share even with the same layers, the same tensors and the same bytes in a
        block."""
        a = self.engine((Group([0], 40), Group([1], 40), Group([2])))
        b = self.engine((Group([0], 48), Group([1], 48), Group([2])))
        c = self.engine((Group([2]), Group([0], 40), Group([1], 40)))
        self.check(a, Request("cold", prompt(6, 200)))
        self.check(b, Request("other", prompt(6, 200)))
        self.assertEqual(b.loaded_tokens, 0)
        self.check(c, Request("same", prompt(6, 200)))  # groups in another order are the same
        self.assertEqual(c.loaded_tokens, 192)


class Trouble(HybridCase):
    def test_what_is_evicted_of_any_group_after_the_lookup_is_computed(self):
        for groups, number in ((groups, number) for groups in (ALIKE, STATES) for number in range(3)):
            with self.subTest(number, state=groups is STATES):
                salt = f"{number}{groups is STATES}"
                a, b = self.engine(groups, salt=salt), self.engine(groups, salt=salt)
                tokens = prompt(7, 200)
                self.check(a, Request("cold", tokens))
                scheduler = b.connector._scheduler
                load = scheduler._load

                def lose(tracked, group, blocks, load=load, number=number):
                    # a lease keeps the blocks that it found, so other keys stand for evicted blocks
                    if group.number == number:
                        tracked = dataclasses.replace(tracked, prefix=b"other", raw=False)
                    return load(tracked, group, blocks)
                scheduler._load = lose
                self.check(b, Request("warm", tokens))
                self.assertEqual(b.failures, 1)

    def test_windows_and_states_that_went_shorten_the_hit(self):
        for name, groups, more in (("alike", ALIKE, {"window_interval": 64}), ("states", STATES, {})):
            with self.subTest(name):
                a, b = (self.engine(groups, salt=name, **more) for _ in range(2))
                tokens = prompt(8, 200)
                self.check(a, Request("cold", tokens))
                scheduler = a.connector._scheduler
                tracked = scheduler._tracked(Request("names", tokens))
                keys = scheduler._keys(tracked, scheduler._groups[0], 11, 12)
                # no lookup finds it, though it may still be written to NVMe
                self.assertEqual(sum(scheduler._links[0].ns.evict(keys)), 1)
                self.check(b, Request("warm", tokens))
                self.assertEqual(b.loaded_tokens, 128)

    def test_little_memory(self):
        """Blocks move between groups and requests while stores read. Nothing writes to a block that
        is being read."""
        for name, groups, blocks in (("alike", ALIKE, 40), ("states", STATES, 24), ("inside", INSIDE, 28), ("all", ALL_KINDS, 32)):
            with self.subTest(name):
                a = self.engine(groups, blocks=blocks, budget=48, batch=3, salt=name)
                for turn in range(2):
                    self.check(a, *(Request(f"{turn}.{i}", prompt(30 + i, 120 + 20 * i, shared=100), outputs=30) for i in range(4)))
                self.assertGreater(a.preemptions, 0)
                self.assertGreater(a.loaded_tokens, 0)
                self.assertGreater(a.pool.most_held, 0)

    def test_aborts(self):
        for name, groups in (("alike", ALIKE), ("states", STATES)):
            self.aborts(self.engine(groups, salt=name), self.engine(groups, salt=name))

    def aborts(self, a, b):
        self.check(a, Request("cold", prompt(9, 300)))
        for wait in range(6):
            b.pool.of_hash.clear()
            b.pool.hash_of.clear()
            name = f"gone{wait}"
            b.add(Request(name, prompt(9, 300), outputs=50))
            for _ in range(wait):
                b.step()
            if name in b.requests and b.requests[name].status != "finished":
                b.abort(name)
            self.check(b, Request(f"after{wait}", prompt(9, 300)), but=[name])

    def test_the_daemon_dies_and_comes_back(self):
        for name, groups in (("alike", ALIKE), ("states", STATES)):
            self.dies(self.engine(groups, transfer_timeout=2.0, salt=name), self.engine(groups, salt=name))

    def dies(self, a, b):
        self.check(a, Request("cold", prompt(12, 200)))
        self.daemon.process.kill()
        self.check(b, Request("away", prompt(12, 200)))
        self.restart()
        self.connected(a)
        a.pool = Pool(a.blocks, a.groups)

        self.check(a, Request("again", prompt(12, 200)))
        self.connected(b)
        b.pool = Pool(b.blocks, b.groups)

        self.check(b, Request("warm", prompt(12, 200)))
        self.assertEqual(b.loaded_tokens, 192)

    def test_a_reset_while_blocks_are_stored(self):
        """As in test_vllm_trouble.py. Also, windows' blocks are held for running requests."""
        e, first, tokens = self.engine(), Request("first", prompt(41, 200), 4), prompt(42, 200)
        with mock.patch.object(Task, "check", return_value=None), mock.patch.object(worker, "_STOP", 0.05):
            finish(e, first)
            self.assertGreater(e.pool.held, 0)
            self.assertTrue(e.reset_prefix_cache())
            self.assertEqual(e.pool.held, 0)
            second = Request("second", tokens, 2)
            finish(e, second)
        self.right(e, first)
        self.right(e, second)
        b = self.engine()
        self.check(b, Request("first again", prompt(41, 200)), Request("second again", tokens))

    def test_reset_and_adapters(self):
        a, b = self.engine(), self.engine()
        lora = SimpleNamespace(lora_path="/adapters/a", lora_int_id=1)
        self.check(a, Request("plain", prompt(13, 100)))
        self.check(b, Request("adapter", prompt(13, 100), lora=lora))
        self.assertEqual(b.loaded_tokens, 0)
        self.assertTrue(a.reset_prefix_cache(external=True))
        self.check(a, Request("after", prompt(13, 100)))
        self.assertEqual(a.loaded_tokens, 0)


class Parts(unittest.TestCase):
    def refused(self, words, spec=None, groups=ALIKE, config=(), **given):
        made = HybridEngine(MODEL, groups=groups)
        for name, value in dict(config).items():
            setattr(made.config, name, value)
        for name, value in (spec or {}).items():
            setattr(made.kv_config.kv_cache_groups[0].kv_cache_spec, name, value)
        with self.assertRaisesRegex(identity.Unsupported, words):
            found = groups_module.groups_of(made.kv_config)
            groups_module.check_hybrid(made.config, made.kv_config, found, settings.Settings.parse(extra_of(given)))

    def test_refusals_say_what_to_do(self):
        self.refused('remove the setting .encoding', encoding="lossless")
        self.refused("remove the setting .summaries", summaries="mean")
        self.refused("remove the settings async_load", async_load=False)
        self.refused("--block-size", spec={"block_size": 24})
        state = {"mamba_cache_mode": "none"}
        self.refused("--mamba-cache-mode align", groups=STATES, spec=state)
        self.refused("speculative", groups=STATES, config={"speculative_config": object()})
        chunked = HybridEngine(MODEL).kv_config
        chunked.kv_cache_groups[0].kv_cache_spec = type("ChunkedLocalAttentionSpec", (), {"block_size": 16})()
        with self.assertRaisesRegex(identity.Unsupported, "ChunkedLocal.*--disable-hybrid"):
            groups_module.groups_of(chunked)

    def test_what_a_window_needs(self):
        """At each count of tokens, it keeps at least the pages that vLLM keeps, and one token more.
        """
        for window in (1, 16, 17, 40, 128):
            group = groups_module.Group(0, groups_module.WINDOW, 16, window, ())
            for tokens in range(1, 300):
                needed = max(0, tokens - window + 1) // 16
                self.assertLessEqual(group.first(tokens), needed)
                self.assertLessEqual(group.first(tokens), max(0, tokens - 1 - window + 1) // 16)
                self.assertEqual(group.kept_from(tokens), needed)

    def test_marks(self):
        keys = bytes(range(96))
        one, other = groups_module.marked(keys, b"\x01" * 32, 32), groups_module.marked(keys, b"\x02" * 32, 32)
        self.assertEqual(one, bytes(i ^ 1 for i in keys))
        self.assertNotEqual(one, other)
        self.assertEqual(groups_module.marked(b"", b"\x01" * 32, 32), b"")
        self.assertEqual(groups_module.marked(keys[:32], b"\x01" * 32, 16), bytes(i ^ 1 for i in keys[:32]))


if __name__ == "__main__":
    watch()
    unittest.main()
