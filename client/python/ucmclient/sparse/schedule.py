"""When a sequence is attended sparsely: by layer, by step and by length."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from ctypes import byref, c_uint8, c_uint32
from dataclasses import dataclass

from .._native import lib
from ..errors import check
from . import _native as native


class LayerMode(enum.IntEnum):
    """enum ucm_sparse_layer: REUSE attends what the last selecting layer before it chose."""

    DENSE = 0
    SELECT = 1
    REUSE = 2


@dataclass(frozen=True)
class Step:
    """What a layer does in a step. choose: it makes a choice, with the queries of the last `rows` steps. layer,
    chosen_at: whose choice is attended, and the step whose queries made it."""

    mode: LayerMode
    choose: bool
    rows: int
    layer: int
    chosen_at: int


class Schedule:
    """modes: a LayerMode for each layer. dense_below: tokens below which every layer is dense. A layer chooses every
    retrieval_stride steps, and the choice serves from `lag` steps later on. rows, beta: as Score's."""

    def __init__(
        self,
        modes: Sequence[int],
        dense_below: int = 4096,
        retrieval_stride: int = 5,
        lag: int = 0,
        rows: int = 1,
        beta: float = 0.0,
    ):
        if not 1 <= len(modes) <= native.LAYERS_MAX:
            raise ValueError(f"a schedule has 1 to {native.LAYERS_MAX} layers, not {len(modes)}")
        self.native = native.Schedule(
            len(modes), (c_uint8 * native.LAYERS_MAX)(*modes), dense_below, retrieval_stride, lag, rows, beta
        )
        self._check()

    def _check(self) -> None:
        choices = c_uint32()
        check(lib.ucm_sparse_schedule_choices(byref(self.native), byref(choices)))
        #: How many choices of a layer are made and not replaced yet, at most.
        self.choices: int = choices.value

    @classmethod
    def _made(cls, filled: native.Schedule) -> Schedule:
        self = cls.__new__(cls)
        self.native = filled
        self._check()
        return self

    @classmethod
    def defaults(cls, layers: int) -> Schedule:
        """The first two layers are dense. All others select every 5 steps, from 4,096 tokens on."""
        filled = native.Schedule()
        check(lib.ucm_sparse_schedule_defaults(layers, byref(filled)))
        return cls._made(filled)

    @classmethod
    def for_model(cls, model: str, layers: int) -> Schedule:
        """The same, changed by what is known of a model, by its name. UcmError UNSUPPORTED: it attends in a way that a
        choice of blocks would change. NOT_FOUND: nothing is known of it."""
        filled = native.Schedule()
        check(lib.ucm_sparse_schedule_for_model(model.encode(), layers, byref(filled)))
        return cls._made(filled)

    @property
    def modes(self) -> list[LayerMode]:
        return [LayerMode(mode) for mode in self.native.mode[: self.native.layers]]

    def __getattr__(self, name: str):
        if name in ("layers", "dense_below", "retrieval_stride", "lag", "rows", "beta"):
            return getattr(self.native, name)
        raise AttributeError(name)

    def step(self, layer: int, step: int, tokens: int) -> Step:
        """step: from 0 on, counted from the first at which the sequence had dense_below tokens."""
        out = native.Step()
        check(lib.ucm_sparse_schedule_step(byref(self.native), layer, step, tokens, byref(out)))
        return Step(LayerMode(out.mode), bool(out.choose), out.rows, out.layer, out.chosen_at)
