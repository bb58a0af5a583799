"""How a worker attends sparsely, as one description that a text names: "auto", "psa-estimated:eps=0.98"."""

from __future__ import annotations

from ctypes import byref, c_char_p, c_uint8, create_string_buffer
from typing import Any, Optional

from .._native import lib
from ..errors import Status, UcmError, check
from . import _native as native
from .choice import _HEADS, _METRICS, _REDUCES, Choice, Mass, Score, TopK
from .summary import Summary, Shape
from .schedule import Schedule

_CHOICES = ("topk", "mass", "psa", "estimated", "certified")


def _table(ask: Any) -> dict[str, str]:
    """{name: what it is} of all presets, or of all keys."""
    out: dict[str, str] = {}
    name, about = c_char_p(), c_char_p()
    while True:
        try:
            check(ask(len(out), byref(name), byref(about)))
        except UcmError as error:
            if error.status != Status.NOT_FOUND:
                raise
            return out
        assert name.value is not None and about.value is not None
        out[name.value.decode()] = about.value.decode()


class Policy:
    """A preset's name and what is to differ from it: "preset[:key=value,...]". Every key is an attribute too; UcmError
    INVALID says what would be right. presets() and keys() list what there is; docs/sparse.md says what it is worth."""

    def __init__(self, text: str = "auto"):
        self.native = native.Policy()
        check(lib.ucm_policy_parse(text.encode(), byref(self.native)))

    @staticmethod
    def presets() -> dict[str, str]:
        return _table(lib.ucm_policy_preset)

    @staticmethod
    def keys() -> dict[str, str]:
        return _table(lib.ucm_policy_key)

    def __str__(self) -> str:
        text = create_string_buffer(native.POLICY_TEXT)
        check(lib.ucm_policy_text(byref(self.native), text, len(text)))
        return text.value.decode()

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"

    def __getattr__(self, name: str) -> Any:
        if name == "native" or not hasattr(native.Policy, name):
            raise AttributeError(name)
        return getattr(self.native, name)

    @property
    def choice(self) -> str:
        """topk, mass, psa, estimated or certified."""
        return _CHOICES[self.native.choice]

    @property
    def score(self) -> Score:
        p = self.native
        return Score(_REDUCES[p.reduce], _HEADS[p.heads], _METRICS[p.metric], p.beta)

    def summary(self, shape: Shape) -> Summary:
        keep = (c_uint8 * 64)()
        d, s = native.Summary(), shape.native()
        check(lib.ucm_policy_summary(byref(self.native), byref(s), keep, byref(d)))
        methods = ("", "mean", "submean", "box", "hash", "stats", "tokens")
        pairs = [i for i in range(8 * d.keep_bytes) if keep[i // 8] >> i % 8 & 1] if d.keep_bytes else None
        names = ("kind", "run", "pairs", "bits", "rope_bits", "seed", "chosen", "rest")
        return Summary(methods[d.method], shape, pairs, **{name: getattr(d, name) for name in names})

    def schedule(self, layers: int, model: Optional[str] = None) -> Schedule:
        """model: its name, for what is known of it; UcmError UNSUPPORTED and NOT_FOUND as Schedule.for_model."""
        filled = native.Schedule()
        name = None if model is None else model.encode()
        check(lib.ucm_policy_schedule(byref(self.native), name, layers, byref(filled)))
        return Schedule._made(filled)

    def budget(self, block_tokens: int, blocks: int) -> Budget:
        """For a policy with a goal: the budget of one layer of one request that begins with so many complete blocks."""
        return Budget(self, block_tokens, blocks)

    def choose(self, block_tokens: int, blocks: int, budget: Optional[Budget] = None) -> Choice:
        """What a selection among so many complete blocks takes. For psa, estimated and certified it orders all of them."""
        c = native.Choose()
        state = None if budget is None else byref(budget.native)
        check(lib.ucm_policy_choose(byref(self.native), block_tokens, blocks, state, byref(c)))
        windows = {"sink_blocks": c.sink_blocks, "recent_blocks": c.recent_blocks, "limit": c.limit}
        if c.policy == 1:
            return Mass(eps=c.eps, beta_m=c.beta_m, **windows)
        return TopK(sparse_ratio=c.sparse_ratio, min_blocks=c.min_blocks, topk_tokens=c.topk_tokens, **windows)


class Budget:
    """How many blocks a layer of a request attends in its next step."""

    def __init__(self, policy: Policy, block_tokens: int, blocks: int):
        self.policy, self.native = policy, native.PolicyBudget()
        check(lib.ucm_policy_budget_begin(byref(policy.native), block_tokens, blocks, byref(self.native)))

    @property
    def blocks(self) -> int:
        return self.native.blocks

    def next(self, blocks: int, share: float) -> int:
        """After a step that covered `share` of the layer's least covered KV head, of a request with so many blocks."""
        check(lib.ucm_policy_budget_next(byref(self.policy.native), blocks, share, byref(self.native)))
        return self.native.blocks
