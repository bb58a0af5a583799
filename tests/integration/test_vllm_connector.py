#!/usr/bin/python3
"""The vLLM connector against a real daemon, in a small paged engine (tests/engines/vllm). Requests
get the same outputs, bit for bit, as without a cache."""

import os
import threading
import unittest

from vllm_case import BLOCK, Case, Request, daemon, engine, prompt, watch


class Sharing(Case):
    def share(self, ranks=1, **more):
        a, b = self.engine(ranks=ranks, **more), self.engine(ranks=ranks, **more)
        return self.handed_on(a, b, prompt(1, 150), 150 // BLOCK * BLOCK)

    def test_another_engine_loads_what_one_has_computed(self):
        self.share()

    def test_the_daemon_learns_whose_requests_they_are(self):
        try:
            import second_client
        except ImportError:  # an engine's Python
            self.skipTest("there is no msgpack")
        operator = second_client.Client(self.daemon)
        operator.call("trace", op=1)
        self.share()
        seen = {(record["method"], record["request"]) for record in operator.call("trace", op=2)["records"]}
        self.assertLessEqual({("lookup", "cold"), ("dump", "cold"), ("lookup", "warm"), ("load", "warm")}, seen)
        self.assertNotIn("", {request for _, request in seen})

    def test_layouts(self):
        for layout in ("fused", "packed"):
            with self.subTest(layout):
                self.share(layout=layout, salt=layout)

    def test_engines_of_different_layouts_do_not_share(self):
        self.share(layout="split")
        other = self.engine(layout="fused")
        self.check(other, Request("other", prompt(1, 150)))
        self.assertEqual(other.loaded_tokens, 0)

    def test_loads_within_the_step(self):
        self.share(async_load=False)

    def test_layer_after_layer(self):
        for layout in ("split", "fused", "packed"):
            with self.subTest(layout):
                self.share(async_load=False, layerwise=True, layout=layout, salt=layout)

    def test_two_ranks_keep_their_heads(self):
        self.share(ranks=2)
        self.assertEqual(self.stats()["load_blocks_dram"], 2 * (150 // BLOCK))

    def test_ranks_that_hold_the_same_store_it_once(self):
        self.share(ranks=2, replicated=True)
        self.assertEqual(self.stats()["dump_blocks"], 157 // BLOCK)

    def test_a_full_hit_leaves_the_last_token(self):
        self.handed_on(self.engine(), self.engine(), prompt(2, 8 * BLOCK), 8 * BLOCK - 1)

    def test_outputs_are_stored_too(self):
        a, b = self.engine(), self.engine()
        cold = Request("cold", prompt(3, 40), outputs=60)
        self.check(a, cold)
        self.check(b, Request("next turn", cold.tokens + prompt(4, 20)))
        self.assertEqual(b.loaded_tokens, 99 // BLOCK * BLOCK)

    def test_long_prompts_in_chunks_share_their_beginning(self):
        a, b = self.engine(budget=48), self.engine(budget=48, blocks=128)
        self.check(a, Request("first", prompt(5, 300, shared=200)))
        self.check(b, *(Request(f"r{i}", prompt(10 + i, 260, shared=200), outputs=4) for i in range(4)))
        self.assertGreaterEqual(b.loaded_tokens, 200 // BLOCK * BLOCK)

    def test_what_the_engine_has_itself_is_not_loaded(self):
        a, b = self.engine(), self.engine()
        self.check(a, Request("cold", prompt(6, 200, shared=100)))
        self.check(b, Request("part", prompt(7, 100, shared=100)))
        loaded = b.loaded_tokens
        self.check(b, Request("rest", prompt(6, 200, shared=100)))
        self.assertEqual(b.loaded_tokens - loaded, 200 // BLOCK * BLOCK - 100 // BLOCK * BLOCK)

    def test_what_the_daemon_lost_of_it_is_stored_again(self):
        a, b = self.engine(), self.engine()
        tokens = prompt(8, 100)
        self.check(a, Request("cold", tokens))
        ns = a.connector._scheduler.link.ns
        self.assertGreater(sum(ns.evict()), 0)
        self.eventually(lambda: ns.evict()[1] == 0)  # a block that is still being written could not be stored again
        self.check(a, Request("local hit", tokens))
        self.check(b, Request("warm", tokens))
        self.assertEqual(b.loaded_tokens, 100 // BLOCK * BLOCK)

    def test_salts_and_adapters_keep_apart(self):
        a, b, other = self.engine(), self.engine(), self.engine(salt="another")
        tokens = prompt(9, 100)
        lora = self.adapter()
        b.add_lora(lora)
        self.check(a, Request("plain", tokens))
        self.check(other, Request("namespace", tokens))
        self.assertEqual(other.loaded_tokens, 0)
        for name, salt, adapter in (("tenant", "t", None), ("adapter", "", lora)):
            with self.subTest(name):
                self.check(b, Request(name, tokens, salt=salt, lora=adapter))
                self.assertEqual(b.loaded_tokens, 0)
                b.pool = engine.Pool(b.blocks)
        self.check(b, Request("adapter again", tokens, lora=lora))
        self.assertEqual(b.loaded_tokens, 100 // BLOCK * BLOCK)

    def test_lookups_of_what_nobody_has_wait_for_nobody(self):
        """The daemon counts them, and the hits of others, like lookups that reached it."""
        a, b = self.engine(), self.engine()
        for e in (a, b):
            scheduler = e.connector._scheduler
            self.eventually(lambda: scheduler.link.ns.lookup_table_read(bytes(32)) is not None)
        before = self.stats()
        for i in range(4):
            self.check(a, Request(f"cold{i}", prompt(900 + i, 100)))
        for i in range(4):
            self.check(b, Request(f"warm{i}", prompt(900 + i, 100)))
        counts = [e.connector._scheduler.lookup_table.counts for e in (a, b)]
        self.assertGreater(counts[0].spared, 0)
        self.assertEqual((counts[1].spared, counts[1].asked), (0, 4))
        self.assertEqual([count.false_hits + count.false_misses for count in counts], [0, 0])
        self.assertGreaterEqual(self.stats()["lookups"] - before["lookups"], 8)
        self.assertEqual(self.stats()["lookup_hits"] - before["lookup_hits"], 4 * (100 // BLOCK))

    def test_two_engines_at_once(self):
        engines = [self.engine(blocks=40) for _ in range(2)]
        rounds = [[Request(f"{n}.{i}", prompt(20 + (i * (n + 1)) % 9, 120 + 9 * i, shared=48 * (i % 3)), outputs=12)
                   for i in range(9)] for n in range(2)]
        failures = []

        def serve(e, requests):
            try:
                self.check(e, *requests)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=serve, args=pair) for pair in zip(engines, rounds)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failures, [])

    def test_prefill_hands_over_to_decode(self):
        a, b = self.engine(), self.engine()
        tokens = prompt(12, 150)
        first = Request("prefill", tokens, outputs=1, transfer={"ucmd_prefill": True})
        self.check(a, first)
        self.assertEqual(first.answer, {"ucmd_blocks": 150 // BLOCK})
        self.check(b, Request("decode", tokens, transfer=first.answer))
        self.assertEqual(b.loaded_tokens, 150 // BLOCK * BLOCK)

    def test_decode_waits_for_what_prefill_still_stores(self):
        a, b = self.engine(), self.engine()
        tokens = prompt(13, 150)
        b.add(Request("early", tokens, transfer={"ucmd_blocks": 150 // BLOCK}))
        for _ in range(3):
            b.step()
        self.assertEqual(b.requests["early"].num_computed_tokens, 0)
        self.check(a, Request("prefill", tokens, outputs=1))
        self.check(b)
        self.assertEqual(b.loaded_tokens, 150 // BLOCK * BLOCK)

    def test_decode_computes_what_never_comes(self):
        e = self.engine(handover_wait=0.1)
        self.check(e, Request("alone", prompt(14, 100), transfer={"ucmd_blocks": 6}),
                   Request("odd", prompt(15, 40), transfer={"ucmd_blocks": "many"}))
        self.assertEqual(e.loaded_tokens, 0)

    def test_roles(self):
        a, b, c = self.engine(role="kv_consumer"), self.engine(role="kv_producer"), self.engine()
        tokens = prompt(16, 100)
        self.check(a, Request("a", tokens))
        self.check(b, Request("b", tokens))
        self.assertEqual((a.loaded_tokens, b.loaded_tokens, self.stats()["dump_blocks"]), (0, 0, 107 // BLOCK))
        a.pool = engine.Pool(a.blocks)
        self.check(a, Request("again", tokens))
        self.assertEqual(a.loaded_tokens, 100 // BLOCK * BLOCK)
        self.check(c, Request("c", tokens))

    def test_a_handshake_that_did_not_arrive(self):
        a, b = self.engine(handshake=False, ranks=2), self.engine(ranks=2)
        tokens = prompt(17, 100)
        self.check(a, Request("first", prompt(18, 40)), Request("cold", tokens))
        self.check(b, Request("warm", tokens))
        self.assertGreater(b.loaded_tokens, 0)

    def test_what_was_reset_is_not_loaded(self):
        a, b, kept = self.engine(), self.engine(), self.engine(keep_on_reset=True)
        tokens = prompt(19, 100)
        self.check(a, Request("cold", tokens))
        for e in (a, kept):
            self.assertTrue(e.reset_prefix_cache(external=True))
            self.check(e, Request("void", tokens))
        self.assertEqual((a.loaded_tokens, kept.loaded_tokens), (0, 100 // BLOCK * BLOCK))
        self.assertTrue(a.reset_prefix_cache())
        self.check(a, Request("its own", tokens))
        self.assertEqual(a.loaded_tokens, 100 // BLOCK * BLOCK)
        self.check(b, Request("others", tokens))
        self.assertEqual(b.loaded_tokens, 100 // BLOCK * BLOCK)

    def test_sleep(self):
        a, b = self.engine(), self.engine()
        tokens = prompt(110, 100)
        self.check(a, Request("cold", tokens))
        links = [a.connector._scheduler.link]
        a.sleep()
        self.assertEqual(self.stats()["regions"], 1)
        a.wake()
        self.assertEqual(self.stats()["regions"], 2)
        self.check(a, Request("warm", tokens), Request("new", prompt(111, 60)))
        self.assertEqual(links, [a.connector._scheduler.link])
        self.check(b, Request("shared", prompt(111, 60)))
        self.assertGreater(b.loaded_tokens, 0)

    def test_waking_without_a_daemon(self):
        a = self.engine(connect_timeout=0.5)
        tokens = prompt(112, 100)
        self.check(a, Request("cold", tokens))
        socket = self.daemon.socket
        a.sleep()
        self.daemon.stop()
        a.wake()
        self.check(a, Request("alone", tokens))
        os.makedirs(os.path.dirname(socket), exist_ok=True)
        self.daemon = daemon(socket=socket)
        self.eventually(lambda: self.loads(a, prompt(113, 60)))

    def test_settings_that_only_load_or_only_store(self):
        a, b, c = self.engine(store=False), self.engine(load=False), self.engine()
        tokens = prompt(11, 100)
        self.check(a, Request("a", tokens))
        self.check(c, Request("c", tokens, outputs=1))
        self.assertEqual(c.loaded_tokens, 0)
        self.check(b, Request("b", tokens))
        self.assertEqual(b.loaded_tokens, 0)


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
