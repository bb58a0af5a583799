"""A prompt with chunks for vLLM, which takes a hit as one run of tokens from the first one on (docs/blend.md).

    for piece in pieces(tokens, spans, First(128), block_tokens=128, salt=uuid4().hex):
        answer = complete(prompt=piece.tokens, max_tokens=500 if piece.last else 1, **piece.body)

Each piece is a request. Send it when the one before it has ended. It hits what that one left in the engine's own prefix cache, loads the chunk
after it from the daemon, and computes the rest. This module needs no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .policy import First, Nothing, Policy
from .spans import Span, check_spans

#: The cache salt of each request that may load re-rotated blocks begins with this. Nothing of such a request is stored.
SALT = "ucmd-chunks:"
#: In kv_transfer_params. CHUNKS: a request's chunks, as [begin, end] of the prompt. FIRST: how many first tokens of each are computed again. STORE: the prompt
#: is a chunk by itself, to be stored as one.
CHUNKS, FIRST, STORE = "ucmd_chunks", "ucmd_first", "ucmd_store_chunk"

#: Fields of a request whose prompt is a chunk, so that its blocks are stored as the chunk's.
STORE_BODY: dict[str, Any] = {"kv_transfer_params": {STORE: True}}


@dataclass(frozen=True)
class Piece:
    """The first tokens of a prompt, as a request. chunks: those of which blocks may be loaded. first: how many first tokens of each are computed again. last:
    it is the whole prompt."""

    tokens: Sequence[int]
    chunks: tuple[Span, ...]
    first: int
    salt: str
    last: bool

    @property
    def body(self) -> dict[str, Any]:
        """Fields of a completion of vLLM's OpenAI server, in addition to the prompt."""
        chunks = [[span.start, span.end] for span in self.chunks]
        return {"cache_salt": self.salt, "kv_transfer_params": {CHUNKS: chunks, FIRST: self.first}}


def reused_from(span: Span, first: int) -> int:
    """From which token on blocks of a chunk are loaded. A chunk at the prompt's begin is exact."""
    return span.start + first if span.start else 0


def reusable(spans: Sequence[Span], first: int, block_tokens: int) -> list[Span]:
    """The chunks of which an engine with such blocks loads any. They begin at a block's begin, and are longer than what is computed
    again."""
    return [s for s in spans if s.start % block_tokens == 0 and s.start + len(s) // block_tokens * block_tokens > reused_from(s, first)]


def join(chunks: Sequence[Sequence[int]], filler: int, block_tokens: int) -> tuple[list[int], list[Span]]:
    """A prompt of these chunks, and where they stand. Each begins at a block's begin, after as many tokens `filler` (a line's end, say) as that
    takes."""
    tokens: list[int] = []
    spans = []
    for chunk in chunks:
        tokens += [filler] * (-len(tokens) % block_tokens)
        spans.append(Span(len(tokens), len(tokens) + len(chunk)))
        tokens += chunk
    return tokens, spans


def pieces(tokens: Sequence[int], spans: Sequence[Span], policy: Policy, *, block_tokens: int, salt: str) -> Iterator[Piece]:
    """What to send, in order. policy: First, of whose tokens whole blocks are made, or Nothing. block_tokens: the engine's (--block-size). salt: of this
    prompt or conversation, and of no other, because all prompts that share a salt share its blended KV."""
    if not isinstance(policy, (First, Nothing)):
        raise ValueError(f"{type(policy).__name__}: vLLM computes the same tokens in all layers, so the policy is First or Nothing")
    if not salt:
        raise ValueError("the salt is empty; each prompt, or conversation, needs one of its own")
    if block_tokens < 1:
        raise ValueError(f"a block has at least 1 token, not {block_tokens}")
    check_spans(spans, len(tokens))
    first = -(-getattr(policy, "tokens", 0) // block_tokens) * block_tokens
    return _pieces(tokens, reusable(spans, first, block_tokens), first, block_tokens, SALT + salt)


def _pieces(tokens: Sequence[int], spans: Sequence[Span], first: int, block_tokens: int, salt: str) -> Iterator[Piece]:
    there = 0  # tokens that are computed or loaded, with the pieces so far
    for i, span in enumerate(spans):
        start = reused_from(span, first)
        if start > there:
            yield Piece(tokens[:start], tuple(spans[:i]), first, salt, last=False)
        there = span.start + len(span) // block_tokens * block_tokens
    yield Piece(tokens, tuple(spans), first, salt, last=True)
