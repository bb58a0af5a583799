"""Chunks of tokens whose KV serves after any beginning.

    chunks = blend.Chunks(client, identity)
    spans = blend.split(tokens, separator)
    found = chunks.lookup(tokens, spans, lease=10)
    plan = blend.plan(found, blend.First(16))

plan says which blocks to load where, and which tokens to compute. docs/blend.md says how to use it.
"""

from .chunks import ChunkPages, Chunks, Found, chunk_identity, chunk_keys, store_prefix
from .pieces import STORE_BODY, Piece, join, pieces
from .plan import BlendedError, Load, Plan, Segment, plan, selecting
from .policy import Asked, First, Hkvd, Nothing, Policy
from .spans import Span, check_spans, split, split_fixed

__all__ = [
    "Asked",
    "BlendedError",
    "ChunkPages",
    "Chunks",
    "First",
    "Found",
    "Hkvd",
    "Load",
    "Nothing",
    "Piece",
    "Plan",
    "Policy",
    "STORE_BODY",
    "Segment",
    "Span",
    "check_spans",
    "chunk_identity",
    "chunk_keys",
    "join",
    "pieces",
    "plan",
    "selecting",
    "split",
    "split_fixed",
    "store_prefix",
]
