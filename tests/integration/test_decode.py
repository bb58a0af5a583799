#!/usr/bin/python3
"""ucmclient.decode without an engine or a daemon: what a request needs at most, rows of summaries,
and waits for the daemon. tests/integration/test_vllm_sparse.py has the rest."""

import random
import sys
import time
import unittest
from dataclasses import dataclass
from unittest import mock
from dataclasses import replace

from vllm_paths import TOP  # noqa: F401  sets the paths

import numpy as np

from fake_source import MISS, NO_ROOM, OK, Source
from ucmclient import sparse
from ucmclient.decode import Admission, Choices, Decoder, HeadBytes, Lost, Refused, Room, Rows
from ucmclient.decode.layers import LayerChoices
from ucmclient.errors import Status, UcmError

SHAPE = sparse.Shape("f32", tokens=16, kv_heads=2, head_dim=8)
SUMMARY = sparse.mean(SHAPE)


class Needs(unittest.TestCase):
    def test_no_list_is_longer(self):
        draw = random.Random(1)
        for _ in range(200):
            n = draw.randrange(1, 40)
            choice = draw.choice((
                sparse.TopK(draw.randrange(3), 1, draw.choice((0, 0, 5)), draw.random(), draw.randrange(6), draw.choice((0, 0, 70))),
                sparse.Mass(draw.randrange(3), 1, draw.choice((0, 4)), draw.random())))
            policy = Choices.alike(choice, 3)
            summaries = sparse.Summaries(SUMMARY, draw.randbytes(SUMMARY.bytes * n))
            chosen = summaries.select(memoryview(bytes(2 * 8 * 4)).cast("f", (2, 8)), policy.of_candidates(0, n), policy.score)
            room = policy.room(0, n, SHAPE.tokens)
            self.assertLessEqual(max(map(len, chosen.lists)), room, (choice, n))
            self.assertEqual(policy.entries(n, 2, SHAPE.tokens), 3 * min(n, 2 * room))
            if isinstance(choice, sparse.TopK):
                self.assertEqual(max(map(len, chosen.lists)), room, (choice, n))

    def test_a_request(self):
        policy = Choices.alike(sparse.TopK(sparse_ratio=0.5, min_blocks=1), 4)
        admission = Admission(Room(entries=40, rows=20), policy, lists=1, block_tokens=16)
        need = admission.need(200)
        self.assertEqual((need.entries, need.rows), (4 * 5, 10))
        admission.check(200)
        self.assertEqual(admission.admit(200, [(200, 20)]), 20)
        self.assertIsNone(admission.admit(200, [(200, 20), (200, 20)]))
        for less, words in ((Room(19, 20), "a request of 200 tokens needs 20 entries and this worker has 19"),
                            (Room(40, 9), "needs 10 rows of summaries and this worker has 9")):
            with self.assertRaisesRegex(Refused, words):
                Admission(less, policy, lists=1, block_tokens=16).check(200)

    def test_what_is_expected(self):
        """Floors follow the share that tokens took of their maximum. A request that did not fit
        comes back with the maximum of all."""
        policy = replace(Choices.alike(sparse.TopK(sparse_ratio=0.5, min_blocks=1), 4), floor=2.0)
        admission = Admission(Room(entries=90, rows=60), policy, lists=1, block_tokens=16)
        self.assertEqual([admission.floor(tokens) for tokens in (200, 1600)], [40, 90], "no more than there is")
        for _ in range(400):
            admission.saw(2, 10)
        self.assertAlmostEqual(admission.expected, 0.1, places=2)
        self.assertEqual((admission.floor(200), admission.floor(200, wary=True)), (5, 20))
        self.assertEqual(admission.admit(200, [(200, 5)] * 3, wary=True), 20)
        self.assertIsNone(admission.admit(200, [(200, 5)] * 4, wary=True), "rows for more, but not entries for the most of all")
        self.assertEqual(admission.admit(200, [(200, 5)] * 5), 5)
        self.assertIsNone(admission.admit(200, [(200, 5)] * 6), "no rows")
        admission.saw(3, 0)

    def test_entries_of_heads(self):
        each = Choices.alike(sparse.TopK(sparse_ratio=0.2, min_blocks=1), 3)
        for layer_heads, lists, entries in ((1, 4, 3 * 8), (4, 4, 3 * 4 * 2), (4, 1, 3 * 4 * 2), (1, 1, 3 * 2)):
            self.assertEqual(each.entries(10, lists, 16, layer_heads), entries)

    def test_bytes_of_a_head(self):
        """Whatever the layout, K of all tokens of the head, then V."""
        kv = np.arange(2 * 16 * 2 * 8, dtype=np.float32).reshape(2, 16, 2, 8)  # K and V, tokens, heads
        for shape, data in ((replace(SHAPE, v_head_dim=8), kv), (replace(SHAPE, v_head_dim=8, order="hnd"), kv.swapaxes(1, 2)),
                             (replace(SHAPE, v_head_dim=8, k_token_stride=128, k_head_stride=64, v_offset=32, v_token_stride=128, v_head_stride=64),
                              kv.transpose(1, 2, 0, 3))):
            of = HeadBytes(shape)
            self.assertEqual((of.bytes, of.shape.kv_heads), (2 * 16 * 8 * 4, 1))
            for head in range(2):
                self.assertEqual(of.of(head, np.ascontiguousarray(data).data.cast("B")), kv[:, :, head].tobytes())

    def test_a_policy_takes_as_many(self):
        """As many as a selection takes among all complete blocks, of which the last ones are the
        window."""
        for text in ("auto", "topk:dense_below=0,topk_tokens=160", "topk:dense_below=0,sparse_ratio=0.3,min_blocks=6,limit=9", "esa:retrieval_stride=1,lag=0,dense_below=320",
                     "gsa-device:dense_below=0,topk_tokens=48,sink_tokens=20,recent_tokens=33", "topk:dense_below=0,dense_first=1,dense_last=1,topk_tokens=64"):
            policy = sparse.Policy(text)
            choices = Choices.from_policy(policy, SHAPE, 4, "Llama-3.1-8B")
            self.assertEqual(choices.floor, 2)
            for n in (1, 2, 3, 7, 19, 20, 60, 300):
                budget = policy.budget(SHAPE.tokens, n) if policy.goal else None
                whole = policy.choose(SHAPE.tokens, n, budget)
                scores = memoryview(bytes(4 * n)).cast("f")
                for layer, mode in enumerate(policy.schedule(4).modes):
                    candidates = choices.candidates(n)
                    dense = mode == sparse.LayerMode.DENSE or n * SHAPE.tokens < policy.dense_below
                    wanted = candidates if dense else max(0, len(sparse.choose(scores, whole, SHAPE.tokens)) - choices.window)
                    of = choices.of_candidates(layer, candidates)
                    taken = sparse.choose(scores[:candidates], of, SHAPE.tokens) if candidates else []
                    self.assertEqual((len(taken), choices.room(layer, candidates, SHAPE.tokens)), (wanted, wanted), (text, n, layer))

    def test_layers_that_share_a_choice(self):
        choices = Choices.from_policy("topk:reuse=2,dense_first=1", SHAPE, 6)
        self.assertEqual([choices.source(layer) for layer in range(6)], [0, 1, 1, 3, 3, 5])
        self.assertEqual(Choices.alike(sparse.TopK(), 2).source(1), 1)

    def test_policies_that_are_refused(self):
        for text, words in (("esa", "retrieval_stride=5 needs what earlier tokens asked for; set retrieval_stride=1"), ("gsa", "set lag=0"),
                            ("kvstar:retrieval_stride=1", "set rows=1"),
                            ("psa-estimated", "choice=estimated stops while attention runs"), ("topk:recent_blocks=0", "1 or more")):
            with self.assertRaisesRegex(ValueError, words):
                Choices.from_policy(text, SHAPE, 4)
        with self.assertRaises(UcmError):
            Choices.from_policy("topk", SHAPE, 24, "gpt-oss-20b")

    def test_rules_that_stop_are_for_attention_that_does(self):
        for text, rule, known in (("psa", "psa", "bounds"), ("psa-estimated:limit=40,eps=0.9", "estimated", "estimates"), ("psa-certified", "certified", "bounds"),
                                  ("psa:reduce=max", "psa", "")):
            rounds = Choices.from_policy(text, SHAPE, 4, stops=True).rounds
            self.assertEqual((rounds.rule, rounds.known, rounds.rounds, rounds.sink_blocks, rounds.every), (rule, known, 6 if rule == "psa" else 3, 1, 4))
            self.assertEqual(rounds.eps, sparse.Policy(text).eps)
        choices = Choices.from_policy("psa-estimated:limit=40,dense_first=1,min_tokens=160,dense_below=320", SHAPE, 2, stops=True)
        self.assertEqual([choices.room(layer, n, SHAPE.tokens) for layer in (0, 1) for n in (10, 100)], [10, 100, 10, 38])
        self.assertEqual([choices.least(layer, n) for layer in (0, 1) for n in (10, 100)], [10, 100, 10, 160 // SHAPE.tokens - 2])
        for text, words in (("psa-estimated:reuse=2", "set reuse=1"), ("psa-estimated:reduce=max", "set reduce=softmax")):
            with self.assertRaisesRegex(ValueError, words):
                Choices.from_policy(text, SHAPE, 4, stops=True)
        self.assertIsNone(Choices.from_policy("topk", SHAPE, 4, stops=True).rounds)

    def test_a_budget_that_follows(self):
        choices = Choices.from_policy("auto:goal=0.8,min_tokens=0,dense_below=0,dense_first=1", SHAPE, 2, stops=True)
        self.assertEqual((choices.rounds.rule, choices.rounds.rounds), ("estimated", 1))
        budget = choices.budget(500)
        begun = choices.of_budget(1, 500, budget)
        self.assertEqual(begun, choices.room(1, 500, SHAPE.tokens))
        budget.next(502, 0.5)
        self.assertGreater(choices.of_budget(1, 500, budget), begun)
        self.assertEqual(choices.of_budget(0, 500, budget), 500, "a dense layer")
        self.assertIsNone(Choices.from_policy("topk", SHAPE, 2).budget(500))

    def test_windows_are_alike(self):
        for windows in ((0, 0), (1, 2)):
            with self.assertRaisesRegex(ValueError, "all must have one size, 1 or more"):
                Choices(tuple(sparse.TopK(recent_blocks=n) for n in windows))


class Array(np.ndarray):
    """What LayerChoices needs of torch's tensors."""

    contiguous = np.ndarray.copy

    def copy_(self, other):
        self[:] = other

    def amin(self, axis):
        return self.min(axis)

    @staticmethod
    def zeros(shape, dtype, device=None):
        return np.zeros(shape, dtype).view(Array)


class LayersChoose(unittest.TestCase):
    """LayerChoices without a GPU."""

    def choices(self, policy, selector=None, **more):
        fake = mock.Mock(zeros=Array.zeros, tensor=lambda numbers, dtype: np.array(numbers, dtype), int32=np.int32, float32=np.float32)
        self.opened = []

        def select(summary, gpu, q_heads, max_blocks, **options):
            self.opened.append((q_heads, max_blocks, options))
            return mock.Mock(lists=2, room=options["room"], summary=summary, device="cuda:0")
        with mock.patch.dict(sys.modules, torch=fake), mock.patch("ucmclient.decode.layers.Selector", select):
            return LayerChoices(Choices.from_policy(policy, SHAPE, 3, stops=True), sparse.Policy(policy).summary(SHAPE), None, 8,
                                max_blocks=500, sequences=2, **more)

    def test_one_selection_for_layers_and_requests_that_differ(self):
        choices = self.choices("topk:topk_tokens=320,dense_first=1,dense_below=800,reuse=2")
        (q_heads, max_blocks, options), = self.opened
        self.assertEqual((q_heads, max_blocks, options["room"], options["choose"].sink_blocks), (8, 500, 500, 1))
        choices.set(0, 300)
        choices.set(1, 30)
        self.assertEqual(choices.most.tolist(), [[300, 30], [18, 30], [18, 30]], "of 20 blocks 2 are the window")
        chosen = choices(1, "summaries", "table", "candidates", "q")
        call = choices.select.call_args
        self.assertEqual((call.args, call.kwargs["most"].tolist()), (("summaries", "table", "candidates", "q"), [18, 30]))
        self.assertIs(choices(2, "summaries", "table", "candidates", "q2"), chosen, "of the layer before")
        choices.select.assert_called_once()
        self.assertIsNone(choices.ranked(1, "candidates"))
        choices.set(0, 0)
        self.assertEqual(choices.most[:, 0].tolist(), [0, 0, 0])

    def test_what_lists_attend_at_least(self):
        choices = self.choices("psa-estimated:limit=100,dense_first=1,min_tokens=160,dense_below=0")
        choices.set(1, 300)
        self.assertEqual((choices.most[:, 1].tolist(), choices.least[:, 1].tolist()), ([300, 98, 98], [300, 8, 8]))
        ranked = choices.ranked(1, "candidates")
        self.assertEqual((ranked.select, ranked.n_blocks, ranked.report.shape), (choices.select, "candidates", (2, 2, 4)))

    def test_budgets_follow_what_was_covered(self):
        self.assertEqual(self.choices("auto:goal=0.8,dense_below=0,limit=90", follow=True).room, 88)
        choices = self.choices("auto:goal=0.8,min_tokens=0,dense_below=0,patience=1,reuse=2", follow=True)
        self.assertEqual(choices.room, 500)
        choices.set(0, 300)
        begun = choices.most[:, 0].tolist()
        choices.reports[..., 2] = np.float32(0.9).view(np.int32)
        choices.reports[0, 0, 1, 2] = np.float32(0.5).view(np.int32)  # one head of layers 0 and 1
        choices.follow([0])
        more = choices.most[:, 0].tolist()
        self.assertTrue(more[0] > begun[0] and more[1] > begun[1] and more[2] < begun[2], (begun, more))
        choices.set(0, 301)
        self.assertEqual(choices.most[:, 0].tolist(), more, "the budget stays with the request")
        choices.set(0, 0)
        choices.set(0, 300)
        self.assertEqual(choices.most[:, 0].tolist(), begun, "another one begins")
        self.assertEqual(choices.most[:, 1].tolist(), [0, 0, 0])

    def test_refused(self):
        for policy, more, words in (("topk", {"follow": True}, "only a policy with a goal"), ("topk:choice=mass,reduce=max,dense_below=0", {}, "choice=mass")):
            with self.assertRaisesRegex(ValueError, words):
                self.choices(policy, **more)


class Shared(unittest.TestCase):
    def test_rows(self):
        forgotten = []
        rows = Rows(3, forgotten.append)
        a, b = rows.bind(b"a"), rows.bind(b"b")
        self.assertEqual(rows.bind(b"a"), a)
        rows.fill(a)
        self.assertTrue(rows.filled(a))
        c = rows.bind(b"c")
        self.assertIsNone(rows.bind(b"d"), "all are in use")
        rows.release(a)
        self.assertIsNone(rows.bind(b"d"), "one user is left")
        rows.release(a)
        rows.release(b)
        self.assertEqual((rows.in_use, rows.bind(b"a")), (1, a), "it was kept")
        self.assertTrue(rows.filled(a))
        rows.release(c)
        self.assertEqual((rows.bind(b"d"), forgotten), (b, [b]), "the longest unused")
        self.assertEqual((rows.bind(b"e"), rows.key(c)), (c, b"e"))
        self.assertEqual((rows.filled(c), forgotten), (False, [b, c]))


class Entries:
    """As much of ucmclient.decode.Entries as steps need in which nothing was resident before."""

    def __init__(self):
        self.free, self.at = 0, {}

    enter = leave = forget = lambda self, *_: None

    def begin(self):
        self.wanted, self.arrived = {}, None

    def resolve(self, layer_head, sequences, apart):
        self.want([(layer_head + apart * i, rows[block], 0) for _, rows, lists in sequences for i, blocks in enumerate(lists) for block in blocks])

    def want(self, wanted):
        self.wanted.update({(layer_head, row): None for layer_head, row, _ in wanted if (layer_head, row) not in self.at})

    def take(self):
        self.misses = [(*key, i if i < self.free else None) for i, key in enumerate(self.wanted)]
        return self.misses

    def publish(self, arrived):
        self.arrived = arrived
        self.at.update({miss[:2]: miss[2] for miss, came in zip(self.misses, arrived) if came})
        self.wanted.clear()

    def entry(self, layer_head, row):
        return self.at.get((layer_head, row))


@dataclass
class SimpleReferenced:
    places: list
    placed: int
    moved: int
    read: int
    missing: int

    def __iter__(self):
        return iter(self.places)

    def __len__(self):
        return len(self.places)


class Served(unittest.TestCase):
    def step(self, source, entries=4, gather_timeout=5.0):
        """Two sequences miss two blocks each, one of which both share. Returns the names of
        sequences that lost a block."""
        policy = Choices.alike(sparse.TopK(), 2)
        self.entries = Entries()
        self.entries.free = entries
        self.decoder = decoder = Decoder(source, SUMMARY, policy, Room(8, 8), self.entries, requests=2, layer_bytes=64, gather_timeout=gather_timeout)
        layers = [bytes(16 * 2 * 8 * 4)] * 2
        a, b = decoder.open("a"), decoder.open("b")
        decoder.extend(a, [b"0" * 32, b"1" * 32], lambda i: layers)
        decoder.extend(b, [b"0" * 32, b"2" * 32], lambda i: layers)
        decoder.begin()
        self.assertEqual(decoder.resolve(1, [(a, [[0], [0, 1]]), (b, [[0, 1], [1]])]), [[{}, {}]] * 2)
        self.assertEqual((len(decoder.missing), a.taken, b.taken), (3, 2, 2))
        return {sequence.name for sequence in decoder.serve()}

    def test_what_is_shared_comes_once(self):
        source = Source([OK] * 3)
        self.assertEqual(self.step(source), set())
        self.assertEqual(source.asked, [[(0, 1, 0), (1, 1, 1), (2, 1, 2)]])
        self.assertEqual((self.entries.arrived, self.decoder.counts.gathered), ([True] * 3, 3))

    def test_whoever_misses_it_loses(self):
        self.assertEqual(self.step(Source([MISS, OK, OK])), {"a", "b"})
        self.assertEqual(self.step(Source([OK, OK, MISS])), {"b"})
        self.assertEqual((self.entries.arrived, self.decoder.counts.failed), ([True, True, False], 1))

    def test_what_may_pass_is_asked_again(self):
        source = Source([NO_ROOM, OK, NO_ROOM], None, [OK, NO_ROOM], [OK])
        self.assertEqual(self.step(source), set())
        self.assertEqual([len(items) for items in source.asked], [3, 2, 2, 1])

    def test_until_the_timeout(self):
        for answer in (None, [NO_ROOM] * 3):
            began = time.monotonic()
            self.assertEqual(self.step(Source(answer), gather_timeout=0.1), {"a", "b"})
            self.assertLess(time.monotonic() - began, 5)

    def test_nobody_waits_for_a_daemon_that_is_away(self):
        source = Source(None)
        source.away = True
        self.assertEqual(self.step(source, gather_timeout=1e6), {"a", "b"})
        self.assertEqual(len(source.asked), 1, "it is asked once: it may be there again")

    def test_a_gather_that_does_not_end_is_cut(self):
        source = Source(UcmError(Status.DEADLINE, "late"))
        self.assertEqual(self.step(source, gather_timeout=0.1), {"a", "b"})
        self.assertEqual(source.cuts, 1)

    def test_no_entry(self):
        """No sequence loses a block. The run is repeated. If there are too few entries for the
        first layer that misses a block, the run is crowded."""
        source = Source([OK] * 3)
        self.assertEqual(self.step(source, entries=2), set())
        self.assertEqual((len(source.asked[0]), self.decoder.counts.full, self.decoder.crowded), (2, 1, set()))
        decoder = self.decoder
        a, b = decoder.sequences.values()
        self.entries.free = 0
        decoder.begin(again=True)
        self.assertEqual(decoder.resolve(0, [(a, [[0]])]), [[{}]])
        self.assertEqual(decoder.resolve(1, [(b, [[0, 1]])]), [[{}]], "it chose by what was not there")
        self.assertEqual((list(decoder.missing), decoder.serve(), decoder.crowded), ([(0, 0)], set(), {a}))
        decoder.begin()
        decoder.resolve(0, [(a, [[0]])])
        self.assertEqual((decoder.serve(), decoder.crowded), (set(), set()), "another step")

    def test_much_that_is_missing_is_served_by_layer(self):
        source = Source([OK] * 2)
        self.step(source)
        decoder = self.decoder
        a, b = decoder.sequences.values()
        self.entries.at.clear()
        decoder.begin()
        for layer in (0, 1):
            decoder.resolve(layer, [(a, [[0, 1]]), (b, [[0]])])
        with mock.patch("ucmclient.decode.decoder.AT_ONCE", 0):
            decoder.serve()
        self.assertEqual(source.asked[1:], [[(0, 0, 0), (1, 0, 1)]])
        decoder.begin(again=True)
        decoder.resolve(0, [(a, [[0, 1]]), (b, [[0]])])
        self.assertEqual(list(decoder.missing), [])

    def test_references(self):
        """The decoder waits for copies within DRAM. Reads come alongside the steps, some blocks in
        each."""
        asked, answers = [], []

        def ref(registered, first, n, *, priority, daemon_timeout, timeout):
            came, moved, read, missing = answers.pop(0)
            asked.append((first, n, priority))
            places = [None if i in missing else "place" for i in range(came)] + [None] * (n - came)
            return SimpleReferenced(places, n - places.count(None), moved, read, len(missing))

        decoder = Decoder(Source([OK]), SUMMARY, Choices.alike(sparse.TopK(), 1), Room(1, 800), Entries(), requests=1, layer_bytes=64)
        a = decoder.open("a")
        a.rows, a.kept, a.registered, decoder._mapping = list(range(800)), 800, mock.Mock(), mock.Mock(ref=ref)
        answers += [(500, 500, 0, ()), (800 - 500, 300, 0, ())]
        decoder._ref(a)
        self.assertEqual((asked, a.referenced, a.below, len(decoder._places)), ([(0, 800, 7), (500, 300, 7)], 800, False, 800))
        decoder._places.clear()
        asked[:], a.referenced, answers[:] = [], 0, [(100, 0, 100, ()), (90, 0, 60, (2,))]
        with mock.patch("ucmclient.decode.supply._BESIDE_PAUSE", 0):
            decoder._ref(a)
            self.assertEqual((asked, a.referenced, a.below), ([(0, 800, 7), (100, 256, 0)], 102, True), "up to the one that is missing")
            self.assertEqual(len(decoder._places), 100 + 89)
            answers[:] = [(256, 0, 200, (0,)), (256, 0, 40, ()), (186, 0, 0, ())]
            for end, below in ((358, True), (614, True), (800, False)):
                decoder._ref(a)
                self.assertEqual((a.referenced, a.below), (end, below))
            answers[:] = [(0, 0, 0, ())]
            a.referenced = 700
            decoder._ref(a)
            self.assertEqual((a.referenced, a.below, asked[-1]), (800, False, (700, 100, 7)), "no room: a sequence that misses them asks again")

    def test_references_alongside_a_step(self):
        """The decoder waits for nothing longer than the limit. Nothing counts before the step is
        over. After requests in vain it asks less and less often."""
        asked, answers = [], []

        def ref(registered, first, n, *, priority, daemon_timeout, timeout):
            came = answers.pop(0)
            asked.append((first, n, round(daemon_timeout, 6)))
            return SimpleReferenced(["place"] * came + [None] * (n - came), came, 0, 0, 0)

        source = Source([OK])
        decoder = Decoder(source, SUMMARY, Choices.alike(sparse.TopK(), 1), Room(1, 800), Entries(), requests=2, layer_bytes=64)
        a, b = decoder.open("a"), decoder.open("b")
        decoder._connected()
        for one, first, n in (a, 0, 600), (b, 600, 40):
            one.rows, one.keys, one.kept, one.asked, one.registered = list(range(first, first + n)), [b""] * n, n, n, mock.Mock()
        decoder._mapping = mock.Mock(ref=ref)
        with mock.patch("ucmclient.decode.supply.time.monotonic") as now:
            now.return_value = 10.0
            self.assertFalse(decoder.keep_beside(0.0005), "no time is left")
            answers[:] = [256, 40]
            self.assertTrue(decoder.keep_beside(0.006))
            self.assertEqual((asked, a.referenced, len(decoder._places)), ([(0, 256, 0.006), (0, 40, 0.006)], 0, 0))
            self.assertFalse(decoder.keep_beside(0.006), "the report was not looked at yet")
            decoder._come()
            self.assertEqual((a.referenced, b.referenced, len(decoder._places)), (256, 40, 296))
            answers[:] = [100]
            decoder.keep_beside(0.006)
            decoder._come()
            self.assertEqual((a.referenced, asked[-1]), (356, (256, 256, 0.006)))
            for at, tries in (10.0, 1), (10.04, 0), (10.06, 1), (10.15, 0), (10.17, 1), (10.36, 0), (10.38, 1):
                now.return_value, answers[:] = at, [0]
                self.assertEqual((decoder.keep_beside(0.006), len(answers)), (tries == 1, 1 - tries), at)
                decoder._come()
            self.assertEqual(a.referenced, 356)
            now.return_value, answers[:] = 10.8, [244]
            decoder.keep_beside(0.006)
            decoder.close("b")
            decoder._ref_later()
            now.return_value = 11.2
            decoder._ref_again()
            decoder._come()
            self.assertEqual((a.referenced, a.coming), (0, None), "what left the mapping meanwhile is asked for again")
            source.ns.client.connection_epoch += 1
            self.assertFalse(decoder.keep_beside(0.006), "another connection, which update() takes notice of")

    def test_no_row(self):
        source = Source([OK])
        decoder = Decoder(source, SUMMARY, Choices.alike(sparse.TopK(), 1), Room(1, 1), Entries(), requests=1, layer_bytes=64)
        with self.assertRaisesRegex(Lost, "all rows"):
            decoder.extend(decoder.open("a"), [b"0" * 32, b"1" * 32], lambda i: [bytes(16 * 2 * 8 * 4)])
        decoder.close("a")
        self.assertEqual(decoder.rows.in_use, 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
