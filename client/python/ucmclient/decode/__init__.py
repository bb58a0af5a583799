"""Sparse decoding, the worker's side without an engine.

A worker holds few of a long sequence's blocks: those that its tokens attend, layer by layer, in *entries* of equal size,
and the last ones in the engine's own pages (the *window*). All others are in the daemon. Here are the decisions that need
no attention kernel: what a token takes (choices.py), which requests run together (admission.py), which row of summaries a block
has (rows.py), what comes from the daemon, with timeouts (supply.py), and a decoder whose entries are in the host's memory
(decoder.py) or on a GPU (cuda.py). Which entry holds what is decided where attention runs: `Entries` says what is
wanted of it. tests/engines/vllm/sparse_engine.py is an engine on top of it, and describes a step.
"""

from .admission import Admission, Need
from .choices import Choices, Refused, Room, Rounds
from .decoder import Chosen, Decoder, Entries
from .heads import HeadBytes
from .rows import Rows
from .supply import Counts, Lost, Sequence, Supply

__all__ = [
    "Admission", "Choices", "Chosen", "Counts", "Decoder", "HeadBytes", "Lost", "Need", "Refused", "Room", "Rounds", "Rows", "Sequence", "Entries",
    "Supply",
]
