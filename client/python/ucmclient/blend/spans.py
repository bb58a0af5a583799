"""Which tokens of a request are chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a request."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def split(tokens: Sequence[int], separator: Sequence[int], least: int = 1) -> list[Span]:
    """The runs of at least `least` tokens before, between and after the separators, which belong to no run. separator: its
    tokens, such as those of a line that no document contains. Where separators overlap, the first counts."""
    if not separator:
        raise ValueError("the separator has no tokens; name at least one")
    mark, n = list(separator), len(separator)
    spans, start, at = [], 0, 0
    while at <= len(tokens):
        end = at == len(tokens)
        if end or list(tokens[at : at + n]) == mark:
            if at - start >= max(1, least):
                spans.append(Span(start, at))
            at += n
            start = at
            if end:
                break
        else:
            at += 1
    return spans


def split_fixed(n_tokens: int, length: int, start: int = 0) -> list[Span]:
    """Runs of `length` tokens from `start` on; what is left at the end belongs to none."""
    if length < 1 or start < 0:
        raise ValueError(f"length {length}, start {start}: a chunk has at least one token, and begins at 0 or later")
    return [Span(at, at + length) for at in range(start, n_tokens - length + 1, length)]


def check_spans(spans: Sequence[Span], n_tokens: int) -> None:
    """Refuses chunks that are not in order, overlap, or lie outside the request."""
    before = None
    for i, span in enumerate(spans):
        if not 0 <= span.start < span.end <= n_tokens:
            raise ValueError(
                f"chunk {i} is tokens {span.start} to {span.end} of a request of {n_tokens}; it needs at least one token, and all of them there"
            )
        if before is not None and span.start < before.end:
            raise ValueError(
                f"chunk {i} begins at token {span.start}, chunk {i - 1} ends at {before.end}; chunks come in order and do not overlap"
            )
        before = span
