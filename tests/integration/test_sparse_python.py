#!/usr/bin/python3
"""ucmclient.sparse over a real daemon: summaries, sequences, selections, prefetches, the example and the lines in docs/sparse.md."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import numpy as np

from client_paths import TOP  # sets the paths of the others
from daemon import Daemon, DaemonCase, until
from ucmclient import BlockResult, Client, Found, Identity, Plane, SharedMemory, Status, UcmError, keys, sparse

import retrieve_documents

LAYERS, TOKENS, HEADS, DIM, BLOCKS = 2, 16, 2, 32, 40
SHAPE = sparse.Shape("float32", TOKENS, HEADS, DIM, v_head_dim=DIM)
LAYER = 2 * TOKENS * HEADS * DIM * 4
METHODS = (
    sparse.mean(SHAPE),
    sparse.mean(SHAPE, kind="max"),
    sparse.mean(SHAPE, kind="normalised"),
    sparse.submean(SHAPE, run=4, keep=range(0, DIM // 2, 2), pairs="interleaved"),
    sparse.box(SHAPE),
    sparse.hash(SHAPE, bits=64, seed=9),
    sparse.stats(SHAPE),
    sparse.tokens(SHAPE, chosen=3),
    sparse.tokens(SHAPE, chosen=3, rest=True),
)


def names(n=BLOCKS, first=0):
    return keys.sha256_chain(range(first, first + n * TOKENS), TOKENS)


class Worker:
    """A client with a namespace and pages that hold BLOCKS blocks, filled with numbers of a seed."""

    def __init__(self, case, daemon, model, **more):
        self.client = Client(socket=daemon.socket, name="worker", **more)
        case.addCleanup(self.client.close)
        self.ns = self.client.namespace(Identity(model, "f32", "test/1", TOKENS, LAYER, layers=(LAYERS,)))
        self.shared = SharedMemory(LAYERS * LAYER * BLOCKS)
        self.pages = np.frombuffer(self.shared.buffer, np.float32).reshape(LAYERS, BLOCKS, 2, TOKENS, HEADS, DIM)
        self.pages[:] = np.random.default_rng(1).standard_normal(self.pages.shape, dtype=np.float32)
        planes = [Plane(0, layer * LAYER * BLOCKS, LAYER, LAYER, layer) for layer in range(LAYERS)]
        self.region = self.ns.register([self.shared.memory()], planes, blocks=BLOCKS)

    def dump(self, n=BLOCKS):
        return self.region.dump(names(n), range(n), durable=True).wait()

    def summaries(self, summary=METHODS[0], **more):
        return sparse.SummaryNamespace(self.ns, summary, **more)


def summary_region(summaries):
    """Memory of a region of summaries, and the region."""
    size = (summaries.summary.bytes + 7) // 8 * 8
    shared = SharedMemory(LAYERS * size * BLOCKS)
    planes = [Plane(0, i * size * BLOCKS, size, summaries.summary.bytes, i) for i in range(LAYERS)]
    view = np.frombuffer(shared.buffer, np.uint8).reshape(LAYERS, BLOCKS, size)
    return view, summaries.register([shared.memory()], planes, blocks=BLOCKS)


def query(seed=5, rows=1, heads=4):
    return np.random.default_rng(seed).standard_normal((rows, heads, DIM), dtype=np.float32)


def plain(selection):
    return [list(each) for each in selection.lists], [list(each) for each in selection.scores]


class Case(DaemonCase):
    def refused(self, status, call, *args, **named):
        with self.assertRaises(UcmError) as caught:
            call(*args, **named)
        self.assertEqual(caught.exception.status, status, caught.exception)
        self.assertGreater(len(str(caught.exception)), 15)
        return str(caught.exception)

    def worker(self, **more):
        return Worker(self, self.daemon, self.id(), **more)


class Summaries(Case):
    def test_the_daemons_are_the_librarys(self):
        worker = self.worker()
        worker.dump()
        for summary in METHODS:
            with self.subTest(summary.method), worker.summaries(summary) as summaries:
                self.assertEqual(set(summaries.build(names()).wait().blocks), {BlockResult.OK})
                view, region = summary_region(summaries)
                self.assertTrue(region.load(names(), range(BLOCKS)).wait().all_ok)
                for layer in range(LAYERS):
                    here = summary.compute(worker.pages[layer])
                    self.assertEqual(view[layer, :, : summary.bytes].tobytes(), bytes(here.data))
                region.close()

    def test_a_summary_that_cannot_be(self):
        worker = self.worker()
        for shape in (
            sparse.Shape("f32", TOKENS, HEADS, DIM * 64),
            sparse.Shape("f32", TOKENS, 0, DIM),
            sparse.Shape("f32", TOKENS, HEADS, 6),
            sparse.Shape("f32", TOKENS, HEADS, DIM, k_token_stride=4),
        ):
            self.refused(Status.INVALID, sparse.mean, shape)
        beyond = sparse.mean(sparse.Shape("f32", TOKENS, HEADS, DIM, k_offset=LAYER))
        self.refused(Status.INVALID, worker.summaries, beyond)
        self.refused(Status.INVALID, worker.summaries, sparse.mean(sparse.Shape("f32", 8, HEADS, DIM)))
        self.refused(Status.INVALID, sparse.submean, SHAPE, run=5)
        self.refused(Status.INVALID, sparse.hash, SHAPE, bits=65)
        for wrong in (
            lambda: sparse.Shape("int8", TOKENS, HEADS, DIM).native(),
            lambda: sparse.mean(SHAPE, kind="median"),
            lambda: sparse.submean(SHAPE, run=4, keep=[DIM]),
        ):
            self.assertRaises(ValueError, wrong)
        with worker.summaries() as summaries:
            self.refused(Status.INVALID, sparse.SummaryNamespace, summaries, METHODS[0])


class Selections(Case):
    def test_the_daemons_choice_is_the_librarys(self):
        worker = self.worker()
        worker.dump()
        choices = (sparse.TopK(), sparse.TopK(topk_tokens=100, limit=5), sparse.Mass(eps=0.5, beta_m=0.2, limit=30),
                   sparse.Mass(eps=0.5, beta_m=0))
        scores = [sparse.Score(reduce, heads) for reduce in ("max", "mean", "softmax") for heads in ("each", "sum", "max")]
        for summary in METHODS:
            with worker.summaries(summary) as summaries, summaries.sequence(names(), build=True) as sequence:
                self.assertEqual(len(sequence), BLOCKS)
                for i, score in enumerate(scores):
                    choose, q, layer = choices[i % len(choices)], query(i, rows=1 + i % 3), i % LAYERS
                    with self.subTest(f"{summary.method} {score} {choose}"):
                        here = summary.compute(worker.pages[layer]).select(q, choose, score)
                        self.assertEqual(plain(sequence.select(layer, q, choose, score)), plain(here))

    def test_the_reduce_that_is_not_named(self):
        """The default is softmax for the top k of logits, and max for hashes, normalised means,
        distances and mass."""
        worker, q = self.worker(), query(3)
        logits = sparse.TopK(topk_tokens=100)
        for summary in METHODS:
            best = "max" if summary.method == "hash" or summary.native.kind == 2 else "softmax"
            held = summary.compute(worker.pages[0])
            with self.subTest(summary.method):
                self.assertEqual(plain(held.select(q, logits)), plain(held.select(q, logits, sparse.Score(best))))
                self.assertEqual(plain(held.select(q, sparse.Mass())), plain(held.select(q, sparse.Mass(), sparse.Score("max"))))
                self.assertEqual([bytes(x) for x in held.scores(q)], [bytes(x) for x in held.scores(q, sparse.Score("max"))])
        held = METHODS[0].compute(worker.pages[0])
        self.assertEqual(plain(held.select(q, logits, sparse.Score(metric="l2"))),
                         plain(held.select(q, logits, sparse.Score("max", metric="l2"))))

    def test_many_sequences_and_layers_in_one_call(self):
        worker = self.worker()
        worker.dump()
        with worker.summaries() as summaries:
            sequences = [summaries.sequence(names(n), build=True) for n in (BLOCKS, 1, 17)]
            rows = [(sequence, layer) for sequence in sequences for layer in range(LAYERS)]
            q = query(rows=len(rows))
            for (sequence, layer), each, got in zip(rows, q, sparse.select(rows, q)):
                self.assertEqual(plain(sequence.select(layer, each)), plain(got))
            self.assertEqual(list(got.union()), sorted(set(got.lists[0]) | set(got.lists[1])))

    def test_a_sequence_without_blocks_has_nothing_to_choose(self):
        worker = self.worker()
        worker.dump(1)
        with worker.summaries() as summaries, summaries.sequence() as empty, summaries.sequence(names(1), build=True) as one:
            self.assertEqual(empty.append(names(1, first=999)).missing, 1)
            nothing, something = sparse.select([(empty, 0), (one, 0)], query(rows=2))
            self.assertEqual(plain(nothing), ([[], []], [[], []]))
            self.assertEqual([list(each) for each in something.lists], [[0], [0]])
            self.assertEqual(nothing.union(), [])

    def test_queries_in_16_bits(self):
        worker = self.worker()
        worker.dump()
        half = query().astype(np.float16)
        brain = (query().view(np.uint32) >> 16).astype(np.uint16)
        wide = (brain.astype(np.uint32) << 16).view(np.float32)
        with worker.summaries() as summaries, summaries.sequence(names(), build=True) as sequence:
            self.assertEqual(plain(sequence.select(0, half)), plain(sequence.select(0, half.astype(np.float32))))
            self.assertEqual(plain(sequence.select(0, brain, dtype="bf16")), plain(sequence.select(0, wide)))
            self.assertRaises(ValueError, sequence.select, 0, brain)
            self.assertRaises(ValueError, sequence.select, 0, half, dtype="bf16")

    def test_hostile_input(self):
        worker, other = self.worker(), self.worker()
        worker.dump()
        with worker.summaries() as summaries:
            sequence = summaries.sequence(names(), build=True)
            for bad in (np.nan, np.inf, -np.inf):
                q = query()
                q[0, 3, 7] = bad
                self.assertIn(str(3 * DIM + 7), self.refused(Status.INVALID, sequence.select, 0, q))
                self.refused(Status.INVALID, summaries.summary.compute(worker.pages[0]).select, q)
            self.refused(Status.INVALID, sequence.select, LAYERS, query())
            self.refused(Status.INVALID, sequence.select, 0, query(heads=3))
            self.refused(Status.INVALID, sequence.select, 0, query(), sparse.TopK(sparse_ratio=2))
            self.refused(Status.INVALID, sequence.select, 0, query(), sparse.Mass(eps=float("nan")))
            self.refused(Status.INVALID, sequence.prefetch, [BLOCKS])
            self.refused(Status.INVALID, sequence.prefetch, [])
            self.refused(Status.INVALID, sequence.append, b"")
            with other.summaries() as theirs, theirs.sequence(names(3)) as foreign:
                self.refused(Status.INVALID, sparse.select, [(sequence, 0), (foreign, 0)], query(rows=2))
                self.refused(Status.INVALID, sparse.Prefetcher(worker.client).submit, foreign, [0])
            for wrong in (
                lambda: sequence.select(0, query()[:, :, :-4]),
                lambda: sequence.select(0, query().ravel()),
                lambda: sequence.select(0, np.asfortranarray(query(rows=3))),
                lambda: sequence.select(0, query().astype(np.float64)),
                lambda: sequence.select(0, query().astype(">f4")),
                lambda: sparse.select([(sequence, 0)] * 3, query(rows=2)),
                lambda: sparse.select([], query()),
                lambda: sequence.select(0, query(), sparse.TopK(limit=-1)),
                lambda: sequence.select(0, query(), score=sparse.Score("median")),
                lambda: summaries.summary.compute(worker.pages[0].astype(np.float16)),
                lambda: sparse.Summaries(summaries.summary, b"1234" * 100, stride=4),
            ):
                self.assertRaises(ValueError, wrong)
            self.assertRaises(TypeError, sequence.select, 0, None)
            sequence.close()
            sequence.close()
            self.refused(Status.INVALID, sequence.select, 0, query())
            self.refused(Status.INVALID, len, sequence)

    def test_blocks_that_are_evicted_by_name_are_counted(self):
        worker = self.worker()
        worker.dump()
        with worker.summaries() as summaries, summaries.sequence(names(), build=True) as sequence:
            worker.ns.evict(names()[: 32 * 4])
            everything = sparse.TopK(sparse_ratio=1)
            chosen = sequence.select(0, query(), everything, sparse.Score(heads="max"))
            self.assertEqual((chosen.evicted, list(chosen.lists[0])), (4, list(range(4, BLOCKS))))

    def test_a_tensor_like_torchs(self):
        class Torch:
            """The part of torch's tensors that is used."""

            def __init__(self, array, dtype, device="cpu"):
                self.array, self.dtype, self.shape = array, dtype, array.shape
                self.device = type("device", (), {"type": device, "__str__": lambda self: device})()

            def data_ptr(self):
                return self.array.ctypes.data

            def element_size(self):
                return self.array.itemsize

            def is_contiguous(self):
                return self.array.flags.c_contiguous

        shape = sparse.Shape("torch.bfloat16", TOKENS, HEADS, DIM)
        k = (np.random.default_rng(2).standard_normal((9, TOKENS, HEADS, DIM), np.float32).view(np.uint32) >> 16).astype("u2")
        summary = sparse.box(shape)
        summaries = summary.compute(Torch(k, "torch.bfloat16"))
        self.assertEqual(bytes(summaries.data), bytes(summary.compute(k).data))
        chosen = summaries.select(Torch(query(), "torch.float32"))
        self.assertEqual(plain(chosen), plain(summaries.select(query())))
        self.assertRaises(ValueError, summary.compute, Torch(k, "torch.bfloat16", "cuda"))
        self.assertRaises(ValueError, summary.compute, Torch(k[:, ::2], "torch.bfloat16"))
        self.assertRaises(ValueError, summary.compute, Torch(k, "torch.float16"))


class Policies(Case):
    def test_a_text_names_one(self):
        policy = sparse.Policy("psa-estimated:eps=0.98,microbatch=8")
        self.assertEqual((policy.choice, policy.eps, policy.microbatch, policy.entries), ("estimated", 0.98, 8, 2.0))
        self.assertEqual(str(policy), "psa-estimated:eps=0.98,microbatch=8")
        self.assertEqual(str(sparse.Policy()), "auto")
        self.assertIn('did you mean "eps"?', self.refused(Status.INVALID, sparse.Policy, "psa:epz=1"))
        self.assertRaises(AttributeError, getattr, policy, "nothing")
        for name in sparse.Policy.presets():
            self.assertEqual(sparse.Policy(name).preset.decode(), name)
        for key in sparse.Policy.keys():
            self.assertTrue(hasattr(policy, key), key)

    def test_the_page_has_all_of_them(self):
        page = (pathlib.Path(__file__).resolve().parents[2] / "docs/sparse.md").read_text()
        for name in [*sparse.Policy.presets(), *sparse.Policy.keys()]:
            self.assertIn(f"`{name}`", page)

    def test_what_follows(self):
        shape = sparse.Shape("bf16", tokens=16, kv_heads=2, head_dim=64)
        summary = sparse.Policy("kvstar").summary(shape)
        self.assertEqual((summary.method, summary.native.keep_bytes), ("submean", 4))
        self.assertEqual(summary.bytes, sparse.submean(shape, 4, keep=range(16, 32)).bytes)
        self.assertEqual(sparse.Policy("esa").score, sparse.Score("mean", "sum"))
        self.assertEqual(sparse.Policy("esa").schedule(3).modes, [1, 1, 1])
        self.refused(Status.UNSUPPORTED, sparse.Policy("esa").schedule, 24, "gpt-oss-20b")
        self.assertEqual(sparse.Policy("gsa-device").choose(16, 8192).topk_tokens, 4096)
        policy = sparse.Policy("topk:choice=mass,reduce=max,eps=0.9")
        self.assertEqual(policy.choose(16, 100), sparse.Mass(eps=0.9))


class Schedules(Case):
    def test_steps_of_a_schedule(self):
        schedule = sparse.Schedule([0, 1, 2, 2, 1], dense_below=100, retrieval_stride=2, lag=1, rows=2)
        self.assertEqual((schedule.layers, schedule.lag, schedule.choices), (5, 1, 2))
        self.assertEqual(schedule.step(0, 7, 1000).mode, sparse.LayerMode.DENSE)
        self.assertEqual(schedule.step(1, 7, 99).mode, sparse.LayerMode.DENSE)
        self.assertEqual(schedule.step(3, 4, 1000), sparse.Step(sparse.LayerMode.REUSE, False, 0, 1, 2))
        self.assertEqual(schedule.step(4, 4, 1000), sparse.Step(sparse.LayerMode.SELECT, True, 2, 4, 2))
        self.assertEqual(schedule.step(4, 5, 1000), sparse.Step(sparse.LayerMode.SELECT, False, 0, 4, 4))

    def test_models(self):
        schedule = sparse.Schedule.for_model("meta-llama/Llama-3.1-8B-Instruct", 32)
        self.assertEqual(schedule.modes, [0, 0] + [1] * 30)
        self.assertEqual(sparse.Schedule.defaults(3).modes, [0, 0, 1])
        self.assertIn("sliding", self.refused(Status.UNSUPPORTED, sparse.Schedule.for_model, "google/gemma-2-9b", 42))
        self.refused(Status.NOT_FOUND, sparse.Schedule.for_model, "nobody/knows", 3)
        self.refused(Status.INVALID, sparse.Schedule.defaults, 0)
        self.refused(Status.INVALID, sparse.Schedule.defaults, 513)
        self.refused(Status.INVALID, sparse.Schedule, [2, 1])
        self.refused(Status.INVALID, sparse.Schedule, [1], retrieval_stride=0)
        self.refused(Status.INVALID, schedule.step, 32, 0, 9999)
        self.assertRaises(ValueError, sparse.Schedule, [])


def pool_of(worker, slots):
    """Slots for single layers, and their region."""
    shared = SharedMemory(slots * LAYER)
    view = np.frombuffer(shared.buffer, np.float32).reshape(slots, 2, TOKENS, HEADS, DIM)
    return view, worker.ns.register([shared.memory()], [Plane(0, 0, LAYER, LAYER, 0)], blocks=slots, block_pool=True)


class Gathers(Case):
    def test_what_a_selection_chose(self):
        worker = self.worker()
        worker.dump()
        slots, pool = pool_of(worker, BLOCKS)
        with worker.summaries() as summaries, summaries.sequence(names(), build=True) as sequence:
            chosen = sequence.select(1, query()).union()
            items = np.array([(block, 1, slot) for slot, block in enumerate(chosen)], np.uint32)
            result = pool.gather(sequence, items, priority=7, daemon_timeout=5).wait()
            self.assertTrue(result.all_ok)
            self.assertEqual((result.ok, len(result.blocks), result.bytes), (len(chosen), len(chosen), len(chosen) * LAYER))
            np.testing.assert_array_equal(slots[: len(chosen)], worker.pages[1, list(chosen)])
            slots[:] = 0
            self.assertTrue(pool.gather(sequence, [(3, 0, 7), (3, 1, 0)]).wait().all_ok)
            np.testing.assert_array_equal(slots[[7, 0]], worker.pages[:, 3])
        self.assertEqual(list(pool.gather([names(1), b"x" * 32], [(0, 1, 5), (1, 1, 6)]).wait().blocks),
                         [BlockResult.OK, BlockResult.MISS])
        np.testing.assert_array_equal(slots[5], worker.pages[1, 0])
        pool.close()

    def test_hostile_input(self):
        worker, other = self.worker(), self.worker()
        worker.dump()
        _, pool = pool_of(worker, 8)
        with worker.summaries() as summaries, summaries.sequence(names(3)) as sequence, other.summaries() as theirs, theirs.sequence(names(3)) as foreign:
            for items in ([(0, 0, 8)], [(3, 0, 0)], [(0, LAYERS, 0)], [(0, 0, 1), (1, 0, 1)]):
                self.refused(Status.INVALID, pool.gather(sequence, items).wait)
            self.refused(Status.INVALID, pool.gather, sequence, [])
            self.refused(Status.INVALID, pool.gather, foreign, [(0, 0, 0)])
            self.refused(Status.INVALID, pool.gather, b"", [(0, 0, 0)])
            self.refused(Status.INVALID, worker.region.gather(sequence, [(0, 0, 0)]).wait)
            self.refused(Status.INVALID, pool.load(names(1), [0]).wait)
            self.assertRaises(ValueError, pool.gather, sequence, [(0, 0)])
            self.assertRaises(ValueError, pool.gather, sequence, np.zeros((2, 3)))
            self.assertRaises(ValueError, pool.gather, sequence, [(-1, 0, 0)])
        self.refused(Status.INVALID, pool.gather, sequence, [(0, 0, 0)])


class Restart(unittest.TestCase):
    """Daemons one after the other, over one directory."""

    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="sparse.")
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.daemon = None
        self.start()
        self.addCleanup(lambda: self.daemon.stop())

    def start(self):
        if self.daemon:
            self.assertEqual(self.daemon.stop(), 0)
        self.daemon = Daemon(directory=self.directory)

    def test_a_sequence_goes_on_and_summaries_are_found(self):
        worker = Worker(self, self.daemon, "restart")
        worker.dump()
        with worker.summaries() as summaries:
            sequence = summaries.sequence(names(), build=True)
            before = plain(sequence.select(0, query()))
            self.start()
            try:  # the call that notices the break may report it
                worker.ns.lookup_prefix(names())
            except UcmError as error:
                self.assertTrue(error.away)
            self.assertEqual(plain(sequence.select(0, query())), before)
            self.assertEqual(len(sequence), BLOCKS)
            appended = summaries.sequence().append(names())
            self.assertEqual((appended.summaries, appended.built), (BLOCKS, 0))
            self.assertEqual(set(summaries.build(names()).wait().blocks), {BlockResult.EXISTS})

    def test_a_pool_goes_on(self):
        worker = Worker(self, self.daemon, "pool")
        worker.dump()
        slots, pool = pool_of(worker, 4)
        with worker.summaries() as summaries, summaries.sequence(names()) as sequence:
            self.start()
            items = [(9, 1, 3), (8, 0, 2)]
            try:  # as above
                result = pool.gather(sequence, items).wait()
            except UcmError as error:
                self.assertTrue(error.away)
                result = pool.gather(sequence, items).wait()
            self.assertTrue(result.all_ok)
            np.testing.assert_array_equal(slots[2:], [worker.pages[0, 8], worker.pages[1, 9]])

    def test_what_was_selected_is_brought_up_and_loaded(self):
        worker = Worker(self, self.daemon, "prefetch")
        worker.dump()
        with worker.summaries() as summaries:
            summaries.build(names()).wait()
            self.start()
            worker.client.close()
            worker = Worker(self, self.daemon, "prefetch")
        with worker.summaries() as summaries, summaries.sequence() as sequence, sparse.Prefetcher(worker.client) as prefetcher:
            appended = sequence.append(names())
            self.assertEqual((appended.nvme, appended.summaries), (BLOCKS, BLOCKS))
            chosen = sequence.select(1, query()).union()
            prefetch = prefetcher.submit(sequence, chosen, place=3)
            got = prefetch.wait()
            self.assertEqual((got.n, got.came, got.missing), (len(chosen), len(chosen), 0))
            self.assertEqual(got.bytes, len(chosen) * LAYERS * LAYER)
            worker.pages[:] = 0
            wanted = b"".join(names()[32 * b : 32 * b + 32] for b in chosen)
            self.assertTrue(worker.region.load(wanted, chosen).wait().all_ok)
            prefetch.close(used=len(chosen))
            stats = prefetcher.stats()
            self.assertEqual((stats.useful, stats.useless, stats.held_bytes), (len(chosen), 0, 0))
            with prefetcher.submit(sequence, [0], batch=9, daemon_timeout=0.05) as late:
                self.assertEqual(late.wait().missing, 1)
            more = sequence.select(0, query(6), sparse.TopK(sparse_ratio=1), prefetch=2).union()
            wanted = b"".join(names()[32 * b : 32 * b + 32] for b in more)
            until(lambda: set(worker.ns.lookup_per_key(wanted)[0]) == {Found.DRAM}, "what select prefetches")

    def test_the_example_computes_nothing_twice(self):
        said, found = [], []
        for run in range(3):
            if run == 2:
                self.start()
            with Client(socket=self.daemon.socket) as client:
                found.append(retrieve_documents.ask(client, ["otter", "Quito"], said.append))
        self.assertEqual([line for line in said if "computed" in line], [
            "100 documents: 100 computed, 800 summaries built",
            "100 documents: 0 computed, 0 summaries built",
            "100 documents: 0 computed, 0 summaries built",
        ])
        self.assertEqual(found[0][0][1:], (14, [2, 5]), "otters are second, Quito is fifth")
        self.assertEqual(found[0], found[2])


class Document(Case):
    def test_the_lines_of_the_page(self):
        page = (TOP / "docs/sparse.md").read_text()
        block = re.search(r"```python\n(.*?)```", page, re.S)[1]
        self.assertLessEqual(len(block.splitlines()), 10)
        worker = self.worker()
        worker.dump()
        scope = {"ns": worker.ns, "region": worker.region, "keys": names(), "q": query(), "layer": 1}
        block = block.replace('"bf16", tokens=16, kv_heads=8, head_dim=128', f'"f32", {TOKENS}, {HEADS}, {DIM}')
        exec(compile(block, "docs/sparse.md", "exec"), scope)
        self.assertGreaterEqual(len(scope["blocks"]), 12)
        self.assertEqual(scope["loaded"].ok, len(scope["blocks"]))

    def test_the_program_in_c(self):
        source = (TOP / "client/examples/select_blocks.c").read_text()
        self.assertIn(re.search(r"```c\n(.*?)```", (TOP / "docs/sparse.md").read_text(), re.S)[1], source)
        program = pathlib.Path(os.environ["UCMCLIENT_LIB"]).parent / "examples/select_blocks"
        environment = dict(os.environ, UCM_SOCKET=self.daemon.socket)
        for stored, built in ((524288, 64), (0, 0)):
            said = subprocess.run([program], env=environment, check=True, capture_output=True, text=True, timeout=60).stdout
            self.assertEqual(said.splitlines(), [
                f"stored 64 of 64 blocks, {stored} bytes",
                f"64 blocks, 64 with a summary, {built} of these new; 12 chosen by 2 KV heads",
                "loaded 7 of 7 blocks, 57344 bytes",
            ])


if __name__ == "__main__":
    unittest.main()
