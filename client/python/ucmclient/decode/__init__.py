"""Sparse decoding, the worker's side without an engine.

A worker holds few of a long sequence's blocks. Those that its tokens attend, layer by layer, are in *entries* of equal size. The last ones are in
the engine's own pages (the *window*). All others are in the daemon. Here are the decisions that need no attention kernel:
- choices.py: what a token attends
- admission.py: which requests run together
- rows.py: which row of summaries a block has
- supply.py: what comes from the daemon, with timeouts
- decoder.py and gpu.py: decoders whose entries are in the host's memory or on a GPU (cuda.py)

The code that runs attention decides which entry holds what; `Entries` says what it must offer. tests/engines/vllm/sparse_engine.py is an engine on
top of this package, and describes a step.
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
