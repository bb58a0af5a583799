"""The setting `summaries`: which summary of stored blocks is kept (docs/sparse.md). It follows from where K and V of a layer lie in
a block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ...sparse import summary as methods
from .layout import Axes, Fragment, Heads, Layout, axes_of, kind_of

#: Methods with their parameters, without those that only an attention kernel would know.
METHODS: Mapping[str, Callable[..., methods.Summary]] = {
    "mean": methods.mean,
    "submean": methods.submean,
    "box": methods.box,
    "hash": methods.hash_,
    "stats": methods.stats,
    "tokens": methods.tokens,
}
_KINDS = ("float32", "float16", "bfloat16", "float8_e4m3fn")


@dataclass(frozen=True)
class SummarySettings:
    """A method, and parameters of the function of that name in ucmclient.sparse."""

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Any) -> Optional["SummarySettings"]:
        """Parses a method's name, or an object with `method` and its parameters. None: no summaries."""
        if value == "none":
            return None
        given = dict(value) if isinstance(value, dict) else {"method": value}
        method = given.pop("method", None)
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(
                f"kv_connector_extra_config: summaries must be none, {', '.join(METHODS)}, or an object with one of these as "
                f'"method" and its parameters, not {value!r}'
            )
        known = [name for name in inspect.signature(METHODS[method]).parameters if name != "shape"]
        unknown = [name for name in given if name not in known]
        if unknown:
            there = f"; there are {', '.join(known)}" if known else ""
            raise ValueError(f"kv_connector_extra_config: summaries: {method} has no parameter {unknown[0]!r}{there}")
        if method == "submean" and "run" not in given:
            raise ValueError('kv_connector_extra_config: summaries: submean needs "run", how many tokens a mean is of')
        return cls(method, given)


def _refusal(why: str, remedy: str) -> ValueError:
    return ValueError(f'summaries: {why}: {remedy} or remove the setting "summaries"')


def summary_of(
    settings: SummarySettings, tensors: Sequence[Any], layout: Layout, of: Heads, cache_dtype: str
) -> methods.Summary:
    """The summary of each layer of a block. tensors: of the layout's layers, in their order."""
    shape = shape_of(tensors, layout, of, cache_dtype)
    try:
        return METHODS[settings.method](shape, **settings.parameters)
    except (TypeError, ValueError) as error:
        raise _refusal(f"{settings.method}: {error}", "correct the parameters") from None


def shape_of(tensors: Sequence[Any], layout: Layout, of: Heads, cache_dtype: str) -> methods.Shape:
    """Where K and V of each layer lie in a block."""
    shapes = {_shape(tensor, layout.blocks, of, fragments, cache_dtype) for tensor, fragments in zip(tensors, layout.layers)}
    if len(shapes) > 1 or len(tensors) != len(layout.layers):
        raise _refusal("layers keep their KV in different ways", "take another model")
    return shapes.pop()


def _shape(tensor: Any, blocks: int, of: Heads, fragments: Sequence[Fragment], cache_dtype: str) -> methods.Shape:
    axes = axes_of(tensor, blocks, of)
    if axes is None or axes.alike:
        why = f"the connector can't tell {'tokens from heads' if axes else 'K from V'}"
        raise _refusal(
            f"{why} in a KV tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}, with {of.heads} heads of "
            f"{of.dim} and blocks of {of.tokens} tokens",
            "set --block-size to another number," if axes else "use another attention backend,",
        )
    at = _places(axes, tensor, of, fragments)
    if at is None:
        raise _refusal(
            f"a KV tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} holds several layers, or the "
            "tokens of a block at unequal distances",
            "use another attention backend,",
        )
    k, v = at
    more = {} if v is None else {"v_head_dim": of.dim, "v_offset": v[0], "v_token_stride": v[1], "v_head_stride": v[2]}
    return methods.Shape(
        _kind(tensor, cache_dtype), of.tokens, of.heads, of.dim,
        k_offset=k[0], k_token_stride=k[1], k_head_stride=k[2], **more,
    )


def _kind(tensor: Any, cache_dtype: str) -> str:
    kind = kind_of(tensor)
    if kind == "uint8" and cache_dtype in ("fp8", "fp8_e4m3"):
        return "float8_e4m3fn"
    if kind not in _KINDS:
        raise _refusal(f"the KV cache is {kind} ({cache_dtype})", "start with --kv-cache-dtype auto,")
    return kind


#: Offset, token stride, head stride, in bytes of a layer.
_Place = tuple[int, int, int]


def _places(axes: Axes, tensor: Any, of: Heads, fragments: Sequence[Fragment]) -> Optional[tuple[_Place, Optional[_Place]]]:
    """K and V of one layer. None: it is not one layer, or no strides describe it."""
    outer = list(axes.outer)
    if (axes.kernel_stride, axes.kernel) in outer:
        outer.remove((axes.kernel_stride, axes.kernel))
    if [n for _, n in outer] != [2] * (of.values and axes.pair == 1):
        return None
    k = _place(axes, tensor, fragments, 0)
    if not of.values:
        return k and (k, None)
    v = _place(axes, tensor, fragments, axes.dim if axes.pair == 2 else outer[0][0])
    return k and v and (k, v)


def _place(axes: Axes, tensor: Any, fragments: Sequence[Fragment], first: int) -> Optional[_Place]:
    """The place of rows that begin with element `first` of a block. Checks that every row is where the strides say, and
    contiguous."""
    size, tokens = tensor.element_size(), axes.tokens * axes.kernel

    def at(token: int, head: int) -> int:
        element = first + token % axes.tokens * axes.token_stride + token // axes.tokens * axes.kernel_stride
        return _in_layer(fragments, tensor.data_ptr() + (element + head * axes.head_stride) * size, axes.dim * size)

    offset = at(0, 0)
    token_stride = at(1, 0) - offset if tokens > 1 else axes.dim * size
    head_stride = at(0, 1) - offset if axes.heads > 1 else axes.dim * size
    if min(offset, token_stride, head_stride) < 0:
        return None
    right = all(
        at(token, head) == offset + token * token_stride + head * head_stride
        for token in range(tokens)
        for head in range(axes.heads)
    )
    return (offset, token_stride, head_stride) if right else None


def _in_layer(fragments: Sequence[Fragment], address: int, size: int) -> int:
    """Where those bytes of block 0 lie in its layer. Negative: they do not."""
    begin = 0
    for fragment in fragments:
        if fragment.address <= address and address + size <= fragment.address + fragment.size:
            return begin + address - fragment.address
        begin += fragment.size
    return -(1 << 40)
