"""What a step of sparse decoding on a GPU works on: its requests, and which rows of its batch are whose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

from ... import decode

if TYPE_CHECKING:
    from ...sparse.cuda import Chosen


@dataclass(eq=False)
class StepRequest:
    name: str
    #: From this position on its tokens are sparse.
    own: int
    sequence: decode.Sequence
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    #: The step's tokens.
    first: int = 0
    end: int = 0
    #: The number of its candidates that were complete before the step.
    whole: int = 0


@dataclass(eq=False)
class SparseRequest(StepRequest):
    #: How many first blocks have no pages any more.
    given: int = 0
    #: The page whose entry in `_owner` is this request.
    last_page: int = 0


@dataclass
class Dense:
    """The dense tokens of a batch: rows of the batch, and where they lie, for FlashAttention."""

    rows: Any
    at: Any
    starts: Any
    lengths: Any
    tokens: int
    longest: int
    end: int


@dataclass
class Row:
    request: SparseRequest
    #: The first sparse token's query, and its position.
    q: int
    first: int
    end: int


@dataclass
class Rows:
    sparse: list[Row]
    dense: Optional[Dense]
    #: The slices in which sparse tokens are attended: made once a step.
    slices: Optional[list[tuple[Slice, Chosen]]] = None

    @property
    def all_dense(self) -> bool:
        return not self.sparse


@dataclass
class Slice:
    """Sparse tokens that one launch attends. Each is a sequence to it."""

    at: Any
    candidates: Any
    most: Any
    length: Any
    table: Any
    page_table: Any
    requests: Any
    n: int
