#!/usr/bin/env python3
"""Retrieval over 100 documents: which blocks of which documents does a question want?

Each document's KV is stored once, in blocks of 16 tokens, and the daemon computes a summary of each block. A question
then asks for the best blocks of all 100 documents in one call, and only these are loaded. Run it again, or after a
restart of the daemon: nothing is stored or computed again.

There is no model. A word's key is a random vector of its own, the same in each document, and a question's query is
its words' vectors. A real worker has both in its attention layers.

    python3 retrieve_documents.py [--socket PATH] heron Oslo
"""

from __future__ import annotations

import argparse
import hashlib

import numpy as np

from ucmclient import BlockResult, Client, Identity, Plane, SharedMemory, keys, sparse

ANIMALS = ("heron", "otter", "lynx", "badger", "falcon", "marten", "beaver", "raven", "viper", "salmon")
CITIES = ("Oslo", "Lima", "Cairo", "Perth", "Quito", "Turin", "Seoul", "Accra", "Hanoi", "Delhi")
TOKENS, HEADS, DIM, BLOCKS = 16, 1, 64, 8  # of a block; of a key; of a document
SHAPE = sparse.Shape("float32", TOKENS, HEADS, DIM)
BLOCK_BYTES = TOKENS * HEADS * DIM * 4


def number(word: str) -> int:
    """A token's id, and the seed of its key."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "little")


def vector(word: str) -> np.ndarray:
    return np.random.default_rng(number(word)).standard_normal(DIM, dtype=np.float32)


def documents() -> list[list[str]]:
    """Document 10 a + c names animal a in its third block and city c in its sixth, among words that nobody asks for."""
    texts = []
    for animal in ANIMALS:
        for city in CITIES:
            words = [f"{animal}-{city}-{i}" for i in range(TOKENS * BLOCKS)]
            words[2 * TOKENS + 5], words[5 * TOKENS + 9] = animal, city
            texts.append(words)
    return texts


def identity() -> Identity:
    return Identity("example/retrieval", "f32", "example/1", TOKENS, BLOCK_BYTES, layers=(1,))


def store(region, pages: np.ndarray, ns, texts: list[list[str]]) -> tuple[list[bytes], int]:
    """Stores what is not cached yet. Returns each document's keys, and how many documents had to be computed."""
    sequences, computed = [], 0
    for text in texts:
        names = keys.sha256_chain([number(word) for word in text], TOKENS)
        sequences.append(names)
        if ns.lookup_prefix(names).blocks == BLOCKS:
            continue
        computed += 1
        pages[:BLOCKS] = np.stack([vector(word) for word in text]).reshape(BLOCKS, TOKENS, HEADS, DIM)
        region.dump(names, range(BLOCKS)).wait()
    return sequences, computed


def best(sequences: list[sparse.BlockSequence], words: list[str]) -> list[tuple[float, int, list[int]]]:
    """For each document: its score, its number, and the one block that each word wants. One call for all of them."""
    rows = [(sequence, 0) for sequence in sequences for _ in words]
    queries = np.stack([vector(word) for word in words])[None].repeat(len(sequences), 0).reshape(len(rows), HEADS, DIM)
    one = sparse.TopK(topk_tokens=TOKENS, min_blocks=1, sink_blocks=0, recent_blocks=0)
    chosen = sparse.select(rows, queries, one)
    found = []
    for i in range(len(sequences)):
        mine = chosen[i * len(words) : (i + 1) * len(words)]
        score = sum(selection.scores[0][0] for selection in mine)
        found.append((score, i, sorted({selection.lists[0][0] for selection in mine})))
    return sorted(found, reverse=True)


def ask(client: Client, words: list[str], out=print) -> list[tuple[float, int, list[int]]]:
    texts = documents()
    pages = np.frombuffer((shared := SharedMemory(BLOCK_BYTES * BLOCKS)).buffer, np.float32)
    pages = pages.reshape(BLOCKS, TOKENS, HEADS, DIM)
    planes = [Plane(0, 0, BLOCK_BYTES, BLOCK_BYTES, 0)]
    with client.namespace(identity()) as ns, sparse.SummaryNamespace(ns, sparse.submean(SHAPE, run=2)) as summaries:
        with ns.register([shared.memory()], planes, blocks=BLOCKS) as region:
            names, computed = store(region, pages, ns, texts)
            built = summaries.build(b"".join(names)).wait().blocks.count(BlockResult.OK)
            out(f"{len(texts)} documents: {computed} computed, {built} summaries built")
            sequences = [summaries.sequence(each) for each in names]
            found = best(sequences, words)
            for score, i, blocks in found[:3]:
                wanted = b"".join(names[i][32 * b : 32 * b + 32] for b in blocks)
                region.load(wanted, range(len(blocks))).wait()
                out(f"document {i:2} ({ANIMALS[i // 10]}, {CITIES[i % 10]}): score {score:.1f}, blocks {blocks}")
            out(f"loaded {sum(len(blocks) for _, _, blocks in found[:3])} of {len(texts) * BLOCKS} blocks")
            for sequence in sequences:
                sequence.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--socket", help="default: $UCM_SOCKET, or that of the package")
    parser.add_argument("words", nargs="*", default=["heron", "Oslo"])
    arguments = parser.parse_args()
    with Client(socket=arguments.socket, name="retrieval") as client:
        ask(client, arguments.words)


if __name__ == "__main__":
    main()
