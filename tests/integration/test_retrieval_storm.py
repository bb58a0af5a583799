#!/usr/bin/python3
"""Chains, selections, fetches, builds, evictions by name, cancels and connections that break, all at once and at random, over an arena that
is too small. Every answer is right or an error that says why, and nothing is held afterwards. UCM_STORM_SEED repeats a storm as far as
the scheduler allows; UCM_STORM_STEPS makes it longer."""

import faulthandler
import os
import random
import unittest

from retrieval_case import CANCELLED_CODE, DEADLINE, IDENTITY, LAYERS, SUITE_TIMEOUT_S, Retrieval, lists_of
from second_client import BUSY, NOT_FOUND, OK, Client, Pool, Refused, Region, keys, u32

BLOCKS = 300
AT_ONCE = 12  # requests of one connection
SLOTS = 64
ALLOWED = {BUSY, NOT_FOUND, CANCELLED_CODE, DEADLINE}
SEED = int(os.environ.get("UCM_STORM_SEED", random.randrange(1 << 32)))
STEPS = int(os.environ.get("UCM_STORM_STEPS", 5000))


class Worker:
    """One connection, and what it knows of its chains: what the daemon answered last."""

    def __init__(self, case, dice):
        self.case, self.dice = case, dice
        self.client = Client(case.daemon)
        self.ns = self.client.open(case.identity)
        self.derived = case.digests(self.client, self.ns, build=dice.random() < 0.5)
        self.region, self.pool, self.fetching = None, None, None
        self.chains, self.closed, self.pending = {}, set(), {}

    def begin(self, name, check=None, **params):
        while len(self.pending) >= AT_ONCE:
            self.end(next(iter(self.pending)))
        msgid = self.client.begin(name, **params)
        self.pending[msgid] = check
        return msgid

    def end(self, msgid):
        check = self.pending.pop(msgid)
        try:
            answer = self.client.wait(msgid)
        except Refused as refused:
            self.case.assertIn(refused.code, ALLOWED, refused)
            self.case.refusals[refused.code] = self.case.refusals.get(refused.code, 0) + 1
            return
        if check:
            check(answer)

    def end_all(self):
        for msgid in list(self.pending):
            self.end(msgid)

    def hurry(self):
        return {"deadline_ms": self.dice.choice((1, 2, 5, 20))} if self.dice.random() < 0.3 else {}

    # What it does.

    def dump(self):
        if not self.region:
            self.region = Region(self.client, self.ns, self.case.identity, BLOCKS)
            self.region.memory[:] = self.case.kv.tobytes()
        first = self.dice.randrange(BLOCKS)
        names = range(first, min(BLOCKS, first + 40))
        self.begin("dump", region=self.region.number, keys=keys(*names), blocks=u32(*names))

    def evict(self):
        ns, n = self.dice.choice((self.ns, self.derived)), self.dice.choice((1, 1, 3))
        self.begin("evict", ns=ns, keys=keys(*(self.dice.randrange(BLOCKS) for _ in range(n))), tier=self.dice.choice((0, 1, 1)))

    def open(self):
        if len(self.chains) < 6:
            chain = self.client.call("chain.open", ns=self.derived, lease_ms=self.dice.choice((0, 0, 50)))["chain"]
            self.chains[chain] = 0

    def append(self):
        if not self.chains:
            return
        chain = self.dice.choice(list(self.chains))
        known, n = self.chains[chain], self.dice.randrange(1, 60)
        names = range(known, min(BLOCKS, known + n))
        if not names or any(isinstance(check, tuple) for check in self.pending.values()):
            return

        def check(answer):
            case = self.case
            case.assertEqual(answer["blocks"], known + len(names) - answer.get("missing", 0))
            case.assertEqual(sum(s != 0 for s in answer["status"]), len(names) - answer.get("missing", 0))
            case.assertEqual(sum(s >= 4 for s in answer["status"]), answer.get("digests", 0))
            if chain in self.chains:
                self.chains[chain] = answer["blocks"]
        msgid = self.client.begin("chain.append", chain=chain, keys=keys(*names), build=self.dice.random() < 0.6,
                                  **self.hurry())
        if self.dice.random() < 0.3:  # its other requests meet an append under way
            self.pending[msgid] = check
            self.select(chain)
            self.close(chain)
            return
        self.pending[msgid] = check
        self.end(msgid)

    def select(self, chain=None):
        if not self.chains:
            return
        chains = [chain or self.dice.choice(list(self.chains)) for _ in range(self.dice.choice((1, 1, 3)))]
        shards = [self.dice.randrange(LAYERS) for _ in chains]
        scores = self.dice.random() < 0.3

        def check(answer):
            lists, case = lists_of(answer), self.case
            case.assertEqual(len(lists), 2 * len(chains))
            if scores:
                case.assertEqual(len(answer.get("scores", b"")), len(answer["index"]))
            for i, chosen in enumerate(lists):
                case.assertEqual(chosen, sorted(set(chosen)))
                case.assertLess(max(chosen, default=0), BLOCKS)
                case.chosen += len(chosen)
            if answer.get("no_digest", 0) or answer.get("gone", 0) or chain:
                return
            for i, chosen in enumerate(lists):
                n = self.chains.get(chains[i // 2])
                if n and counts == [self.chains.get(c) for c in chains]:
                    case.assertEqual(chosen, case.right(n, shards[i // 2], i % 2), (n, shards, i))
                    case.compared += 1
        counts = [self.chains[c] for c in chains]
        q = self.case.q.tobytes() * len(chains)
        self.begin("select", check, chains=chains, shards=shards, q=q, q_dtype=1, q_heads=4, min_blocks=1, sparse_ratio=0.3,
                   scores=scores, prefetch=self.dice.choice((0, 0, 4)), **self.hurry())

    def prefetch(self):
        grown = [c for c, n in self.chains.items() if n]
        if grown:
            chain = self.dice.choice(grown)
            index = [self.dice.randrange(self.chains[chain]) for _ in range(20)]
            self.begin("chain.prefetch", chain=chain, index=u32(*index), **self.hurry())

    def fetch(self):
        grown = [c for c, n in self.chains.items() if n]
        if not grown:
            return
        self.pool = self.pool or Pool(self.client, self.ns, self.case.identity["shard_bytes"], SLOTS)
        if self.fetching in self.pending:  # its slots are still written
            self.end(self.fetching)
        chain = self.dice.choice(grown)
        by_chain, blocks = self.dice.random() < 0.7, self.chains[chain]
        items = [(self.dice.randrange(blocks), self.dice.randrange(LAYERS), slot)
                 for slot in self.dice.sample(range(SLOTS), self.dice.randrange(1, SLOTS))]

        def check(answer):
            self.case.assertEqual(len(answer["status"]), len(items))
            for status, (block, layer, slot) in zip(answer["status"], items):
                if status == OK:
                    self.case.assertEqual(self.pool.bytes(slot), self.case.kv[block, layer].tobytes(), (block, layer, slot))
                    self.case.fetched += 1
        self.fetching = self.begin("fetch", check, region=self.pool.number, items=u32(*(n for item in items for n in item)),
                                   priority=self.dice.randrange(8), **self.hurry(),
                                   **({"chain": chain} if by_chain else {"keys": keys(*range(blocks))}))

    def build(self):
        first = self.dice.randrange(BLOCKS)
        self.begin("digest.build", ns=self.derived, keys=keys(*range(first, min(BLOCKS, first + 30))), **self.hurry())

    def lookup(self):
        self.begin("lookup", ns=self.ns, keys=keys(*range(self.dice.randrange(1, BLOCKS))), lease_ms=self.dice.choice((0, 5, 1000)))

    def close(self, chain=None):
        if self.chains:
            chain = chain or self.dice.choice(list(self.chains))
            del self.chains[chain]
            self.begin("chain.close", chain=chain)

    def cancel(self):
        if self.pending:
            self.client.call("cancel", msgid=self.dice.choice(list(self.pending)))


class Storm(Retrieval):
    # A quarter of the arena, which chains may hold, are 512 digests; the KV of all blocks is 7 MiB.
    options = {"arena.size": "8MiB", "arena.extent": "1MiB", "device.cpu_threads": "3", "lease.max": "60s"}

    def right(self, n, layer, head):
        """What a chain of the first n blocks chooses when all have digests."""
        return self.expected[n, layer][head]

    def expect(self):
        """From a daemon at rest: blocks one after the other, so that every length is asked."""
        client, ns, _, self.kv = self.stored(BLOCKS)
        self.settled(client, ns)
        derived = self.digests(client, ns)
        chain = client.call("chain.open", ns=derived)["chain"]
        self.expected = {}
        for n in range(1, BLOCKS + 1):
            answer = client.call("chain.append", chain=chain, keys=keys(n - 1), build=True)
            self.assertEqual((answer["blocks"], answer.get("digests", 0)), (n, 1))
            for layer in range(LAYERS):
                self.expected[n, layer] = lists_of(self.select(client, chain, self.q, layer, sparse_ratio=0.3))
        client.close()

    def held(self, client):
        metrics = self.metrics(client)
        return {name: metrics[name] for name in ("chains", "chain_blocks", "digest_held_bytes", "leases") if metrics[name]}

    def test_storm(self):
        dice = random.Random(SEED)
        self.identity, self.q = dict(IDENTITY, model=self.id()), self.query(seed=5)
        self.refusals, self.compared, self.chosen, self.fetched = {}, 0, 0, 0
        self.expect()
        workers = [Worker(self, dice) for _ in range(4)]
        acts = ([Worker.dump] * 4 + [Worker.evict] + [Worker.open] * 2 + [Worker.append] * 6 + [Worker.select] * 8 +
                [Worker.prefetch] * 2 + [Worker.fetch] * 3 + [Worker.build] * 2 + [Worker.lookup] + [Worker.close] + [Worker.cancel] * 2)
        for _ in range(STEPS):
            i = dice.randrange(len(workers))
            if dice.random() < 0.01:
                workers[i].client.close()
                workers[i] = Worker(self, dice)
            dice.choice(acts)(workers[i])
        for worker in workers:
            worker.end_all()
            worker.client.close()
        observer = self.client()
        self.until(lambda: not self.held(observer), f"an end of what was held, seed {SEED}")
        self.assertGreater(self.compared, 0, f"seed {SEED}")
        self.assertGreater(self.fetched, 0, f"seed {SEED}")
        self.calm()
        print(f"{self.compared} selections compared, {self.chosen} blocks chosen, {self.fetched} layers fetched, refusals {self.refusals}")

    def calm(self):
        """Afterwards everything can be stored and chosen again."""
        client, ns = self.again()
        region = Region(client, ns, self.identity, BLOCKS)
        region.memory[:] = self.kv.tobytes()
        for first in range(0, BLOCKS, 50):
            region.dump(range(first, first + 50), range(first, first + 50))
            self.settled(client, ns)
        derived = self.digests(client, ns)
        chain, answer = self.chain(client, derived, range(BLOCKS), build=True)
        self.assertEqual((answer["blocks"], answer["digests"]), (BLOCKS, BLOCKS), f"seed {SEED}")
        for layer in range(LAYERS):
            self.assertEqual(lists_of(self.select(client, chain, self.q, layer, sparse_ratio=0.3)), self.expected[BLOCKS, layer])


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    print(f"seed {SEED}")
    unittest.main(verbosity=2)
