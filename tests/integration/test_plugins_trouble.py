#!/usr/bin/python3
"""Every engine's plug-in when things go wrong; vLLM's connector has test_vllm_trouble.py. The
daemon is killed, stops answering, evicts, reads damaged blocks or comes later; engines are killed.
Blocks that a plug-in calls loaded have the right bytes. Nothing is written to pages that an engine
got back, and nothing wrong is stored. The engines' classes are played."""

import ctypes
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import client_paths  # noqa: F401  sets the paths of the others
import test_lmcache
import test_page_store
import test_trtllm
import test_ucm_store
import test_vllm_tier
from daemon import Daemon, halt
from ucmclient.engine import pages
from ucmclient.memory import SharedMemory
from ucmclient.region import Task
from ucmclient.engine.vllm.link import Link

PAGES, SIZE = 24, 4096
test_trtllm.PAGES, test_trtllm.SIZE, test_vllm_tier.SIZE = PAGES, SIZE, SIZE
QUICK = {"retry_interval": 0.05, "connect_timeout": 5.0, "lookup_timeout": 5.0, "transfer_timeout": 20.0}
#: Settings for a daemon that will die or stop: late calls are tried again.
IMPATIENT = {"lookup_timeout": 0.3, "transfer_timeout": 0.3}


@functools.cache
def content(name, size):
    return hashlib.shake_256(name.encode()).digest(size)


def right(name):
    return content(name, SIZE)


class Plugin:
    """An engine's pages, and its plug-in. save() and load() return which of these names succeeded
    at these pages."""

    def __init__(self, shared):
        self.memory = SharedMemory(PAGES * SIZE) if shared else ctypes.create_string_buffer(PAGES * SIZE)
        self.address = self.memory.address if shared else ctypes.addressof(self.memory)

    def get(self, page):
        return ctypes.string_at(self.address + page * SIZE, SIZE)

    def set(self, page, data):
        ctypes.memmove(self.address + page * SIZE, data, SIZE)

    def at(self, page):
        return self.address + page * SIZE


class SGLang(Plugin):
    def __init__(self, shared, socket, settings):
        super().__init__(shared)
        from ucmclient.engine.sglang.backend import UcmStorage
        config = types.SimpleNamespace(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
                                       model_name=f"sglang{shared}", should_split_heads=False,
                                       extra_config={"interface_v1": 1, "ucm": {"socket": socket, "revision": "1", **settings}})
        self.storage = UcmStorage(config, {})
        self.storage.register_mem_pool_host(types.SimpleNamespace(
            page_size=1, page_num=PAGES, dtype="torch.bfloat16", layout="page_first", head_num=2, head_dim=8,
            get_page_buffer_meta=lambda indices: ([self.at(i) for i in indices], [SIZE] * len(indices))))
        self.close = self.storage.close

    def names(self, names):
        return [hashlib.sha256(name.encode()).hexdigest() for name in names]

    def found(self, names):
        return [self.storage.exists(name) for name in self.names(names)]

    def save(self, names, pages):
        return self.storage.batch_set_v1(self.names(names), list(pages))

    def load(self, names, pages):
        return self.storage.batch_get_v1(self.names(names), list(pages))


class Ucm(Plugin):
    def __init__(self, shared, socket, settings):
        super().__init__(shared)
        from ucmclient.engine.ucm.store_v1 import UcmdStore
        self.store = UcmdStore({"block_size": SIZE, "device_id": 0, "ucmd": {"socket": socket, "model": f"ucm{shared}", **settings}})
        self.close = self.store.close

    def found(self, names):
        return self.store.lookup([name.encode() for name in names])

    def moved(self, verb, names, pages):
        try:
            self.store.wait(verb([name.encode() for name in names], [0] * len(names), [[self.at(page)] for page in pages]))
        except RuntimeError:
            return [False] * len(names)
        return [True] * len(names)

    def save(self, names, pages):
        return self.moved(self.store.dump_data, names, pages)

    def load(self, names, pages):
        return self.moved(self.store.load_data, names, pages)


class UcmOlder(Plugin):
    """Uses the interface V0."""

    def __init__(self, shared, socket, settings):
        super().__init__(shared)
        from ucmclient.engine.ucm.store_v0 import UcmdStore
        self.store = UcmdStore({"kv_block_size": SIZE, "io_size": SIZE, "ucmd": {"socket": socket, "model": f"ucm{shared}", **settings}})
        self.close = self.store._store.close

    def found(self, names):
        return self.store.lookup(names)

    def moved(self, verb, names, pages):
        done = self.store.wait(verb(names, [0] * len(names), [self.at(page) for page in pages], [SIZE] * len(names)))
        return [done == 0] * len(names)

    def save(self, names, pages):
        return self.moved(self.store.dump_data, names, pages)

    def load(self, names, pages):
        return self.moved(self.store.fetch_data, names, pages)


class LMCache(Plugin):
    def __init__(self, shared, socket, settings):
        super().__init__(shared)
        from ucmclient.engine.lmcache.adapter import UcmL2Adapter
        self.adapter = UcmL2Adapter({"socket": socket, **settings})
        self.close = self.adapter.close

    def keys(self, names):
        return [test_lmcache.Key(name.encode(), f"lmcache{isinstance(self.memory, SharedMemory)}") for name in names]

    def objects(self, pages):
        return [types.SimpleNamespace(data_ptr=self.at(page), get_size=lambda: SIZE) for page in pages]

    def done(self, ask):
        while (result := ask()) is None:
            time.sleep(0.001)
        return result

    def found(self, names):
        keys, layout = self.keys(names), test_lmcache.LMCache.layout(SIZE)
        number = self.adapter.submit_lookup_and_lock_task(keys, layout)
        found = self.done(lambda: self.adapter.query_lookup_and_lock_result(number)).bits
        self.adapter.submit_unlock([key for key, one in zip(keys, found) if one])
        return [bool(one) for one in found]

    def save(self, names, pages):
        number = self.adapter.submit_store_task(self.keys(names), self.objects(pages))
        return [self.done(lambda: self.adapter.pop_completed_store_tasks().get(number)) >= 0] * len(names)

    def load(self, names, pages):
        number = self.adapter.submit_load_task(self.keys(names), self.objects(pages))
        return [bool(one) for one in self.done(lambda: self.adapter.query_load_result(number)).bits]


class Tier(Plugin):
    def __init__(self, shared, socket, settings):
        super().__init__(shared)
        from ucmclient.engine.vllm.tier import UcmTier
        view = memoryview((ctypes.c_uint8 * (PAGES * SIZE)).from_address(self.address)).cast("B").cast("B", (PAGES, SIZE))
        self.tier, self.jobs = UcmTier(test_vllm_tier.spec(), view, "UcmTier", socket=socket, **{"revision": "1", **settings}), 0
        self.close = self.tier.shutdown

    def found(self, names):
        self.tier._lookups.known.clear()
        return [self.tier.lookup(name.encode(), None).name == "HIT" for name in names]

    def moved(self, submit, names, pages):
        self.jobs += 1
        keys = [name.encode() for name in names]
        submit(test_vllm_tier.Job(self.jobs, keys, list(pages)))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        return [result.success or key in (result.successful_keys or ()) for key in keys]

    def save(self, names, pages):
        return self.moved(self.tier.submit_store, names, pages)

    def load(self, names, pages):
        return self.moved(self.tier.submit_load, names, pages)


class TensorRT(Plugin):
    def __init__(self, shared, socket, settings):
        super().__init__(shared)
        from ucmclient.engine.trtllm import connector as of
        self.of, tensor = of, test_trtllm.Tensor()
        tensor.memory, tensor.shape = self.memory, (PAGES, 2, SIZE // 4)
        args = types.SimpleNamespace(model="trt", tensor_parallel_size=1, kv_cache_config=types.SimpleNamespace(tokens_per_block=4))
        with mock.patch.dict(os.environ, UCM_TRTLLM=json.dumps({"socket": socket, "revision": "1", **settings})):
            self.worker = of.UcmWorker(args)
        self.worker.register_kv_caches(tensor)
        self.close = self.worker.close

    def keys(self, names):
        return [hashlib.sha256(name.encode()).digest() for name in names]

    def step(self, **meta):
        self.worker.bind_connector_meta(self.of.Meta(**meta))
        self.worker.start_load_kv(test_trtllm.Stream())
        self.worker.wait_for_save(test_trtllm.Stream())

    def found(self, names):
        return self.worker.store.each(self.keys(names))

    def save(self, names, pages):
        self.step(save=list(zip(self.keys(names), pages)))
        self.step()  # waits
        return self.found(names)

    def load(self, names, pages):
        try:
            self.step(load=list(zip(self.keys(names), pages)))
        except self.of.LoadFailed:
            return [False] * len(names)
        return [True] * len(names)


KINDS = {"SGLang": (SGLang, True), "SGLang's pages, copied": (SGLang, False), "UCM": (Ucm, True), "UCM's memory, copied": (Ucm, False),
         "UCM's older store": (UcmOlder, True), "LMCache": (LMCache, False), "LMCache, shared": (LMCache, True), "vLLM's tier": (Tier, False), "TensorRT-LLM": (TensorRT, True)}


def play():
    test_page_store.SGLang.setUpClass()
    test_ucm_store.play_ucm(), test_lmcache.play_lmcache(), test_vllm_tier.play_tiers(), test_trtllm.play_trtllm()


def forget():
    test_page_store.SGLang.tearDownClass()
    test_ucm_store.Ucm.tearDownClass()
    test_lmcache.forget_lmcache(), test_vllm_tier.forget_tiers(), test_trtllm.forget_trtllm()


class Trouble(test_page_store.Case):
    NAMES = [f"block {i}" for i in range(8)]

    @classmethod
    def setUpClass(cls):
        play()

    @classmethod
    def tearDownClass(cls):
        forget()

    def plugins(self, **settings):
        """One of each."""
        made = {name: kind(shared, self.daemon.socket, {**QUICK, **settings}) for name, (kind, shared) in KINDS.items()}
        for one in made.values():
            self.addCleanup(one.close)
        return made

    def each(self, plugins, act):
        for name, plugin in plugins.items():
            with self.subTest(name):
                act(plugin)

    def stored(self, plugin, names=NAMES):
        for page, name in enumerate(names):
            plugin.set(page, right(name))
        return plugin.save(names, range(len(names)))

    def check(self, plugin, names=NAMES, first=8):
        """Loads the blocks that are there, and compares them. Returns how many came."""
        for page in range(first, first + len(names)):
            plugin.set(page, b"\x55" * SIZE)
        good = plugin.load(names, range(first, first + len(names)))
        for page, (name, one) in enumerate(zip(names, good)):
            if one:
                self.assertEqual(plugin.get(first + page), right(name), name)
        return good.count(True)

    def comes(self, plugin, names=NAMES):
        self.eventually(lambda: all(plugin.found(names)) and self.check(plugin, names) == len(names))

    def ready(self, plugins):
        """Each has stored NAMES."""
        self.each(plugins, lambda one: self.eventually(lambda: all(self.stored(one))))

    def again(self, **more):
        """A daemon in the place of one that was killed, or stopped."""
        self.daemon.kept, directory = True, self.daemon.directory
        os.makedirs(directory, exist_ok=True)
        self.addCleanup(shutil.rmtree, directory, True)
        self.daemon = Daemon(directory=directory, **more)
        self.addCleanup(self.daemon.stop)

    def test_killed_between_and_started_again(self):
        plugins = self.plugins(**IMPATIENT)
        self.ready(plugins)
        self.each(plugins, self.comes)
        self.daemon.kill()
        self.each(plugins, lambda one: self.assertEqual((self.check(one), any(one.found(self.NAMES))), (0, False)))
        self.again(nvme=False)
        self.ready(plugins)
        self.each(plugins, self.comes)

    def at_once(self, plugins, act, strike, behind=True):
        """Runs act with each plug-in, in threads. strike happens when all requests are on their
        way, or before they begin."""
        wait, lock, struck, arrived = Task.wait, threading.Lock(), threading.Event(), []

        def held(task, *timeout):
            with lock:
                arrived.append(task)
                if len(arrived) == len(plugins) and behind:
                    strike()
                    struck.set()
            self.assertTrue(struck.wait(60))
            return wait(task, *timeout)
        if not behind:
            strike()
            struck.set()
        with mock.patch.object(Task, "wait", held), ThreadPoolExecutor(len(plugins)) as pool:
            for future in [pool.submit(act, plugin) for plugin in plugins.values()]:
                future.result(120)

    def test_killed_in_mid_move(self):
        plugins, new = self.plugins(lookup_timeout=0.3), [f"new {i}" for i in range(8)]
        for act in (self.check, lambda one: self.stored(one, new)):
            self.ready(plugins)
            self.at_once(plugins, act, self.daemon.kill)
            self.again(nvme=False)
            self.ready(plugins)
            self.each(plugins, self.comes)

    def stop(self):
        halt(self.daemon.process.pid)

    def test_stopped_in_mid_load(self):
        """When a load has failed, its pages are the engine's again. Nothing is written to them
        later."""
        for behind in (True, False):
            plugins = self.plugins(**IMPATIENT)
            self.ready(plugins)

            def act(one):
                one.load(self.NAMES, range(8, 16))
                for page in range(8, 16):
                    one.set(page, b"\x77" * SIZE)
            try:
                self.at_once(plugins, act, self.stop, behind)
                before = {name: [one.get(page) for page in range(PAGES)] for name, one in plugins.items()}
            finally:
                self.daemon.process.send_signal(signal.SIGCONT)
            self.each(plugins, lambda one: self.eventually(lambda: all(one.found(self.NAMES))))
            self.assertEqual({name: [one.get(page) for page in range(PAGES)] for name, one in plugins.items()}, before)
            self.each(plugins, self.comes)

    def test_stopped_amid_a_copy(self):
        """When the daemon runs again, it finishes a fragment of the copy. Until then the pages are
        not the engine's."""
        size, names, wait, cut = 8 << 20, self.NAMES[:4], Task.wait, Link._drop
        self.daemon.stop()
        self.daemon = Daemon(nvme=False, **{"arena.size": "256MiB", "arena.slab": "16MiB"})
        self.addCleanup(self.daemon.stop)
        gone_on, theirs = [], b"\x66" * size

        def late(task, _):
            return wait(task, 0.2)

        def dropped(link):
            cut(link)
            if not gone_on:
                gone_on.append(threading.Timer(0.5, self.daemon.process.send_signal, (signal.SIGCONT,)))
                gone_on[0].start()
        with mock.patch.multiple(sys.modules[__name__], SIZE=size, PAGES=8), mock.patch.object(pages, "_GRACE", 0.2), \
                mock.patch.multiple(test_trtllm, SIZE=size, PAGES=8):
            for kind in (SGLang, Ucm, UcmOlder, LMCache, TensorRT):
                plugin = kind(True, self.daemon.socket, QUICK)
                self.addCleanup(plugin.close)
                self.eventually(lambda: all(self.stored(plugin, names)))
                for moment in (1, 4):
                    self.eventually(lambda: all(plugin.found(names)))
                    gone_on.clear()
                    strike = threading.Timer(0.002 * moment, self.stop)
                    with self.subTest(kind.__name__, moment=moment), mock.patch.object(Task, "wait", late), mock.patch.object(Link, "_drop", dropped):
                        strike.start()
                        good = plugin.load(names, range(4, 8))
                        for page in range(4, 8):
                            plugin.set(page, theirs)
                        strike.join()
                        for timer in gone_on:
                            timer.join()
                        self.daemon.process.send_signal(signal.SIGCONT)
                        self.eventually(lambda: all(plugin.found(names)))
                        kept = [plugin.get(page) == theirs for page in range(4, 8)]
                        self.assertEqual(kept, [True] * 4, good)

    def test_stopped_in_mid_save(self):
        """When a save has failed, the engine writes to its pages again. That is not stored under
        the old name."""
        for behind in (True, False):
            plugins, new = self.plugins(**IMPATIENT), [f"new {behind} {i}" for i in range(8)]
            self.ready(plugins)

            def act(one):
                self.stored(one, new)
                for page in range(8):
                    one.set(page, b"\x77" * SIZE)
            try:
                self.at_once(plugins, act, self.stop, behind)
            finally:
                self.daemon.process.send_signal(signal.SIGCONT)

            def after(one):
                self.eventually(lambda: all(one.found(self.NAMES)))
                there = [name for name, found in zip(new, one.found(new)) if found]
                if there:
                    self.comes(one, there)
                self.eventually(lambda: all(self.stored(one, new)))
                self.comes(one, new)
            self.each(plugins, after)

    def test_an_engine_that_waits_no_longer(self):
        """A transfer ends when the engine's wait for it ends, even if the transfer might take
        longer, for example after others."""
        from ucmclient.engine.trtllm import connector as trtllm
        from ucmclient.engine.ucm import core as ucm
        from ucmclient.engine.vllm import tier
        deadline, new = 2.0, [f"new {i}" for i in range(8)]
        plugins = {name: one for name, one in self.plugins(lookup_timeout=0.3, transfer_timeout=deadline).items() if isinstance(one, (Ucm, UcmOlder, Tier, TensorRT))}
        self.ready(plugins)
        self.stop()
        try:
            with mock.patch.object(ucm, "_PATIENCE", 0.2 - deadline), mock.patch.object(tier, "_PATIENCE", 0.2 - deadline), \
                    mock.patch.object(trtllm, "_PATIENCE", 0.2 - 2 * deadline):
                for name, one in plugins.items():
                    if isinstance(one, TensorRT):
                        self.assertFalse(any(self.stored(one, new)), name)
                        pages = range(8)
                    else:
                        self.assertFalse(any(one.load(self.NAMES, range(8, 16))), name)
                        pages = range(8, 16)
                    for page in pages:
                        one.set(page, b"\x77" * SIZE)
            before = {name: [one.get(page) for page in range(PAGES)] for name, one in plugins.items()}
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)
        self.each(plugins, lambda one: self.eventually(lambda: all(one.found(self.NAMES))))
        self.assertEqual({name: [one.get(page) for page in range(PAGES)] for name, one in plugins.items()}, before)
        self.each(plugins, lambda one: self.check(one, [name for name in new if all(one.found([name]))]))
        self.each(plugins, self.comes)

    def test_before_the_daemon(self):
        self.daemon.stop()
        plugins = self.plugins(connect_timeout=0.3, **IMPATIENT)
        self.each(plugins, lambda one: self.assertEqual((self.check(one), any(one.found(self.NAMES)), any(self.stored(one))), (0, False, False)))
        self.again(nvme=False)
        self.ready(plugins)
        self.each(plugins, self.comes)

    def test_the_daemon_evicts(self):
        self.daemon.stop()
        self.daemon = Daemon(nvme=False, **{"arena.size": "1MiB", "arena.slab": "1MiB"})
        self.addCleanup(self.daemon.stop)
        for name, (kind, shared) in KINDS.items():
            with self.subTest(name):
                plugin = kind(shared, self.daemon.socket, QUICK)
                self.addCleanup(plugin.close)
                for i in range(40):
                    self.stored(plugin, [f"{name} {i} {j}" for j in range(8)])
                came = sum(self.check(plugin, [f"{name} {i} {j}"]) for i in range(40) for j in range(8))
                self.assertTrue(0 < came < 320, came)

    def test_damaged_blocks(self):
        """One bit of some blocks is flipped on disk. They are misses, or their loads fail."""
        self.daemon.stop()
        self.daemon = Daemon()
        plugins = self.plugins()
        self.each(plugins, lambda one: self.assertEqual(self.stored(one), [True] * 8))
        self.eventually(lambda: self.stats()["nvme_writes"] >= 8 * len(plugins))
        self.each(plugins, lambda one: one.close())
        self.daemon.kept = True
        self.daemon.stop()
        damaged = self.NAMES[1::3]
        self.damage(os.path.join(self.daemon.store, "ucmd.cache"), [right(name)[:256] for name in damaged])
        self.again()

        def act(one):
            for i, name in enumerate(self.NAMES):
                self.assertEqual(self.check(one, [name], 8 + i), int(name not in damaged), name)
        self.each(self.plugins(), act)
        self.assertGreater(self.stats()["nvme_corrupt"], 0)

    def damage(self, path, payloads):
        with open(path, "r+b") as file:
            data, seen = file.read(64 << 20), 0
            for payload in payloads:
                at = data.find(payload)
                while at >= 0:
                    file.seek(at + 100)
                    file.write(bytes([data[at + 100] ^ 4]))
                    seen, at = seen + 1, data.find(payload, at + 1)
        self.assertEqual(seen, len(payloads) * len(KINDS))

    def test_engines_that_are_killed(self):
        """Engines are killed during saves and loads. Their regions and leases go with them, and
        what they saved is right."""
        child = subprocess.Popen([sys.executable, "-B", os.path.abspath(__file__), "engines", self.daemon.socket], stdout=subprocess.PIPE)
        self.assertEqual(child.stdout.readline(), b"busy\n")
        self.assertGreaterEqual(self.stats()["regions"], len(KINDS))
        child.kill()
        child.communicate()
        self.eventually(lambda: (self.stats()["regions"], self.stats()["leases"]) == (0, 0))
        self.each(self.plugins(), self.comes)

    def test_nothing_is_left(self):
        plugins = self.plugins()
        self.each(plugins, lambda one: self.assertEqual(self.stored(one), [True] * 8))
        self.each(plugins, self.comes)
        self.each(plugins, lambda one: one.close())
        self.eventually(lambda: (self.stats()["regions"], self.stats()["leases"]) == (0, 0))


def engines(socket):
    """One of each, which store and load without an end."""
    play()

    def busy(name, begun):
        kind, shared = KINDS[name]
        plugin = kind(shared, socket, QUICK)
        while True:
            for page, one in enumerate(Trouble.NAMES):
                plugin.set(page, right(one))
            plugin.save(Trouble.NAMES, range(8))
            plugin.found(Trouble.NAMES)
            plugin.load(Trouble.NAMES, range(8, 16))
            begun.set()
    begun = {name: threading.Event() for name in KINDS}
    for name in KINDS:
        threading.Thread(target=busy, args=(name, begun[name]), daemon=True).start()
    for one in begun.values():
        one.wait()
    print("busy", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    engines(*sys.argv[2:]) if sys.argv[1:2] == ["engines"] else unittest.main(verbosity=2)
