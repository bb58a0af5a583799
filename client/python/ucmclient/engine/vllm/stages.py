"""Pipeline parallelism: each stage keeps its own layers, so the ranks of all stages are the parts of a block (docs/vllm.md, "Ranks").

A namespace has layers of one size. If the stages' layers differ in size, they are cut to the largest size of which all are multiples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Optional

from .identity import Ranks, Unsupported
from .layout import Fragment, Layout, KvTensors
from .settings import Settings

#: Layers of a part, and parts of a block (proto/limits.h).
_MAX_LAYERS, _MAX_PARTS = 1024, 256


@dataclass(frozen=True)
class Stage:
    """What a rank tells those of its tensor-parallel rank in the other stages."""

    layout: str = ""
    parts: int = 1
    layers: int = 1
    layer_bytes: int = 1
    kv_tensors: Optional[KvTensors] = None
    #: JSON of whatever else arranges the bytes.
    engine: str = "{}"
    #: Why this rank can't be served; the rest means nothing then.
    error: str = ""


@dataclass(frozen=True)
class Staged:
    """A rank of a pipeline: its layout in a form that all stages can have, its part, and each part's number of stored layers."""

    layout: Layout
    ranks: Ranks
    layers: tuple[int, ...]
    engine: dict[str, Any]


def stages_of(config: Any) -> int:
    return getattr(config.parallel_config, "pipeline_parallel_size", 1)


def check_stages(config: Any, groups: Optional[Sequence[Any]], settings: Settings) -> None:
    if stages_of(config) == 1:
        return
    if groups is not None:
        raise Unsupported(
            "pipeline parallelism is not supported for models with several kinds of KV cache: use --pipeline-parallel-size 1, or for "
            "models with sliding windows --disable-hybrid-kv-cache-manager"
        )
    for name, used in (("sparse", settings.sparse is not None), ("head_groups", settings.head_groups > 0)):
        if used:
            raise Unsupported(f'{name}: not supported with pipeline parallelism: use --pipeline-parallel-size 1, or remove the setting "{name}"')


def staged(
    layout: Callable[[], Layout], ranks: Ranks, engine: dict[str, Any], number: int, gather: Callable[[Stage], Sequence[Stage]]
) -> Staged:
    """number: of this rank's stage. gather: sends to the other stages, and returns what all sent, in their order. Every rank calls it once, even
    if it has no layout, so that no other waits for it."""
    try:
        mine = layout()
        stage = Stage(mine.name, ranks.parts, len(mine.layers), mine.layer_bytes, mine.kv_tensors, json.dumps(engine, sort_keys=True))
    except Exception as error:
        gather(Stage(error=str(error) or repr(error)))
        raise
    stages = gather(stage)
    for i, stage in enumerate(stages):
        if stage.error:
            raise Unsupported(f"stage {i} of the pipeline: {stage.error}")
    return _joined(mine, ranks, number, stages)


def _joined(mine: Layout, ranks: Ranks, number: int, stages: Sequence[Stage]) -> Staged:
    size = gcd(*(stage.layer_bytes for stage in stages))
    layers = [stage.layers * (stage.layer_bytes // size) for stage in stages]
    if len({stage.kv_tensors for stage in stages}) > 1 or (mine.kv_tensors is not None and size != mine.layer_bytes):
        raise Unsupported('encoding: the stages of the pipeline keep their layers in different ways: remove the setting "encoding"')
    if max(layers) > _MAX_LAYERS:
        raise Unsupported(
            f"the stages of the pipeline keep {', '.join(str(stage.layers * stage.layer_bytes) for stage in stages)} bytes of a block, "
            f"which makes {max(layers)} pieces of one size, of at most {_MAX_LAYERS}: give the stages as many layers each "
            "(VLLM_PP_LAYER_PARTITION), or use --pipeline-parallel-size 1"
        )
    parts = [stage.parts for stage in stages]
    if sum(parts) > _MAX_PARTS:
        raise Unsupported(f"the engine's ranks keep {sum(parts)} parts of each block, of at most {_MAX_PARTS}: use fewer ranks")
    text = json.dumps([[stage.layout, stage.parts, stage.layers, stage.layer_bytes] for stage in stages])
    name = f"vllm/2 stages:{hashlib.sha256(text.encode()).hexdigest()[:16]}:{stages[0].layout}"[:256]
    return Staged(
        replace(cut(mine, size), name=name),
        Ranks(sum(parts[:number]) + ranks.part, sum(parts), ranks.writes),
        tuple(n for n, of in zip(layers, parts) for _ in range(of)),
        _engines([json.loads(stage.engine) for stage in stages]),
    )


def _engines(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `engine` values of all stages: one value if they agree, else all of them."""
    out: dict[str, Any] = {}
    for name in sorted({name for stage in stages for name in stage}):
        said = [stage.get(name) for stage in stages]
        out[name] = said[0] if all(one == said[0] for one in said) else said
    return out


def cut(layout: Layout, size: int) -> Layout:
    """The same bytes in layers of this size, of which the layout's are multiples."""
    times = layout.layer_bytes // size
    if times == 1:
        return layout
    layers = tuple(piece for layer in layout.layers for piece in _pieces(layer, size))
    numbers = {name: (number + 1) * times - 1 for name, number in layout.numbers.items()}
    return replace(layout, layers=layers, layer_bytes=size, numbers=numbers)


def _pieces(fragments: Sequence[Fragment], size: int) -> list[tuple[Fragment, ...]]:
    out: list[tuple[Fragment, ...]] = []
    piece: list[Fragment] = []
    left = size
    for fragment in fragments:
        at = 0
        while at < fragment.size:
            n = min(left, fragment.size - at)
            piece.append(Fragment(fragment.address + at, fragment.stride, n))
            at, left = at + n, left - n
            if not left:
                out.append(tuple(piece))
                piece, left = [], size
    return out
