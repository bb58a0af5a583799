#!/usr/bin/python3
"""Which weights, and which version of a LoRA adapter, an engine's KV belongs to. Against a real
daemon, in the small engine of tests/engines/vllm. KV of other weights is never loaded, and none is
stored under other weights' name."""

import os
import shutil
import sys
import tempfile
import time
import unittest
from types import SimpleNamespace
from unittest import mock

from vllm_case import BLOCK, Case, Engine, Request, engine, prompt, watch  # sets the paths
from ucmclient.engine import weights
from ucmclient.client import Task
from ucmclient.engine.vllm import adapters, connector, watching
from ucmclient.engine.vllm.plan import Plan
from ucmclient.engine.weights import files_at


class Weights(Case):
    def another_process(self):
        """An engine that does not know which files the others have read."""
        adapters._read.clear()
        return self.engine()

    def test_adapters_are_what_was_read_of_them(self):
        """Not the files as they are when a request comes, nor as they became while they were read.
        """
        tokens, writer, reader = prompt(9, 100), self.engine(), self.engine()
        old = self.adapter("old weights")
        writer.add_lora(old)
        new = self.adapter("new", directory=old.lora_path)
        self.check(writer, Request("with the old ones", tokens, lora=old))
        with self.assertLogs("ucmclient.engine.vllm", "WARNING"), adapters.reading(reader, new):
            self.adapter("newer", directory=new.lora_path)
        reader.adapters.add(1)
        self.check(reader, Request("with either", tokens, lora=new))
        self.assertEqual((reader.loaded_tokens, self.stats()["dump_blocks"]), (0, 0))

    def test_an_adapter_that_is_read_again(self):
        """Like an engine whose cache of adapters is full. From then on its KV is that of the new
        files."""
        tokens, lora = prompt(9, 100), self.adapter("old weights")
        a = self.engine()
        self.check(a, Request("old", tokens, lora=lora))
        self.adapter("new", directory=lora.lora_path)
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
            for path, change in (("~", lambda i: self.adapter(str(i) * (i + 1), directory=home)), ("org/adapter", lambda i: commit.__setitem__(0, "abc"[i]))):
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

    def test_a_hub_is_not_asked_at_each_request(self):
        looks, lora = [], SimpleNamespace(lora_name="l", lora_int_id=1, lora_path="org/once")

        def snapshot_download(name, revision=None, local_files_only=False):
            looks.append(name)
            return f"/hub/models--org--once/snapshots/{self.id()}"
        with mock.patch.dict(sys.modules, huggingface_hub=SimpleNamespace(snapshot_download=snapshot_download)):
            e = self.another_process()
            e.add_lora(lora)
            at_the_load = len(looks)
            for i in range(5):
                self.check(e, Request(f"{i}", prompt(i, 50), lora=lora))
            self.assertGreater(at_the_load, 0)
            self.assertEqual(len(looks), at_the_load)

    def test_weights_that_change_in_a_running_engine(self):
        """They change in any of vLLM's ways, with or without a reset afterwards. No older KV is
        loaded, and no other engine gets the new."""
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
        """The scheduler's process does not see them, but gets a report."""
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
        """If files were replaced while a model was read, its KV gets neither the old files' name
        nor the new ones'."""
        directory, tokens = tempfile.mkdtemp(), prompt(9, 100)
        self.addCleanup(shutil.rmtree, directory)
        path = os.path.join(directory, "model.safetensors")

        def write(text):
            with open(path, "w", encoding="ascii") as file:
                file.write(text)
            self.eventually(lambda: files_at(directory).settled)

        def loaded(between=lambda: None, begins=weights.begins):
            def configuration(*of):
                config, kv_config = engine.configuration(*of)
                config.model_config.model = directory
                begins(directory)
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


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
