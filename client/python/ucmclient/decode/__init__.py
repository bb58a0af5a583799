"""Sparse decoding, the worker's side without an engine.

A worker holds few of a long sequence's blocks: those that its tokens attend, layer by layer, in *slots* of equal size,
and the last ones in the engine's own pages (the *window*). All others are in the daemon. Here are the decisions that need
no attention kernel: which memory a request needs (policy.py), what stands for a block (rows.py), which slot holds what
(residency.py), and what to bring from the daemon, with its deadlines (decoder.py). tests/vllm/sparse_engine.py is an
engine on top of it, and describes a step.
"""

from .decoder import Counts, Decoder, Lost, Sequence
from .policy import Policy, Refused, Room
from .residency import Full, Residency
from .rows import Rows

__all__ = ["Counts", "Decoder", "Full", "Lost", "Policy", "Refused", "Residency", "Room", "Rows", "Sequence"]
