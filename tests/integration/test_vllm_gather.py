#!/usr/bin/python3
"""The vLLM connector's setting `gather_loads`, in the small engine of tests/engines/vllm against a
real daemon. Where torch is installed, also over gloo between two processes. Each of the ranks with
the same bytes loads a share. Outputs are the same bit for bit as without a cache."""

import os
import shutil
import tempfile
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

from vllm_case import BLOCK, Case, Request, prompt, watch  # sets the paths
from extra import extra_of

import test_vllm_trouble
from engine import configuration
from ucmclient import Region
from ucmclient.errors import Status, UcmError
from ucmclient.engine.vllm import connector, gather_loads, gather_pages, settings, watching
from ucmclient.engine.vllm.plan import Copy

WHOLE = 150 // BLOCK * BLOCK


class Gathers(Case):
    """Here all ranks are in one process, which calls them one after another. So a rank copies what
    the others have in their pages."""

    def setUp(self):
        super().setUp()
        self.exchanges, ranks_of = [], {}
        #: What exchanges return: whether the pages are written.
        self.written = None

        def exchange(config, layout, kv_caches, rank, ranks):
            peers = ranks_of.setdefault(id(config), [config])
            peers.append(kv_caches)

            def gather(shares):
                self.exchanges.append([len(share) for share in shares])
                for of, blocks in enumerate(shares):
                    for name, mine in kv_caches.items() if of != rank else ():
                        mine.array[list(blocks)] = peers[1 + of][name].array[list(blocks)]
                return self.written
            return gather
        patch = mock.patch.object(connector, "_exchange", exchange)
        patch.start()
        self.addCleanup(patch.stop)

    def engine(self, **more):
        return super().engine(**{"ranks": 3, "replicated": True, "gather_loads": True, "layout": "packed", "blocks": 160, **more})

    def test_each_rank_loads_a_third(self):
        tokens = prompt(900, 20 * BLOCK + 5)
        self.check(self.engine(), Request("cold", tokens))
        before = self.stats()["load_bytes"]
        warm = self.engine()
        self.check(warm, Request("warm", tokens))
        self.assertEqual(warm.loaded_tokens, 20 * BLOCK)
        self.assertEqual(self.exchanges, [[7, 7, 6]] * 3)
        self.assertEqual(self.stats()["load_bytes"] - before, self.stats()["dump_bytes"] * 20 // (len(tokens) + 7 >> 4))

    def test_small_loads_are_not_shared_out(self):
        self.check(self.engine(), Request("cold", prompt(901, 100)))
        self.check(self.engine(), Request("warm", prompt(901, 100)))
        self.assertEqual(self.exchanges, [])

    def test_shares_that_are_empty(self):
        with mock.patch.object(gather_loads, "_LEAST", 0):
            self.check(self.engine(), Request("cold", prompt(902, 2 * BLOCK + 1)))
            warm = self.engine()
            self.check(warm, Request("warm", prompt(902, 2 * BLOCK + 1)))
        self.assertEqual(self.exchanges, [[1, 1, 0]] * 3)

    def test_one_rank_can_not_load(self):
        """The share of that rank is a failed load for all ranks."""
        tokens, load, asked = prompt(903, 20 * BLOCK + 5), Region.load, []
        self.check(self.engine(), Request("cold", tokens))

        def refused(region, *args, **named):
            asked.append(region)
            if len(asked) == 2:
                raise UcmError(Status.NO_MEMORY, "none is left")
            return load(region, *args, **named)
        warm = self.engine()
        with mock.patch.object(Region, "load", refused):
            self.check(warm, Request("warm", tokens))
        self.assertEqual((len(asked), warm.recomputed), (3, 1))
        self.check(warm, Request("next", prompt(904, 50)))

    def test_no_rank_can_load(self):
        tokens = prompt(905, 20 * BLOCK + 5)
        self.check(self.engine(), Request("cold", tokens))
        warm = self.engine()
        with mock.patch.object(Region, "load", side_effect=UcmError(Status.NO_MEMORY, "none is left")):
            self.check(warm, Request("warm", tokens))
        self.assertEqual((self.exchanges, warm.recomputed), ([], 1))

    def test_weights_change_while_shares_are_on_their_way(self):
        """Requests whose shares have all come, and requests whose shares have not."""
        tokens = prompt(908, 20 * BLOCK + 5)
        self.check(self.engine(), Request("cold", tokens))
        for steps in range(1, 5):
            warm, request = self.engine(), Request("warm", tokens)
            warm.add(request)
            for _ in range(steps):
                warm.step()
            under_way = request.status == "loading" and "warm" not in warm.received
            watching.changed("update_weights")
            self.check(warm)
            self.same({"warm": request})
            self.assertEqual(warm.recomputed, int(under_way), steps)

    def test_aborts_while_shares_are_on_their_way(self):
        tokens = prompt(906, 20 * BLOCK + 5)
        self.check(self.engine(), Request("cold", tokens))
        for steps in range(6):
            warm = self.engine()
            warm.add(Request("warm", tokens))
            for _ in range(steps):
                warm.step()
            warm.abort("warm")
            self.check(warm, Request("again", tokens), but=("warm",))

    def test_pages_that_are_being_gathered_are_not_given_back(self):
        """Another load into them would not wait for the engine's stream."""
        tokens, come = prompt(907, 20 * BLOCK + 5), []
        self.check(self.engine(), Request("cold", tokens))
        warm = self.engine()
        self.written = SimpleNamespace(query=lambda: bool(come))
        warm.add(Request("gone", tokens))
        self.eventually(lambda: warm.step() or len(self.exchanges) == 3)
        warm.abort("gone")
        for _ in range(3):
            warm.step()
        self.assertFalse(warm.pool.idle(), "blocks that ranks still write to are free")
        come.append(True)
        self.check(warm, Request("again", tokens), but=("gone",))


class GathersTrouble(test_vllm_trouble.Trouble, Gathers):
    def engine(self, **more):
        return super().engine(**{**more, "ranks": 2, "layout": "packed"})


for name in dir(test_vllm_trouble.Trouble):
    if name.startswith("test_") and name not in ("test_preemption", "test_aborts_at_every_point"):
        setattr(GathersTrouble, name, None)
for name in [name for name in vars(Gathers) if name.startswith("test_")]:
    setattr(GathersTrouble, name, None)


class Rules(unittest.TestCase):
    def test_which_engines(self):
        def of(ranks, replicated, extra=(), **parallel):
            config, kv = configuration(8, ranks, replicated, {})
            vars(config.parallel_config).update(parallel)
            return gather_loads.ranks_with_the_same(config, kv, settings.Settings(gather_loads=True, **dict(extra)))
        self.assertEqual([of(4, True), of(4, False), of(1, True), of(4, True, pipeline_parallel_size=2), of(4, True, {"load": False})], [4, 0, 0, 0, 0])
        for extra in ({"async_load": False}, {"sparse": "auto"}):
            with self.assertRaisesRegex(ValueError, list(extra)[0]):
                settings.Settings.parse(extra_of({"gather_loads": True, **extra}))

    def test_loads_are_gathered_when_all_ranks_have_reported(self):
        planner = gather_loads.GatherPlanner(3)
        a, b = (Copy(name, b"k" * 12, list(range(12))) for name in "ab")
        planner.begin(a)
        planner.begin(b)
        planner.received({a.number: (2, frozenset()), b.number: (1, frozenset({3}))})
        self.assertEqual(planner.take(), [])
        planner.received({b.number: (2, frozenset({1}))})
        self.assertEqual([(one.number, one.failed) for one in planner.take()], [(b.number, [1, 3])])
        planner.received({a.number: (1, frozenset())})
        self.assertEqual([(one.number, one.failed) for one in planner.take()], [(a.number, [])])

    def test_what_ranks_report_adds_up(self):
        one = connector.UcmProgress(0, shares={1: (1, frozenset({5})), 2: (1, frozenset())})
        both = one.aggregate(connector.UcmProgress(0, shares={1: (1, frozenset({7}))}))
        self.assertEqual(both.shares, {1: (2, frozenset({5, 7})), 2: (1, frozenset())})


def _process(rank, met, pipe):
    """A rank with pages of torch's: a hundred blocks in three pieces."""
    import torch
    import torch.distributed as distributed
    from ucmclient.engine.vllm.layout import layout_of
    distributed.init_process_group("gloo", f"file://{met}", world_size=2, rank=rank)
    whole = torch.full((100, 4, 24), -1, dtype=torch.int16)
    pages = {"a": whole[:, :2], "b": whole[:, 3:], "c": torch.full((100, 24), -1, dtype=torch.int16)}
    layout = layout_of(pages, 100)
    exchange = gather_pages.TorchExchange(layout, pages, None, rank, 2, stage_bytes=2000)
    for shares in iter(pipe.recv, None):
        for page in pages.values():
            for block in shares[rank]:
                page[block] = 100 * rank + block
        exchange(shares)
        pipe.send(({name: page[:, ..., 0].reshape(100, -1)[:, 0].tolist() for name, page in pages.items()}, int(whole[:, 2].max())))
    distributed.destroy_process_group()


@unittest.skipUnless(find_spec("torch") and find_spec("triton"), "there is no torch, or no Triton")
class Kernel(unittest.TestCase):
    def test_it_moves_what_torch_moves(self):
        """On a GPU; where there is none, in Triton's interpreter."""
        import subprocess
        import sys

        import torch

        code = f"import sys; sys.path[:0] = {sys.path!r}; import test_vllm_gather; test_vllm_gather.moves()"
        interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, "-B", "-c", code], env={**os.environ, **interpreted}, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


def moves():
    import torch
    from ucmclient.engine.vllm.gather_kernel import FusedPieces
    from ucmclient.engine.vllm.gather_pages import Pieces

    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.int64, torch.uint8):
        whole = torch.randint(0, 100, (20, 5000), dtype=dtype, device=device)
        pages = [whole[:, :1500], whole[:, 1600:1601], whole[:, 2000:4100], torch.randint(0, 100, (20, 7), dtype=dtype, device=device)]
        ids = torch.tensor([3, -1, 19, 0, 7, -1], device=device)
        kinds = [Pieces(pages), FusedPieces(pages)]
        rows = [torch.zeros((6, kinds[0].width), dtype=dtype, device=device) for _ in kinds]
        for kind, row in zip(kinds, rows):
            kind.take(ids, row)
        assert rows[0].any() and torch.equal(*rows)
        left = []
        for kind in kinds:
            copies = whole.clone(), pages[3].clone()
            kind.put(ids.flip(0), rows[0] + 1)
            left.append((whole.clone(), pages[3].clone()))
            whole.copy_(copies[0]), pages[3].copy_(copies[1])
        assert not torch.equal(left[0][0], whole)
        assert all(map(torch.equal, *left))


@unittest.skipUnless(find_spec("torch") and not os.environ.get("UCM_NO_GLOO"), "there is no torch")
class TwoProcesses(unittest.TestCase):
    def test_pages_of_both_ranks_are_the_same(self):
        import multiprocessing
        context = multiprocessing.get_context("fork")
        directory = tempfile.mkdtemp(prefix="gather.")
        self.addCleanup(shutil.rmtree, directory)
        ours, theirs = zip(*(context.Pipe() for _ in range(2)))
        processes = [context.Process(target=_process, args=(rank, os.path.join(directory, "met"), theirs[rank]), daemon=True) for rank in range(2)]
        for process in processes:
            process.start()
        self.addCleanup(lambda: [process.kill() for process in processes])
        expected = [-1] * 100
        for shares in ([[7, 90, 3], [55, 4]], [[1], []], [list(range(10, 45)), list(range(45, 80))]):
            for rank, share in enumerate(shares):
                for block in share:
                    expected[block] = 100 * rank + block
            for pipe in ours:
                pipe.send(shares)
            for pipe in ours:
                self.assertTrue(pipe.poll(60), "a rank hangs")
                got, between = pipe.recv()
                self.assertEqual(got, dict.fromkeys("abc", expected))
                self.assertEqual(between, -1, "bytes that are no block's were written")
        for pipe, process in zip(ours, processes):
            pipe.send(None)
            process.join(60)
            self.assertEqual(process.exitcode, 0)


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
