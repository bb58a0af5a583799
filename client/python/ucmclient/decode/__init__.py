"""Sparse decoding, the worker's side without an engine.

A worker holds few of a long sequence's blocks: those that its tokens attend, layer by layer, in *slots* of equal size,
and the last ones in the engine's own pages (the *window*). All others are in the daemon. Here are the decisions that need
no attention kernel: which memory a request needs (choices.py), which row of digests a block has (rows.py), and what to bring from
the daemon, with its deadlines (decoder.py). Which slot holds what is decided where attention runs: `Slots` says what is
wanted of it. tests/vllm/sparse_engine.py is an engine on top of it, and describes a step.
"""

from .decoder import Counts, Decoder, Lost, Sequence, Slots
from .choices import Choices, Refused, Room
from .rows import Rows

__all__ = ["Choices", "Counts", "Decoder", "Lost", "Refused", "Room", "Rows", "Sequence", "Slots"]
