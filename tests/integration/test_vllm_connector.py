#!/usr/bin/env python3
"""The vLLM connector against a real daemon, in a small paged engine (tests/vllm): what requests get out of it is the
same bit for bit as without a cache."""

import os
import shutil
import sys
import tempfile
import threading
import time
import unittest
from types import SimpleNamespace
from unittest import mock

from vllm_case import BLOCK, Case, Engine, Request, daemon, engine, expected, prompt, watch

from ucmclient import weights
from ucmclient.client import Task
from ucmclient.vllm import adapters, connector, watching
from ucmclient.vllm.plan import Plan
from ucmclient.weights import files_at


class Sharing(Case):
    def share(self, ranks=1, first=None, **more):
        a, b = self.engine(ranks=ranks, **more), self.engine(ranks=ranks, **more)
        tokens = prompt(1, 150)
        self.check(a, Request("cold", tokens))
        self.assertEqual(a.loaded_tokens, 0)
        self.check(b, Request("warm", tokens))
        self.assertEqual(b.loaded_tokens, 150 // BLOCK * BLOCK)
        return a, b

    def test_another_engine_loads_what_one_has_computed(self):
        self.share()

    def test_the_daemon_learns_whose_requests_they_are(self):
        try:
            import second_client
        except ImportError:  # another Python than Debian's is first in PATH
            self.skipTest("there is no msgpack")
        operator = second_client.Client(self.daemon)
        operator.call("trace", op=1)
        self.share()
        seen = {(record["method"], record["request"]) for record in operator.call("trace", op=2)["records"]}
        self.assertLessEqual({("lookup", "cold"), ("dump", "cold"), ("lookup", "warm"), ("load", "warm")}, seen)
        self.assertNotIn("", {request for _, request in seen})

    def test_layouts(self):
        for layout in ("fused", "cross", "packed"):
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
        a, b = self.engine(), self.engine()
        tokens = prompt(2, 8 * BLOCK)
        self.check(a, Request("cold", tokens))
        self.check(b, Request("warm", tokens))
        self.assertEqual(b.loaded_tokens, 8 * BLOCK - 1)

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
        self.assertGreater(a.connector._scheduler.link.ns.evict()[0], 0)
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

    def adapter(self, text="weights", number=1, folder=None, path=None):
        """A LoRA adapter whose files nobody has touched for as long as a file system's clock takes to tick."""
        if folder is None:
            folder = tempfile.mkdtemp()
            self.addCleanup(shutil.rmtree, folder)
        with open(os.path.join(folder, "adapter_model.safetensors"), "w", encoding="ascii") as file:
            file.write(text)
        self.eventually(lambda: files_at(folder, ("",)).settled)
        return SimpleNamespace(lora_name="l", lora_int_id=number, lora_path=path or folder)

    def another_process(self):
        """An engine that knows nothing of what the others have read."""
        adapters._read.clear()
        return self.engine()

    def test_adapters_are_what_was_read_of_them(self):
        """Not what their files are when a request comes, or came to be while they were read."""
        tokens, writer, reader = prompt(9, 100), self.engine(), self.engine()
        old = self.adapter("old weights")
        writer.add_lora(old)
        new = self.adapter("new", folder=old.lora_path)
        self.check(writer, Request("with the old ones", tokens, lora=old))
        with self.assertLogs("ucmclient.vllm", "WARNING"), adapters.reading(reader, new):
            self.adapter("newer", folder=new.lora_path)
        reader.adapters.add(1)
        self.check(reader, Request("with either", tokens, lora=new))
        self.assertEqual((reader.loaded_tokens, self.stats()["dump_blocks"]), (0, 0))

    def test_an_adapter_that_is_read_again(self):
        """As an engine does whose cache of adapters is full: from then on its KV is that of the new files."""
        tokens, lora = prompt(9, 100), self.adapter("old weights")
        a = self.engine()
        self.check(a, Request("old", tokens, lora=lora))
        self.adapter("new", folder=lora.lora_path)
        a.adapters.clear()
        a.pool = engine.Pool(a.blocks)
        self.check(a, Request("new", tokens, lora=lora))
        b = self.engine()
        b.add_lora(lora)
        self.check(b, Request("new, too", tokens, lora=lora))
        self.assertEqual((a.loaded_tokens, self.stats()["dump_blocks"]), (0, 12))
        self.assertEqual(b.loaded_tokens, 100 // BLOCK * BLOCK)

    def test_nothing_is_loaded_for_an_adapter_before_it_is_read(self):
        tokens, lora = prompt(9, 100), self.adapter()
        self.check(self.engine(), Request("cold", tokens, lora=lora))
        b = self.another_process()
        self.check(b, Request("reads it", tokens, lora=lora))
        self.assertEqual(self.stats()["load_blocks_dram"], 0)
        b.pool = engine.Pool(b.blocks)
        self.check(b, Request("has read it", tokens, lora=lora))
        self.assertEqual(self.stats()["load_blocks_dram"], 6)

    def test_adapters_by_other_paths(self):
        """In a home, or by a hub's name, whose commit counts; without one nothing is shared."""
        home, tokens = tempfile.mkdtemp(), prompt(9, 100)
        self.addCleanup(shutil.rmtree, home)
        commit = [None]

        def snapshot_download(name, revision=None, local_files_only=False):
            if commit[0] is None or not local_files_only or name != "org/adapter":
                raise FileNotFoundError(name)
            return f"/hub/models--org--adapter/snapshots/{commit[0]}"
        hub = SimpleNamespace(snapshot_download=snapshot_download)
        with mock.patch.dict(os.environ, HOME=home), mock.patch.dict(sys.modules, huggingface_hub=hub):
            for path, change in (("~", lambda i: self.adapter(str(i) * (i + 1), folder=home)), ("org/adapter", lambda i: commit.__setitem__(0, "abc"[i]))):
                hits = []
                for i, changed in enumerate((True, False, True)):
                    if changed:
                        change(i)
                    lora = SimpleNamespace(lora_name="l", lora_int_id=1, lora_path=path)
                    e = self.another_process()
                    e.add_lora(lora)
                    self.check(e, Request(f"{path}{i}", tokens, lora=lora))
                    hits.append(e.loaded_tokens)
                self.assertEqual(hits, [0, 100 // BLOCK * BLOCK, 0], path)
            commit[0] = None
            e, before = self.engine(), self.stats()["dump_blocks"]
            self.check(e, Request("nowhere", tokens, lora=SimpleNamespace(lora_name="l", lora_int_id=1, lora_path="org/adapter")))
            self.assertEqual(self.stats()["dump_blocks"], before)

    def test_weights_that_change_in_a_running_engine(self):
        """By any of vLLM's ways, with a reset behind it or without: nothing older is loaded, and what comes is no other engine's."""
        tokens, hit = prompt(9, 100), 100 // BLOCK * BLOCK
        for keeps, what, counts in ((False, "update_weights", True), (False, "a function", True), (False, "list_loras", False), (True, "reload_weights", True),
                                    (True, "a function", False)):
            with self.subTest(what, keeps=keeps):
                salt = f"{what} {keeps}"
                a, b = (self.engine(salt=salt, keep_on_reset=keeps) for _ in range(2))
                self.check(a, Request("cold", tokens))
                watching.changed(what)
                self.assertTrue(a.reset_prefix_cache())
                self.check(a, Request("behind it", tokens))
                self.assertEqual(a.loaded_tokens, 0 if counts else hit)
                a.reset_prefix_cache()
                loaded = a.loaded_tokens
                self.check(a, Request("once more", tokens))
                self.assertEqual(a.loaded_tokens - loaded, hit, "it shares with itself")
                self.check(b, Request("another", prompt(9, 100)))
                self.assertEqual(b.loaded_tokens, 0 if counts else hit, "it is of this process, too")

    def test_weights_that_change_while_a_load_is_under_way(self):
        for more in ({}, {"ranks": 2}):
            with self.subTest(**more):
                a, b = (self.engine(salt=str(more), **more) for _ in range(2))
                self.check(a, Request("cold", prompt(9, 200)))
                request = Request("warm", prompt(9, 200))
                with mock.patch.object(Task, "check", return_value=None):
                    b.add(request)
                    while request.status != "loading":
                        b.step()
                    b.step()
                    watching.changed("update_weights")
                    b.step()
                self.check(b)
                self.same({"warm": request})
                self.assertEqual(b.recomputed, 1)

    def test_weights_that_change_in_a_worker_alone(self):
        """Which the scheduler's process does not see, but is told."""
        a, tokens = self.engine(), prompt(9, 100)
        self.check(a, Request("cold", tokens))
        worker = a.ranks[0].connector
        with mock.patch.object(connector.os, "getpid", return_value=1), mock.patch.object(watching, "changes", return_value=77):
            worker.bind_connector_metadata(connector.UcmMetadata(Plan()))
            said = worker.build_connector_worker_meta().aggregate(connector.UcmProgress(0))
        a.connector.update_connector_output(SimpleNamespace(finished_recving=None, invalid_block_ids=None, kv_connector_worker_meta=said))
        a.reset_prefix_cache()
        self.check(a, Request("behind it", tokens))
        self.assertEqual(a.loaded_tokens, 0)

    def test_a_reset_of_an_engine_that_shows_no_changes(self):
        a, tokens = self.engine(), prompt(9, 100)
        a.connector._scheduler.resets_count = True
        self.check(a, Request("cold", tokens))
        a.reset_prefix_cache()
        self.check(a, Request("behind it", tokens))
        self.assertEqual(a.loaded_tokens, 0)

    def test_weights_that_may_be_others_are_shared_with_nobody(self):
        """Files that were replaced while a model was read are named neither as the old ones nor as the new ones."""
        folder, tokens = tempfile.mkdtemp(), prompt(9, 100)
        self.addCleanup(shutil.rmtree, folder)
        path = os.path.join(folder, "model.safetensors")

        def write(text):
            with open(path, "w", encoding="ascii") as file:
                file.write(text)
            self.eventually(lambda: files_at(folder).settled)

        def loaded(between=lambda: None, begins=weights.begins):
            def configuration(*of):
                config, kv_config = engine.configuration(*of)
                config.model_config.model = folder
                begins(folder)
                between()
                return config, kv_config
            with mock.patch.object(Engine, "_configuration", staticmethod(configuration)):
                e = self.engine()
            self.check(e, Request("r", tokens))
            return e.loaded_tokens
        write("old")
        with self.assertLogs("vllm.ucmclient", "WARNING"):
            self.assertEqual(loaded(lambda: write("new weights")), 0)
        hit = 100 // BLOCK * BLOCK
        self.assertEqual([loaded(), loaded()], [0, hit], "another engine that has read the new ones")
        with self.assertLogs("vllm.ucmclient", "WARNING"):
            self.assertEqual(loaded(begins=lambda name: None), 0, "a loader that says nothing, and files that are younger than this process")
        with mock.patch.object(weights, "process_began", return_value=time.time() + 3600):
            self.assertEqual(loaded(begins=lambda name: None), hit)

    def test_lookups_of_what_nobody_has_wait_for_nobody(self):
        """And the daemon counts them, and the others' hits, as it counts lookups that it was asked for."""
        a, b = self.engine(), self.engine()
        for e in (a, b):
            scheduler = e.connector._scheduler
            self.eventually(lambda: scheduler.link.ns.lookup_hint(bytes(32)) is not None)
        before = self.stats()
        for i in range(4):
            self.check(a, Request(f"cold{i}", prompt(900 + i, 100)))
        for i in range(4):
            self.check(b, Request(f"warm{i}", prompt(900 + i, 100)))
        counts = [e.connector._scheduler.hints.counts for e in (a, b)]
        self.assertGreater(counts[0].spared, 0)
        self.assertEqual((counts[1].spared, counts[1].asked), (0, 4))
        self.assertEqual([count.false_hits + count.false_misses for count in counts], [0, 0])
        self.assertGreaterEqual(self.stats()["lookups"] - before["lookups"], 8)
        self.assertEqual(self.stats()["lookup_hits"] - before["lookup_hits"], 4 * (100 // BLOCK))

    def test_two_engines_at_once(self):
        engines = [self.engine(blocks=40) for _ in range(2)]
        rounds = [[Request(f"{n}.{i}", prompt(20 + (i * (n + 1)) % 9, 120 + 9 * i, shared=48 * (i % 3)), outputs=12)
                   for i in range(9)] for n in range(2)]
        for r in rounds[0]:
            expected(r.tokens, r.outputs)
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
