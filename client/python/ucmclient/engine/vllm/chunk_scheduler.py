"""The scheduler's half for chunks (docs/blend.md): which requests load or store them, and where a chunk's blocks stand in a prompt.

Promises: only a request whose cache salt begins with SALT loads re-rotated blocks, and nothing of such a request is stored under any key. So vLLM's own
prefix cache has blended KV only under such salts. A chunk is stored only of a request that has another salt or none, and that is the chunk from its
first token on.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ...blend.chunks import chunk_keys
from ...blend.pieces import CHUNKS, FIRST, SALT, STORE, reusable, reused_from
from ...blend.spans import Span, check_spans
from .chunk_rules import chunk_settings
from .plan import Plan
from .scheduler import _MAX_KEYS, SchedulerHalf
from .settings import Settings
from .tracked import Promise, Request

logger = logging.getLogger("ucmclient.engine.vllm")

#: Runs of one load (proto/limits.h).
_MAX_SHIFTS = 512


def _params(request: Any) -> dict[str, Any]:
    found = getattr(request, "kv_transfer_params", None)
    return found if isinstance(found, dict) else {}


def _salted(request: Any) -> bool:
    return (getattr(request, "cache_salt", None) or "").startswith(SALT)


def takes(request: Any) -> bool:
    """Whether it is not served by prefixes. It is then served as chunks, or not at all."""
    return _salted(request) or _params(request).get(STORE) is True


@dataclass
class _ChunkRequest(Request):
    """Its keys are those of chunks."""

    spans: list[Span] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    #: How many first tokens of each chunk are not loaded.
    first: int = 0
    block_tokens: int = 1
    stores: bool = False
    #: Tokens that the engine has by itself.
    computed: int = 0
    #: Keys of the spans that were needed so far.
    _keys_of: dict[int, list[bytes]] = field(default_factory=dict)

    @property
    def hashed(self) -> int:
        """How many of its blocks may be stored."""
        return len(self._span_keys(0)) if self.stores else 0

    def _span_keys(self, number: int) -> list[bytes]:
        if number not in self._keys_of:
            span = self.spans[number]
            self._keys_of[number] = chunk_keys(list(self.vllm.all_token_ids[span.start : span.end]), self.block_tokens)
        return self._keys_of[number]

    def _at(self, block: int) -> Optional[tuple[bytes, int]]:
        """By block of the prompt: key and old position of what may be loaded there."""
        token = block * self.block_tokens
        number = bisect.bisect_right(self.starts, token) - 1
        if number < 0 or token < reused_from(self.spans[number], self.first):
            return None
        old, keys = token - self.spans[number].start, self._span_keys(number)
        return (keys[old // self.block_tokens], old) if old // self.block_tokens < len(keys) else None

    def key(self, block: int) -> bytes:
        found = self._at(block)
        assert found is not None, "a block of no chunk has no key"
        return self._hashed(block, found[0])

    def keys(self, first: int, end: int) -> bytes:
        return b"".join(self.key(block) for block in range(first, end))

    def shifts(self, first: int, most: int, length: int) -> list[tuple[int, ...]]:
        """The shifts of `most` blocks from `first` on: (blocks, old position, new position, and twice the length of dynamic scaling)."""
        out: list[list[int]] = []
        for block in range(first, first + most):
            found = self._at(block)
            if found is None:
                break
            if out and out[-1][1] + out[-1][0] * self.block_tokens == found[1]:
                out[-1][0] += 1
            elif len(out) == _MAX_SHIFTS:
                break
            else:
                out.append([1, found[1], block * self.block_tokens, length, length])
        return [tuple(run) for run in out]


@dataclass
class _RunPromise(Promise):
    """The promise of a run that does not begin at the request's first block."""

    first: int = 0


class ChunkScheduler(SchedulerHalf):
    """For the requests that `takes` accepts."""

    def __init__(self, settings: Settings, block_tokens: int, length: int, workers: int):
        """length: Rerotation's."""
        super().__init__(chunk_settings(settings), block_tokens, workers=workers)
        self._length = length
        #: Sentences that were logged.
        self._told: set[str] = set()

    def _adapter(self, tracked: Request) -> bytes:
        """These keys do not include the engine's hashes, which know an adapter's name."""
        digest = super()._adapter(tracked)
        return hashlib.sha256(digest + str(getattr(tracked.vllm.lora_request, "lora_name", "")).encode()).digest() if digest else digest

    def matched_tokens(self, request: Any, computed: int) -> tuple[Optional[int], bool]:
        tracked = self._tracked(request)
        tracked.computed = computed
        return super().matched_tokens(request, computed)

    def _tracked(self, request: Any) -> _ChunkRequest:
        if request.request_id not in self._requests:
            times = getattr(request, "num_preemptions", 0)
            tracked = _ChunkRequest(request, preemptions=times, block_tokens=self.block_tokens)
            self._name(tracked)
            self._requests[request.request_id] = tracked
            try:
                self._read(tracked)
            except ValueError as error:
                self.tell(str(error), request.request_id)
        tracked = self._requests[request.request_id]
        assert isinstance(tracked, _ChunkRequest)
        self._look_at(tracked)
        return tracked

    def tell(self, sentence: str, name: str) -> None:
        """Logs each kind once. Sentences of one kind differ only in numbers."""
        kind = "".join(c for c in sentence if not c.isdigit())
        if kind not in self._told and len(self._told) < 64:
            self._told.add(kind)
            logger.warning("request %s is computed without chunks: %s", name, sentence)

    def _read(self, tracked: _ChunkRequest) -> None:
        """What the request says of chunks. Raises ValueError if that is wrong. The request is then computed, and not stored."""
        request, params = tracked.vllm, _params(tracked.vllm)
        if getattr(request, "mm_features", None) or getattr(request, "prompt_embeds", None) is not None:
            raise ValueError("it has more than tokens in its prompt, which keys of chunks don't know")
        _check_store(params)
        tokens = request.num_prompt_tokens
        if params.get(STORE) is True:
            if _salted(request):
                raise ValueError(f"{STORE}: what has a salt that begins with {SALT} may be blended; send chunks that are to be stored without it")
            if CHUNKS in params:
                raise ValueError(f"{STORE} and {CHUNKS}: a chunk that is to be stored is computed as a request of its own, without others in it")
            tracked.spans, tracked.starts, tracked.stores = [Span(0, tokens)], [0], True
            return
        spans, first = params.get(CHUNKS, []), params.get(FIRST, 0)
        if not isinstance(spans, (list, tuple)) or not all(_numbers(one, 2) for one in spans):
            raise ValueError(f"{CHUNKS} is a list of [begin, end], two numbers of tokens each")
        if not _numbers([first], 1) or first < 0:
            raise ValueError(f"{FIRST} is a number of tokens, 0 and more")
        found = [Span(*one) for one in spans]
        check_spans(found, tokens)
        tracked.first = -(-first // self.block_tokens) * self.block_tokens
        tracked.spans = reusable(found, tracked.first, self.block_tokens)
        tracked.starts = [span.start for span in tracked.spans]

    def _promise(self, tracked: Any) -> Optional[Promise]:
        """Looks up the run of blocks that begins where the engine's own hit ends. For a chunk that is to be stored, looks up all blocks."""
        first = 0 if tracked.stores else tracked.computed // self.block_tokens
        promise = tracked.promise
        if promise and time.monotonic() < promise.until and promise.first == first:
            return promise
        self._release(tracked)
        run = sum(shift[0] for shift in tracked.shifts(first, _MAX_KEYS, 0))
        if not run or self.link is None or self.link.ns is None:
            return None
        hits = self.shared.prefix(self.link, tracked.vllm.request_id, tracked.keys(first, first + run))
        if hits is None or hits.pending:
            return None
        if tracked.stores:
            tracked.stored = hits.blocks
        if hits.blocks:
            until = time.monotonic() + self.settings.lease / 2
            tracked.promise = _RunPromise(first + hits.blocks, hits.lease, until, hits.blocks - hits.in_dram, first=first)
        return tracked.promise

    def _handed_over(self, tracked: Request) -> int:
        return 0

    def finished(self, request: Any, blocks: list[int]) -> tuple[bool, Optional[dict[str, Any]]]:
        """Hands nothing over, since decode would wait for blocks of a prefix."""
        return super().finished(request, blocks)[0], None

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        before = len(self._plan.loads)
        super().allocated(request, blocks, tokens)
        tracked = self._tracked(request)
        for copy in self._plan.loads[before:]:
            assert tracked.promise is not None
            shifts = tracked.shifts(tracked.promise.start, len(copy.blocks), self._length)
            copy.shifts = shifts if any(old != new for _, old, new, *_ in shifts) else None


class ChunkingScheduler(SchedulerHalf):
    """The scheduler's half of an engine with the setting. Requests with chunks go to a half of their own."""

    def __init__(self, settings: Settings, block_tokens: int, length: int, workers: int = 1):
        super().__init__(settings, block_tokens, workers=workers)
        self.reuse = ChunkScheduler(settings, block_tokens, length, workers)

    def connect(self, identity: Any, name: str) -> None:
        super().connect(identity, name)
        self.reuse.connect(identity.chunks, f"{name}-chunks")

    def close(self) -> None:
        super().close()
        if hasattr(self, "reuse"):
            self.reuse.close()

    def reset(self) -> None:
        super().reset()
        self.reuse.reset()

    def matched_tokens(self, request: Any, computed: int) -> tuple[Optional[int], bool]:
        if takes(request):
            return self.reuse.matched_tokens(request, computed)
        try:
            _check_prefix(_params(request))
        except ValueError as error:
            self.reuse.tell(str(error), request.request_id)
        return super().matched_tokens(request, computed)

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        (self.reuse if takes(request) else super()).allocated(request, blocks, tokens)

    def from_nvme(self, request: Any) -> int:
        return (self.reuse if takes(request) else super()).from_nvme(request)

    def finished(self, request: Any, blocks: list[int]) -> tuple[bool, Optional[dict[str, Any]]]:
        return (self.reuse if takes(request) else super()).finished(request, blocks)

    def step(self, output: Any) -> Plan:
        plan = super().step(output)
        plan.chunks = self.reuse.step(output)
        return plan

    def bind(self, pool: Any) -> None:
        super().bind(pool)
        self.reuse.bind(pool)

    def sent(self, names: Mapping[str, int]) -> None:
        super().sent(names)
        self.reuse.sent(names)

    def received(self, finished: Any, invalid: Any, number: int) -> None:
        """Both halves count the same steps."""
        super().received(finished, invalid, number)
        self.reuse.received(finished, invalid, number)


def _check_store(params: dict[str, Any]) -> None:
    if not isinstance(params.get(STORE) or False, bool):
        raise ValueError(f"{STORE} is true or false")


def _check_prefix(params: dict[str, Any]) -> None:
    """Checks the parameters of a request that is served by prefixes."""
    _check_store(params)
    if CHUNKS in params:
        raise ValueError(f"its cache_salt does not begin with {SALT}, and vLLM would give its blended KV to others")


def _numbers(value: Any, n: int) -> bool:
    return isinstance(value, Sequence) and len(value) == n and all(type(one) is int for one in value)
