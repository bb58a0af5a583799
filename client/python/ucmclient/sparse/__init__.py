"""Retrieval: summaries of KV blocks, sequences of blocks, and selections of the blocks that a query wants.

    summary = sparse.mean(sparse.Shape("bf16", tokens=16, kv_heads=8, head_dim=128))
    with sparse.SummaryNamespace(ns, summary) as summaries, summaries.sequence(keys, build=True) as sequence:
        chosen = sequence.select(layer, q)
        sequence.prefetch(chosen.union()).wait()

Tensors are numpy's, torch's or any buffer; results are memoryviews, which both take without a copy. Neither library is
imported. ucmclient_sparse.h defines everything; docs/sparse.md says what it is worth. On a worker's GPU:
ucmclient.sparse.cuda.
"""

from .sequence import Appended, BlockSequence, SummaryNamespace, select
from .choice import Choice, Mass, Score, Selection, TopK, choose, history_scores
from .summary import Summary, Summaries, Shape, box, hash_ as hash, mean, stats, submean, tokens
from .policy import Budget, Policy
from .prefetch import Prefetch, Prefetched, Prefetcher, PrefetcherStats, Priority
from .schedule import LayerMode, Schedule, Step
from .mapping import Referenced, SharedMapping

#: In a status of Appended: the block's summary is held.
HAS_SUMMARY = 4

__all__ = [
    "HAS_SUMMARY",
    "Appended",
    "Budget",
    "BlockSequence",
    "Choice",
    "Summary",
    "SummaryNamespace",
    "Summaries",
    "LayerMode",
    "Mass",
    "Referenced",
    "Policy",
    "Prefetch",
    "Prefetched",
    "Prefetcher",
    "PrefetcherStats",
    "Priority",
    "Schedule",
    "Score",
    "Selection",
    "Shape",
    "Step",
    "TopK",
    "SharedMapping",
    "box",
    "choose",
    "hash",
    "history_scores",
    "mean",
    "select",
    "stats",
    "submean",
    "tokens",
]
