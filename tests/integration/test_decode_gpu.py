#!/usr/bin/python3
"""GpuDecoder on a GPU, against a real daemon: attended blocks come from the mapping or by gathers,
or are misses, and are never wrong. Skipped where torch has no GPU."""

import os
import shutil
import signal
import tempfile
import unittest
from dataclasses import replace

from cuda_paths import GPU, torch  # sets the paths of the others
from daemon import until
from ucmclient import Client, Identity, Plane, UcmError, cuda_allocation, keys, sparse
from ucmclient.decode import Choices, cuda
from ucmclient.decode.gpu import GpuDecoder
from ucmclient.decode.layers import LayerChoices
from ucmclient.sparse.cuda import Chosen, Selector

TOKENS, HEADS, DIM, GROUP = 16, 2, 64, 4
SHAPE = sparse.Shape("bf16", TOKENS, HEADS, DIM, v_head_dim=DIM)
LAYER = 2 * TOKENS * HEADS * DIM * 2
LATENT = sparse.Shape("bf16", TOKENS, 1, 576, rope_dim=64)
LAYERS, BLOCKS, WINDOW, SEQUENCES = 3, 64, 4, 2
CANDIDATES = BLOCKS - WINDOW
LENGTH = BLOCKS * TOKENS - 5


class Link:
    """A connection as an engine has it. cut() ends it, and open() makes a new one."""

    def __init__(self, socket, summary, layer_bytes=LAYER):
        self.socket, self.summary, self.layer_bytes, self.client = socket, summary, layer_bytes, None
        self.open()

    def open(self):
        self.client = Client(socket=self.socket, name="decode", default_timeout=10)
        self.ns = self.client.namespace(Identity("decode", "bf16", f"decode/{self.layer_bytes}", TOKENS, self.layer_bytes, layers=(LAYERS,)))
        self.summaries = sparse.SummaryNamespace(self.ns, self.summary, build=True)

    def ask(self, call, *arguments, **named):
        try:
            return call(*arguments, **named)
        except UcmError as error:
            self.failed = error
            return None

    @property
    def away(self):
        return self.client is None

    def cut(self):
        if self.client is not None:
            self.client.close()
        self.client = self.ns = self.summaries = None


class Together:
    """Two sequences with the same blocks and different queries, in one step."""

    SHAPE, VALUES, SCALE, rounds = SHAPE, DIM, DIM**-0.5, None

    def selector(self, pool):
        return Selector(self.summary, pool, GROUP * HEADS, CANDIDATES, sequences=SEQUENCES,
                        choose=sparse.TopK(sparse_ratio=0.15, sink_blocks=0, recent_blocks=0))

    def __init__(self, link, kv, entries=200, encoding="", **more):
        self.kv, self.summary = kv, link.summary
        shape, layer_bytes, lists = self.SHAPE, link.layer_bytes, self.SHAPE.kv_heads
        pool = torch.empty(cuda.Steps.bytes_of(shape, layer_bytes, entries, encoding=encoding), dtype=torch.uint8, device="cuda")
        self.select = self.selector(pool)
        self.steps = cuda.Steps(pool, shape, layers=LAYERS, q_heads=GROUP * HEADS, layer_bytes=layer_bytes, numbers=80, requests=SEQUENCES,
                                sequences=SEQUENCES, room=self.select.room, window=WINDOW, scale=self.SCALE, rounds=self.rounds,
                                encoding=encoding)
        self.decoder = GpuDecoder(link, link.summary, self.steps, layer_bytes=layer_bytes, landing=16, **more)
        names = keys.sha256_chain(range(BLOCKS * TOKENS), TOKENS)
        self.names = [names[32 * i : 32 * i + 32] for i in range(BLOCKS)]
        int32 = {"dtype": torch.int32, "device": "cuda"}
        self.table = torch.full((SEQUENCES, BLOCKS), -1, **int32)
        self.page_table = torch.arange(BLOCKS, **int32).expand(SEQUENCES, BLOCKS).contiguous()
        self.page_table[:, :CANDIDATES] = -1
        self.candidates, self.first = torch.full((SEQUENCES,), CANDIDATES, **int32), torch.full((SEQUENCES,), CANDIDATES, **int32)
        self.length, self.requests = torch.full((SEQUENCES,), LENGTH, **int32), torch.zeros(SEQUENCES, **int32)
        self.q = torch.zeros(LAYERS, SEQUENCES, GROUP * HEADS, shape.head_dim, dtype=torch.bfloat16, device="cuda")
        self.out, self.lse = torch.zeros_like(self.q[..., : self.VALUES]), torch.zeros(LAYERS, SEQUENCES, GROUP * HEADS, device="cuda")
        self.chosen = [Chosen(torch.empty(SEQUENCES, lists, **int32), torch.empty(SEQUENCES, lists, self.select.room, **int32))
                       for _ in range(LAYERS)]
        self.graph = self.of = None
        for i in range(SEQUENCES):
            self.open(i)

    def open(self, i):
        sequence = self.decoder.open(f"request {i}", floor=60)
        self.requests[i] = sequence.number
        self.decoder.extend(sequence, self.names[:CANDIDATES], lambda block: None)
        self.decoder.write(self.table[i], sequence)

    def draw(self):
        self.q.copy_(torch.randn(self.q.shape).bfloat16())

    def launch(self):
        self.steps.begin()
        for layer in range(LAYERS):
            ranked = self.choose(layer, (self.decoder.summaries[layer], self.table[:, :CANDIDATES], self.candidates, self.q[layer]))
            pages = cuda.Pages(self.kv[layer], self.page_table, self.first, self.length, self.of)
            self.steps.layer(layer, self.chosen[layer], self.table, self.requests, self.q[layer], pages, out=self.out[layer],
                             lse=self.lse[layer], ranked=ranked)
        self.steps.end()

    def choose(self, layer, arguments):
        self.select(*arguments, out=self.chosen[layer])

    def attended(self, layer):
        """[sequence][list]: blocks."""
        return self.chosen[layer].lists()

    def run(self):
        """-> whether the step counts."""
        if self.graph is None:
            self.launch()
        else:
            self.graph.replay()
        torch.cuda.synchronize()
        return self.decoder.counted()

    def capture(self):
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.launch()

    def of_tokens(self, layer, blocks, head):
        """K and V of these blocks' tokens."""
        return (self.kv[layer, blocks, i, :, head].flatten(0, 1) for i in (0, 1))

    def expected(self, layer):
        """The expected output in float32, over the blocks that were chosen."""
        out, group = torch.empty(SEQUENCES, GROUP * HEADS, self.VALUES, device="cuda"), GROUP * HEADS // self.SHAPE.kv_heads
        for i, lists in enumerate(self.attended(layer)):
            for head, blocks in enumerate(lists):
                k, v = self.of_tokens(layer, blocks + list(range(CANDIDATES, BLOCKS)), head)
                n = len(blocks) * TOKENS + LENGTH - CANDIDATES * TOKENS
                q = self.q[layer, i, head * group : (head + 1) * group].float()
                weights = torch.softmax(q @ k[:n].float().T * self.SCALE, 1)
                out[i, head * group : (head + 1) * group] = weights @ v[:n].float()
        return out

    def wrong(self):
        """The largest difference from what is expected."""
        return max((self.out[layer].float() - self.expected(layer)).abs().max().item() for layer in range(LAYERS))

    def close(self):
        self.graph = None
        self.decoder.end()
        self.steps.close()
        self.select.close()


class Stopping(Together):
    """The same by a policy whose lists stop while attention runs, or whose budget follows what the
    lists cover."""

    def __init__(self, link, kv, policy, follow=False, **more):
        self.policy, self.follow = policy, follow
        super().__init__(link, kv, entries=LAYERS * HEADS * 80, **more)

    def selector(self, pool):
        choices = Choices.from_policy(self.policy, SHAPE, LAYERS, stops=True)
        self.rounds = choices.rounds
        # noise makes bad estimates: the last round would have all of most lists
        if self.rounds.rounds > 1:
            self.rounds = replace(self.rounds, rounds=5, least=16)
        choices = LayerChoices(choices, self.summary, pool, GROUP * HEADS, max_blocks=CANDIDATES, sequences=SEQUENCES, follow=self.follow)
        for i in range(SEQUENCES):
            choices.set(i, CANDIDATES)
        return choices

    def choose(self, layer, arguments):
        self.chosen[layer] = self.select(layer, *arguments)
        return self.select.ranked(layer, self.candidates)

    def draw(self):
        super().draw()
        self.q *= 3  # so that some blocks weigh more than others

    def attended(self, layer):
        index, scores = self.chosen[layer].index.tolist(), self.chosen[layer].scores.tolist()
        counts, reports = self.chosen[layer].counts.tolist(), self.select.reports[layer, ..., 0].tolist()

        def first(i, head):
            entries = [(block >= self.rounds.sink_blocks, -score, block) for block, score in zip(index[i][head], scores[i][head])]
            return [block for *_, block in sorted(entries[: counts[i][head]])][: reports[i][head]]
        return [[first(i, head) for head in range(HEADS)] for i in range(SEQUENCES)]


class Latents(Together):
    """The same for a model with MLA: all query heads have one list over one latent, whose first
    channels are V."""

    SHAPE, VALUES, SCALE = LATENT, 512, 0.07

    def of_tokens(self, layer, blocks, head):
        k = self.kv[layer, blocks].flatten(0, 1)
        return k, k[:, : self.VALUES]


@unittest.skipUnless(GPU, "there is no torch with a GPU")
class OnGpu(unittest.TestCase):
    CONFIG = "mapping:\n  size: {}MiB\n"

    def setUp(self):
        torch.manual_seed(1)
        self.directory = tempfile.mkdtemp(prefix="protocol.")
        self.addCleanup(shutil.rmtree, self.directory, True)
        self.start()
        self.kv = torch.randn(LAYERS, BLOCKS, 2, TOKENS, HEADS, DIM, device="cuda").bfloat16()
        self.link = Link(self.daemon.socket, sparse.tokens(SHAPE, chosen=4, rest=True))
        self.addCleanup(self.link.cut)
        self.addCleanup(lambda: self.daemon.stop())
        self.store()

    def start(self, mapping=16):
        from daemon import Daemon

        self.daemon = Daemon(directory=self.directory, config=self.CONFIG.format(mapping), **{"device.cuda": "required"})

    def store(self):
        memory, base, gpu = cuda_allocation(self.kv.data_ptr())
        begin = self.kv.data_ptr() - base
        layer_bytes = self.link.layer_bytes
        planes = [Plane(0, begin + layer * BLOCKS * layer_bytes, layer_bytes, layer_bytes, layer) for layer in range(LAYERS)]
        torch.cuda.synchronize()
        with self.link.ns.register([memory], planes, blocks=BLOCKS, gpu=gpu) as region:
            self.assertTrue(region.dump(keys.sha256_chain(range(BLOCKS * TOKENS), TOKENS), range(BLOCKS)).wait().all_ok)

    def together(self, what=Together, **more):
        both = what(self.link, self.kv, **more)
        self.addCleanup(both.close)
        return both

    def stats(self):
        return self.daemon.metrics()

    eventually = staticmethod(until)

    def mapped(self, both):
        """All blocks are in the mapping now: the daemon copies them there alongside what others ask of it."""
        def all_pinned():
            both.decoder.update()
            return all(sequence.referenced == CANDIDATES for sequence in both.decoder.sequences.values())
        self.eventually(all_pinned)

    def served(self, both, runs=LAYERS + 1, within=0.03):
        """Runs a step until it counts; how often it was served."""
        for run in range(runs):
            if both.run():
                self.assertLess(both.wrong(), within)
                return run
            self.assertEqual(len(both.decoder.serve()), 0, "sequences that are lost")
        self.fail("the step does not come to its end")

    def test_from_the_mapping_by_launches_and_by_a_graph(self):
        both = self.together()
        for step in range(6):
            both.draw()
            both.decoder.update()
            self.assertEqual(self.served(both), 0)
            if step == 2:
                both.capture()
        counts, again = both.decoder.counts, both.out.clone()
        self.assertEqual((counts.gathered, counts.mapped), (0, counts.misses))
        self.assertGreater(counts.mapped, 100)
        self.assertTrue(both.run())
        self.assertTrue(torch.equal(again, both.out))
        self.assertEqual(both.decoder.counts.misses, counts.misses)

    STOPS = "psa-estimated:chosen=4,dense_below=0,recent_blocks=4,eps=0.8,microbatch=1"

    def stopping(self, policy=STOPS, **more):
        both = Stopping(self.link, self.kv, policy, **more)
        self.addCleanup(both.close)
        return both

    def test_lists_that_stop(self):
        both, attended = self.stopping(), 0
        for step in range(6):
            both.draw()
            both.decoder.update()
            self.assertEqual(self.served(both), 0)
            result, blocks = both.steps.result(), both.select.reports[..., 0]
            self.assertEqual(result.attended, blocks.sum().item())
            self.assertEqual(result.rounds, both.select.reports[..., 1].max().item())
            shares = both.select.reports[..., 2].contiguous().view(torch.float32)
            self.assertTrue(torch.all((shares >= 0.8) | (blocks == CANDIDATES)))
            self.assertAlmostEqual(result.share, shares.min().item())
            attended += result.attended
            if step == 2:
                both.capture()
        self.assertLess(attended, 0.9 * 6 * LAYERS * SEQUENCES * HEADS * CANDIDATES)
        self.assertLess(both.decoder.counts.misses, LAYERS * HEADS * CANDIDATES + 1)

    def test_lists_that_stop_with_the_same_bits_by_gathers(self):
        mapped, gather = self.stopping(), self.stopping(mapping=False)
        for _ in range(2):
            mapped.draw()
            gather.q.copy_(mapped.q)
            self.assertEqual(self.served(mapped), 0)
            self.assertGreater(self.served(gather, runs=5 * LAYERS + 1), 0)
            self.assertTrue(torch.equal(mapped.out, gather.out) and torch.equal(mapped.select.reports, gather.select.reports))

    def test_layers_that_are_dense(self):
        both = self.stopping(self.STOPS + ",dense_first=1")
        both.draw()
        self.assertEqual(self.served(both), 0)
        self.assertTrue(torch.all(both.select.reports[0, ..., 0] == CANDIDATES))
        self.assertTrue(torch.any(both.select.reports[1:, ..., 0] < CANDIDATES))

    def dense(self, policy):
        both = self.stopping(policy)
        both.draw()
        self.assertEqual(self.served(both), 0)
        self.assertTrue(torch.all(both.select.reports[..., 0] == CANDIDATES))
        self.assertEqual(both.steps.result().share, 1)

    def test_all_of_an_estimate_is_dense_attention(self):
        self.dense(self.STOPS.replace("eps=0.8", "eps=1"))

    def test_all_of_a_certificate_is_dense_attention(self):
        self.link.summary = sparse.box(SHAPE)
        self.link.summaries = sparse.SummaryNamespace(self.link.ns, self.link.summary, build=True)
        self.dense("psa-certified:dense_below=0,recent_blocks=4,eps=1")

    def test_a_budget_that_follows(self):
        both = self.stopping("auto:chosen=4,dense_below=0,recent_blocks=4,min_tokens=0,budget_tokens=1024,goal=0.9", follow=True)
        both.capture()
        both.draw()
        before, shares = both.select.most.clone(), []
        for _ in range(12):  # the same queries, so that more blocks cover more
            self.assertEqual(self.served(both), 0)
            shares.append(both.steps.result().share)
            both.select.follow(range(SEQUENCES))
        self.assertTrue(torch.all(both.select.most >= before) and torch.any(both.select.most > before))
        self.assertGreater(shares[-1], shares[0])

    def test_by_gathers_with_the_same_bits(self):
        mapped, gather = self.together(), self.together(mapping=False)
        gather.capture()
        self.mapped(mapped)
        for _ in range(3):
            mapped.draw()
            gather.q.copy_(mapped.q)
            self.assertEqual(self.served(mapped), 0)
            self.assertGreater(self.served(gather), 0)
            self.assertTrue(torch.equal(mapped.out, gather.out) and torch.equal(mapped.lse, gather.lse))
        self.assertEqual(gather.decoder.counts.mapped, 0)
        self.assertGreater(gather.decoder.counts.gathered, 100)

    def test_encoded_entries(self):
        """Blocks are encoded on their way, by the mapping or by gathers. Both give the same bits,
        near those of raw blocks."""
        plain, gather = self.together(mapping=False), self.together(encoding="fp8", mapping=False)
        mapped = self.together(encoding="fp8")  # a connection has one mapping of a part
        gather.capture()
        self.mapped(mapped)
        self.assertLess(mapped.steps.entry_bytes, plain.steps.entry_bytes * 0.52)
        for _ in range(3):
            plain.draw()
            for both in (plain, mapped, gather):
                both.q.copy_(plain.q)
                self.served(both, within=0.03 if both is plain else 0.2)
            self.assertTrue(torch.equal(mapped.out, gather.out) and torch.equal(mapped.lse, gather.lse))
            off = (mapped.out.float() - plain.out.float()).norm() / plain.out.float().norm()
            self.assertTrue(1e-4 < off < 0.05, off)
        self.assertEqual((mapped.decoder.counts.gathered, gather.decoder.counts.mapped), (0, 0))

    def test_latents_from_the_mapping_and_by_gathers(self):
        self.link.cut()
        self.kv = torch.randn(LAYERS, BLOCKS, TOKENS, 576, device="cuda").bfloat16()
        self.link = Link(self.daemon.socket, sparse.mean(LATENT), TOKENS * 576 * 2)
        self.addCleanup(self.link.cut)
        self.store()
        mapped, gather = self.together(Latents), self.together(Latents, mapping=False)
        mapped.capture()
        for _ in range(3):
            mapped.draw()
            gather.q.copy_(mapped.q)
            self.assertEqual(self.served(mapped), 0)
            self.assertGreater(self.served(gather), 0)
            self.assertTrue(torch.equal(mapped.out, gather.out) and torch.equal(mapped.lse, gather.lse))
        self.assertEqual(mapped.decoder.counts.gathered, 0)

    def test_from_pages_with_the_same_bits(self):
        """For blocks that the engine still has, neither the mapping nor a gather is needed."""
        mapped, pages = self.together(), self.together(mapping=False)
        pages.of = torch.full((pages.steps.numbers,), -1, dtype=torch.int32, device="cuda")
        for sequence in pages.decoder.sequences.values():
            rows = torch.tensor(sequence.rows, device="cuda")
            pages.of[rows] = torch.arange(len(rows), dtype=torch.int32, device="cuda")
        pages.capture()
        for _ in range(3):
            mapped.draw()
            pages.q.copy_(mapped.q)
            self.assertEqual((self.served(mapped), self.served(pages)), (0, 0))
            self.assertTrue(torch.equal(mapped.out, pages.out) and torch.equal(mapped.lse, pages.lse))
        pages.of.fill_(-1)
        pages.draw()
        self.assertGreater(self.served(pages), 0)

    def test_the_daemon_takes_the_mapping_back(self):
        both = self.together()
        both.draw()
        self.assertEqual(self.served(both), 0)
        self.daemon.configure(self.CONFIG.format(0))
        os.kill(self.daemon.process.pid, signal.SIGHUP)

        def given_back():
            both.decoder.update()
            return self.stats()["mapping_bytes"] == 0
        self.eventually(given_back)
        both.draw()
        self.assertGreater(self.served(both), 0)
        self.assertGreater(both.decoder.counts.gathered, 0)

    def test_evicted_by_name(self):
        """The mapping's places are still mapped but no longer valid, and a sequence's lease brings
        nothing back."""
        both = self.together()
        both.draw()
        self.assertEqual(self.served(both), 0)
        self.link.ns.evict()
        both.draw()
        self.assertFalse(both.run())
        self.assertTrue(both.decoder.serve())

    def test_killed(self):
        both = self.together(gather_timeout=0.3)
        both.draw()
        self.assertEqual(self.served(both), 0)
        self.eventually(lambda: self.stats()["nvme_writes"] >= BLOCKS)
        self.daemon.kill()
        for _ in range(3):  # its memory is still mapped, until update() asks
            both.draw()
            self.assertEqual(self.served(both), 0)
        both.decoder.update()
        both.draw()
        self.assertFalse(both.run())
        self.assertEqual(len(both.decoder.serve()), SEQUENCES)
        self.link.cut()
        both.decoder.update()
        self.start()
        self.link.open()
        both.decoder.gather_timeout = 5.0
        before = both.decoder.counts.mapped
        for _ in range(3):
            both.draw()
            both.decoder.update()
            self.served(both)
        self.assertGreater(both.decoder.counts.mapped, before)

    def test_cut_while_the_mapping_is_in_use(self):
        both = self.together()
        for _ in range(2):
            both.draw()
            both.decoder.update()
            self.assertEqual(self.served(both), 0)
            self.link.cut()  # its memory is unmapped before the GPU forgets it
            both.decoder.update()
            self.link.open()
        both.draw()
        both.decoder.update()
        self.assertEqual(self.served(both), 0)

    def example(self):
        import decode_on_gpu

        said = []
        with Client(socket=self.daemon.socket, default_timeout=10) as client:
            result = decode_on_gpu.decode(client, out=said.append)
        for head in range(0, decode_on_gpu.GROUP * HEADS, decode_on_gpu.GROUP):
            self.assertTrue(torch.all((result[:, 0, head] - 7).abs() < 0.1), said)
        return said[0]

    def test_the_example(self):
        self.assertIn(" 0 by gathers", self.example())

    def test_the_example_without_a_mapping(self):
        self.daemon.stop()
        self.start(mapping=0)
        self.assertIn(" 0 layer heads came through the mapping", self.example())


if __name__ == "__main__":
    unittest.main()
