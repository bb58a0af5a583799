"""What the tests of sparse decoding in the small engine share: an engine, and a decoder that has
all K and V in one array. Every output and every choice is compared with the decoder's, bit for bit.
"""

from vllm_case import BLOCK, MODEL, Case, daemon, prompt, run  # sets the paths
import numpy
import decode_kernels as kernels
import model
from engine import Pool
from engine_pages import HostPages
from sparse_engine import SparseEngine
from ucmclient import sparse
from ucmclient.decode import Choices
from ucmclient.engine.vllm.connector import UcmConnector


def policy(choice, score=sparse.Score()):
    return Choices.alike(choice, model.LAYERS, score)


QUARTER = policy(sparse.TopK(sparse_ratio=0.25, min_blocks=1, recent_blocks=1))
ALL = policy(sparse.TopK(sparse_ratio=1.0))
REFERENCES, PREFILLED = {}, {}


class Reference:
    """logits of each output, and choices as SparseRequest has them. policy None: every token is
    dense. Compares what kernels/attend computes with a softmax of numpy's."""

    def __init__(self, tokens, outputs, policy, dtype):
        self.policy, self.dtype = policy, {"float32": "f32", "bfloat16": "bf16"}[dtype]
        shape = model.LAYERS, -(-(len(tokens) + outputs) // BLOCK), 2, BLOCK, model.KV_HEADS, model.HEAD
        self.memory = HostPages(int(numpy.prod(shape)), dtype)
        self.kv = self.memory.whole.reshape(shape)
        of = sparse.Shape(self.dtype, BLOCK, model.KV_HEADS, model.HEAD)
        self.summary = sparse.Policy(policy.text).summary(of) if hasattr(policy, "text") else sparse.mean(of)
        self.logits, self.choices, first = [], {}, len(tokens) - 1
        done, tokens = self.prefilled(tokens[:first], dtype), list(tokens)
        for position in range(done, first + outputs):
            hidden = MODEL.embedding[tokens[position]]
            for layer in range(model.LAYERS):
                for i, row in enumerate(MODEL.keys_values(layer, hidden, position)):
                    self.memory.put(self.kv, (layer, position // BLOCK, i, position % BLOCK), row)
                hidden = self.layer(layer, hidden, position, position >= first)
            if position >= first:
                self.logits.append(MODEL.logits(hidden))
                tokens.append(int(numpy.argmax(self.logits[-1])))
            if position == first - 1:
                PREFILLED[tuple(tokens[:first]), dtype] = self.kv.copy()

    def prefilled(self, tokens, dtype):
        earlier = PREFILLED.get((tokens, dtype))
        if earlier is None:
            return 0
        n = -(-len(tokens) // BLOCK)
        self.kv[:, :n] = earlier[:, :n]
        return len(tokens)

    def layer(self, layer, hidden, position, chosen):
        q, lists = MODEL.queries(layer, hidden, position), None
        if chosen and self.policy is not None:
            candidates = max(0, position // BLOCK - self.policy.window)
            source = self.policy.source(layer)
            lists = [self.choices[position, source, head] for head in range(model.KV_HEADS)] if source != layer else self.lists(layer, candidates, q)
            lists *= model.KV_HEADS // len(lists)
            self.choices.update({(position, layer, head): blocks for head, blocks in enumerate(lists)})
            lists = [blocks + list(range(candidates, position // BLOCK + 1)) for blocks in lists]
        outputs = kernels.over(self.kv[layer], q, position, lists, self.dtype)
        if chosen:
            self.compare(layer, q, position, lists, outputs)
        return MODEL.after(layer, hidden, numpy.concatenate(outputs))

    def compare(self, layer, q, position, lists, outputs):
        for head, out in enumerate(outputs):
            blocks = range(position // BLOCK + 1) if lists is None else lists[head]
            tokens = [t for b in blocks for t in range(b * BLOCK, min((b + 1) * BLOCK, position + 1))]
            k, v = (self.memory.get(self.kv[layer, :, i, :, head]).reshape(-1, 1, model.HEAD)[tokens] for i in (0, 1))
            numpy.testing.assert_allclose(out, model.attend(q[model.heads_of(head)], k, v), rtol=1e-4, atol=1e-5)

    def lists(self, layer, candidates, q):
        if candidates == 0:
            return [[]]
        k = numpy.ascontiguousarray(self.kv[layer, :candidates, 0]).reshape(candidates, -1)
        chosen = self.summary.compute(k).select(q, self.policy.of_candidates(layer, candidates), self.policy.score)
        return [list(one) for one in chosen.lists]


def reference(tokens, outputs, policy, dtype="float32"):
    key = (tuple(tokens), outputs, policy, dtype)
    if key not in REFERENCES:
        REFERENCES[key] = Reference(*key)
    return REFERENCES[key]


def forget_entries(e):
    for rank in e.sparse:
        for row in range(e.room.rows):
            rank.decoder.entries.forget(row)


class SparseCase(Case):
    def engine(self, policy=QUARTER, **more):
        more = {"socket": self.daemon.socket, "retry_interval": 0.05, "lookup_timeout": 2.0, "dtype": self.DTYPE, "gather_timeout": 20.0,
                "patience": 20.0, **more}
        e = SparseEngine(MODEL, UcmConnector, sparse=policy, **more)
        self.addCleanup(e.close)
        return e

    def same(self, requests, but=()):
        for name in requests.keys() - set(but):
            r = requests[name]
            of = reference(r.tokens[: r.prompt_tokens], r.outputs, getattr(r, "policy", None), self.DTYPE)
            self.assertEqual((getattr(r, "error", None), getattr(r, "choices", {})), (None, of.choices))
            self.assertEqual(len(r.logits), len(of.logits))
            for i, (a, b) in enumerate(zip(r.logits, of.logits)):
                self.assertTrue(numpy.array_equal(a, b), f"{name}, output {i}")

    def check(self, e, *requests, but=(), **more):
        self.same(run(e, *requests, **more), but)
        e.step()  # the workers learn which requests are over
        self.assertTrue(e.idle(), "something was never given back")

    def nothing_held(self):
        self.eventually(lambda: all(self.stats()[name] == 0 for name in ("sequences", "leases")))

    @staticmethod
    def counts(e, rank=0):
        return e.sparse[rank].decoder.counts


class Together(SparseCase):
    """Many tests, one daemon, which has the blocks of this prompt."""

    KNOWN = prompt(600, 100)

    @classmethod
    def setUpClass(cls):
        cls.daemon = daemon(nvme=False)
        cls.addClassCleanup(cls.daemon.stop)

    def setUp(self):
        if "stored" not in type(self).__dict__:
            type(self).stored = self.known(self.engine())

    def known(self, e):
        """From now on the engine has no pages of the prompt's blocks, and so gathers what it chooses."""
        self.check(e, e.request("known", self.KNOWN, outputs=1))
        e.pool = Pool(e.blocks)
        return e

    def engine(self, policy=QUARTER, **more):
        return super().engine(policy, **{"salt": "together", **more})

    def cold(self, policy=QUARTER, **more):
        return self.engine(policy, salt=self.id(), **more)
