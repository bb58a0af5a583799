"""The scheduler's half for models with several kinds of KV cache (docs/vllm.md, "Hybrid models").

A hit ends where all groups have what a request needs there. Loads are always asynchronous, so their outcome is known before anything is
computed with them. So this needs nothing of scheduler.py's care for loads within a step.

Promises are those of scheduler.py and one more. This holds blocks of windows and states in the engine's pool until all workers have
reported their store. Otherwise the engine would give a block that no window reaches any more to others while its request runs.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ...client import Found
from .groups import FULL, STATE, Group, HybridIdentity, Member, interval_of, marked, state_interval_of, unit_of
from .held_pages import NULL_BLOCK, Hold
from .link import Link
from .plan import Copy, HeldCopy, HybridPlan, Plan
from .scheduler import _MAX_KEYS, HANDOVER, PREFILL, SchedulerHalf
from .settings import Settings
from .tracked import Promise, Request

#: Keys of full attention in one lookup; the others are for windows.
_MAX_FULL = _MAX_KEYS // 2


@dataclass
class _HybridRequest(Request):
    #: The engine's block ids, for each group.
    tables: list[list[int]] = field(default_factory=list)
    #: For each group: up to this block it is decided which blocks are stored.
    decided: list[int] = field(default_factory=list)
    #: Leases on what its promise needs.
    leases: list[tuple[Link, int]] = field(default_factory=list)
    #: Full attention is cached up to this token, but windows or states are not. Another request may come that far.
    junction: int = 0
    #: Tokens at the last state that is stored or was loaded. Next, tokens at a state whose key the engine does not know yet; 0: there
    #: is none.
    stated: int = 0
    due: int = 0

    def preempted(self) -> bool:
        lost = super().preempted()
        if lost:
            self.tables, self.decided, self.stated, self.due = [], [], 0, 0
        return lost


class HybridScheduler(SchedulerHalf):
    def __init__(self, settings: Settings, groups: Sequence[Group], hash_tokens: int, workers: int):
        self._groups, self._unit = list(groups), unit_of(groups)
        super().__init__(settings, self._unit, workers=workers)
        self.hash_tokens = hash_tokens
        self._interval = interval_of(groups, settings)
        self._smallest = min(group.block_tokens for group in groups)
        self._full = [group for group in groups if group.kind == FULL]
        self._others = [group for group in groups if group.kind != FULL]
        self._states = [group for group in groups if group.kind == STATE]
        self._state_interval = state_interval_of(groups, settings)
        self._links: list[Link] = []
        self._members: Sequence[Member] = ()
        self._identity: Optional[HybridIdentity] = None
        self._plan: HybridPlan = HybridPlan()
        self._holds: dict[int, Hold] = {}
        #: Blocks that this step's stores read and that the engine may take.
        self._held_now: list[Any] = []
        #: What this step's requests have of blocks.
        self._now: Any = None

    def connect(self, identity: Any, name: str) -> None:
        if self._identity == identity:
            return
        for tracked in self._requests.values():
            self._release(tracked)
        self.close()
        self._identity, self._members = identity, identity.members
        self._links = [Link(self.settings, one, f"{name}-{i}" if i else name) for i, one in enumerate(identity.kinds)]
        self.link = self._links[self._kind(self._full[0]) if self._full else 0]
        if self._full and self.link.ns is not None:
            self.lookup_table.open(self.link.ns)

    def close(self) -> None:
        self.lookup_table.close()
        for link in self._links:
            link.close()

    def reset(self) -> None:
        for tracked in self._requests.values():
            tracked.blocks = [block for table in tracked.tables for block in table]
        super().reset()

    def _kind(self, group: Group) -> int:
        return self._members[group.number].kind

    # ---- keys ----

    def _keys(self, tracked: Request, group: Group, first: int, end: int) -> bytes:
        """The keys of a group's blocks from first to end. The hash of a block's last tokens also covers all tokens before."""
        per, hashes = group.block_tokens // self.hash_tokens, tracked.vllm.block_hashes
        some = hashes[first:end] if per == 1 else [hashes[(i + 1) * per - 1] for i in range(first, end)]
        if not some:
            return b""
        if not tracked.raw:
            some = [tracked._hashed((first + i + 1) * per - 1, key) for i, key in enumerate(some)]
        return marked(b"".join(some), self._members[group.number].mark, len(some[0]))

    def _hashed_tokens(self, request: Any) -> int:
        return len(request.block_hashes) * self.hash_tokens

    def _tracked(self, request: Any) -> _HybridRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            times = getattr(request, "num_preemptions", 0)
            tracked = _HybridRequest(request, preemptions=times)
            self._name(tracked)
            self._requests[request.request_id] = tracked
        tracked.preempted()
        return tracked

    # ---- lookups ----

    def _promise(self, tracked: _HybridRequest) -> Optional[Promise]:
        if tracked.promise is not None and time.monotonic() < tracked.promise.until:
            return tracked.promise
        self._release(tracked)
        tracked.decided, tracked.junction = [0] * len(self._groups), 0
        # A state can't be set back by one token, which the engine would compute again.
        limit = min(self._hashed_tokens(tracked.vllm), tracked.vllm.num_tokens - bool(self._states)) // self._unit * self._unit
        if limit <= 0 or any(link.ns is None for link in self._links):
            return None
        reached, slow = self._lookup_full(tracked, limit)
        boundary = self._lookup_others(tracked, reached) if reached else 0
        tracked.junction = reached if boundary < reached else 0
        if self._states and tracked.junction > getattr(tracked.vllm, "shared_prefix_boundary", tracked.junction):
            tracked.vllm.shared_prefix_boundary = tracked.junction  # vLLM ends a step there, so that there is a state
        if not boundary:
            self._release(tracked)
            return None
        for group in self._others:
            tracked.decided[group.number] = boundary // group.block_tokens
        tracked.stated = boundary
        until = time.monotonic() + self.settings.lease / 2
        tracked.promise = Promise(boundary // self._unit, 0, until, -(-slow // self._unit))
        return tracked.promise

    def _lookup_full(self, tracked: _HybridRequest, limit: int) -> tuple[int, int]:
        """Up to which token full attention is cached, and how many of these tokens are not in DRAM."""
        reached, slow = limit, 0
        for kind, link in enumerate(self._links):
            groups = [group for group in self._full if self._kind(group) == kind]
            if not groups:
                continue
            order = self._in_order(groups, limit)[:_MAX_FULL]
            hits = self._ask(tracked, link, self._keys_of(tracked, order))
            if hits is None:
                return 0, 0
            if hits.lease:
                tracked.leases.append((link, hits.lease))
            done = {group.number: 0 for group in groups}
            for _, number, block in order[: hits.blocks]:
                done[number] = block + 1
            for group in groups:
                tracked.decided[group.number] = done[group.number]
                reached = min(reached, done[group.number] * group.block_tokens)
            slow = max(slow, (hits.blocks - hits.in_dram) * groups[0].block_tokens // len(groups))
        return reached // self._unit * self._unit, slow

    @staticmethod
    def _in_order(groups: Sequence[Group], limit: int) -> list[tuple[int, int, int]]:
        """Last token, group and number of each block, in such an order that a prefix of them is a prefix of the request."""
        size = {group.number: group.block_tokens for group in groups}
        lists = [[((i + 1) * n, number, i) for i in range(limit // n)] for number, n in size.items()]
        return lists[0] if len(lists) == 1 else list(heapq.merge(*lists))

    def _keys_of(self, tracked: _HybridRequest, order: Sequence[tuple[int, int, int]]) -> bytes:
        numbers = {number for _, number, _ in order}
        ends = {number: max((block for _, n, block in order if n == number), default=-1) + 1 for number in numbers}
        keys = {number: self._keys(tracked, self._groups[number], 0, end) for number, end in ends.items()}
        if len(keys) == 1:
            return keys.popitem()[1]
        size = len(next(iter(keys.values()))) // max(ends[next(iter(keys))], 1)
        return b"".join(keys[number][block * size : (block + 1) * size] for _, number, block in order)

    def _lookup_others(self, tracked: _HybridRequest, reached: int) -> int:
        """The last token, up to `reached`, at which windows and states are cached; they are leased then."""
        if not self._others or self._all_there(tracked, reached):
            return reached
        if self.shared.pending(tracked.vllm.request_id):
            return 0
        runs: dict[int, list[int]] = {}
        for kind, link in enumerate(self._links):
            groups = [group for group in self._others if self._kind(group) == kind]
            if groups:
                runs.update(self._runs(tracked, link, groups, reached) or dict.fromkeys((g.number for g in groups), []))
        for end in range(reached - self._unit, 0, -self._unit):
            if all(_run(runs[g.number], end // g.block_tokens) >= end // g.block_tokens - g.first(end) for g in self._others):
                return end if self._all_there(tracked, end) else 0
        return 0

    def _all_there(self, tracked: _HybridRequest, end: int) -> bool:
        """Leases the windows and states that are needed at a token. It may lease some kinds although others are missing."""
        for kind, link in enumerate(self._links):
            ranges = [(g, g.first(end), end // g.block_tokens) for g in self._others if self._kind(g) == kind]
            found = self._ask_each(tracked, link, ranges, self.settings.lease)
            if found is None or Found.NOT in found:
                return False
        return True

    def _ask_each(
        self, tracked: _HybridRequest, link: Link, ranges: Sequence[tuple[Group, int, int]], lease: float
    ) -> Optional[bytes]:
        keys = b"".join(self._keys(tracked, *one) for one in ranges)
        if not keys:
            return b""
        answer = self.shared.each(link, tracked.vllm.request_id, keys, lease)
        if answer is not None and answer[1]:
            tracked.leases.append((link, answer[1]))
        return None if answer is None else answer[0]

    def _runs(
        self, tracked: _HybridRequest, link: Link, groups: Sequence[Group], reached: int
    ) -> Optional[dict[int, list[int]]]:
        """For each group: how many blocks before the i-th are cached without a gap."""
        most = _MAX_KEYS // len(groups)
        ranges = [(g, max(0, reached // g.block_tokens - most), reached // g.block_tokens) for g in groups]
        found = self._ask_each(tracked, link, ranges, 0.0)
        if found is None:
            return None
        runs, at = {}, 0
        for group, first, end in ranges:
            run = [0] * (first + 1)
            for one in found[at : at + end - first]:
                run.append(run[-1] + 1 if one != Found.NOT else 0)
            runs[group.number], at = run, at + end - first
        return runs

    def _release(self, tracked: _HybridRequest) -> None:
        tracked.promise, leases, tracked.leases = None, tracked.leases, []
        for link, lease in leases:
            link.release(lease)

    def _bring_in(self, tracked: _HybridRequest, promise: Promise, slow: int) -> None:
        end = promise.blocks * self._unit
        groups = [g for g in self._groups if self._links[self._kind(g)] is self.link]
        keys = b"".join(self._keys(tracked, g, g.first(end), end // g.block_tokens) for g in groups)
        self._nvme.bring_in(self.link, keys, slow, tracked.vllm.request_id)

    # ---- steps ----

    def _fresh_plan(self) -> HybridPlan:
        return HybridPlan(kinds=[Plan() for _ in self._links])

    def _running(self) -> bool:
        for tracked in self._requests.values():
            tracked.preempted()
        return any(tracked.tables for tracked in self._requests.values())

    def let_go(self) -> None:
        super().let_go()
        while self._holds:
            self._free(self._holds.popitem()[1])

    def _forget_stores(self, plan: Plan) -> None:
        for one in getattr(plan, "kinds", ()):
            super()._forget_stores(one)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        tracked = self._tracked(request)
        tracked.tables = [list(table) for table in tables]
        promise = tracked.promise
        if tokens == 0 or promise is None:
            if not tracked.loading:
                self._release(tracked)
            return
        begin, end = promise.start * self._unit, promise.blocks * self._unit
        tracked.loading, tracked.began = True, time.monotonic()
        tracked.slow = min(promise.on_nvme, promise.blocks - promise.start) * self._unit
        if not end - 1 <= begin + tokens <= end:  # windows and states are only known to be there at the end
            self._plan.hopeless.add(request.request_id)
            return
        for group in self._groups:
            size = group.block_tokens
            self._load(tracked, group, range(max(begin // size, group.first(end)), end // size))
            tracked.decided[group.number] = max(tracked.decided[group.number], end // size)

    def _load(self, tracked: _HybridRequest, group: Group, blocks: Sequence[int]) -> None:
        for keys, pages in self._with_pages(tracked, group, blocks):
            self._kind_plan(group).loads.append(Copy(tracked.vllm.request_id, keys, pages, adapter=tracked.adapter))

    def _store_blocks(self, tracked: _HybridRequest, group: Group, blocks: Sequence[int], ends: bool) -> None:
        """ends: the request has ended, so the engine keeps its pages until the workers have reported the store."""
        for keys, pages in self._with_pages(tracked, group, blocks):
            self._store_pages(tracked, group, keys, pages, group.kind != FULL and not ends)

    def _store_pages(self, tracked: _HybridRequest, group: Group, keys: bytes, pages: list[int], hold: bool) -> None:
        if hold:
            self._held_now += [self.pool.blocks[page] for page in pages]
        copy = HeldCopy(tracked.vllm.request_id, keys, pages, adapter=tracked.adapter, hold=self._number if hold else 0)
        self._kind_plan(group).stores.append(copy)
        tracked.reported_later = True

    def _kind_plan(self, group: Group) -> Plan:
        self._plan.kinds = self._plan.kinds or self._fresh_plan().kinds
        return self._plan.kinds[self._kind(group)]

    def _with_pages(self, tracked: _HybridRequest, group: Group, blocks: Sequence[int]) -> Iterator[tuple[bytes, list[int]]]:
        """Keys and pages of these blocks, without those that have no pages; as many at a time as the daemon takes."""
        table = tracked.tables[group.number]
        there = [i for i in blocks if table[i] != NULL_BLOCK]
        for at in range(0, len(there), _MAX_KEYS):
            some = there[at : at + _MAX_KEYS]
            yield _picked(self._keys(tracked, group, some[0], some[-1] + 1), some), [table[i] for i in some]

    def step(self, output: Any) -> HybridPlan:
        self._number += 1
        self.look_at_weights()
        self._now = getattr(output, "kv_connector_block_state", None)
        lost = set(getattr(output, "preempted_req_ids", None) or ())
        for request_id in lost & self._requests.keys():
            self._requests[request_id].preempted()
        self._end()
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                self._scheduled(tracked, new.block_ids, new.num_computed_tokens, output, anew=True)
        self._go_on(output.scheduled_cached_reqs, output)
        self._offered_states()
        plan, self._plan = self._plan, self._fresh_plan()
        plan.kinds = plan.kinds or self._fresh_plan().kinds
        plan.preempted, plan.connected, plan.computes = lost, self.link is not None, bool(output.num_scheduled_tokens)
        plan.ours = self.pool is not None
        for one in plan.kinds:
            one.preempted, one.computes, one.fence = lost, plan.computes, plan.fence
            one.void = plan.void
        if self._held_now:
            self.pool.touch(self._held_now)
            plan.hold = self._number
            self._holds[plan.hold], self._held_now = Hold(self._held_now, self._workers), []
        return plan

    def _go_on(self, cached: Any, output: Any) -> None:
        ids, added, computed, scheduled = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, output.num_scheduled_tokens
        behind, self._behind = self._behind, {}
        size = self._smallest
        fills = size - max(scheduled.values(), default=0)
        for i, name in enumerate(ids):
            if added[i] or computed[i] % size >= fills or name in behind:
                tracked = self._requests.get(name)
                if tracked is not None:
                    self._scheduled(tracked, added[i], computed[i], output, anew=name in cached.resumed_req_ids)

    def _scheduled(self, tracked: _HybridRequest, added: Any, computed: int, output: Any, anew: bool) -> None:
        if anew:
            tracked.tables = [list(table) for table in added]
        else:
            for table, more in zip(tracked.tables, added or ()):
                table.extend(more)
        after = computed + output.num_scheduled_tokens[tracked.vllm.request_id]
        self._fill(tracked, after, [group.kept_from(computed) for group in self._groups])
        if self._states:
            self._state_after(tracked, after)

    def _fill(self, tracked: _HybridRequest, after: int, kept_from: Sequence[int], ends: bool = False) -> None:
        """Stores what is complete after a step. kept_from: for each group, the first block that the engine has certainly kept."""
        hashed = self._hashed_tokens(tracked.vllm)
        if after // self.hash_tokens * self.hash_tokens > hashed:
            self._behind[tracked.vllm.request_id] = after
        if not self.settings.store or tracked.tainted or not tracked.tables or any(link.ns is None for link in self._links):
            return
        tracked.decided = tracked.decided or [0] * len(self._groups)
        for group in self._groups:
            if group.kind == STATE or (group.kind != FULL and self.pool is None):
                continue
            number, first = group.number, tracked.decided[group.number]
            end = min(min(after, hashed) // group.block_tokens, len(tracked.tables[number]))
            if end <= first:
                continue
            tracked.decided[number] = end
            wanted = range(max(first, kept_from[number]), end)
            if group.kind != FULL:
                wanted = [i for i in wanted if self._wanted(tracked, group, i)]
            self._store_blocks(tracked, group, wanted, ends)

    def _wanted(self, tracked: _HybridRequest, group: Group, block: int) -> bool:
        """Whether a window needs this block at a place where a hit may end. Such places are the prompt's end and all after it,
        junctions, and multiples of the interval."""
        end = (block + 1) * group.block_tokens
        if block >= group.first(self._prompt_end(tracked)):
            return True
        junction = tracked.junction
        if end <= junction and block >= group.first(junction):
            return True
        return block >= group.first(-(-end // self._interval) * self._interval)

    def _prompt_end(self, tracked: _HybridRequest) -> int:
        """Where a hit of the whole prompt would end."""
        prompt = getattr(tracked.vllm, "num_prompt_tokens", tracked.vllm.num_tokens) - bool(self._states)
        return prompt // self._unit * self._unit

    def _state_after(self, tracked: _HybridRequest, after: int) -> None:
        """Stores the state that a step leaves at the end of a block, or left there before its key was known. The engine continues in
        another block, and keeps this one until it has seen the next step's outcome."""
        if after % self._unit == 0:
            tracked.due = after
        end = tracked.due
        if not end or end > self._hashed_tokens(tracked.vllm):
            return
        tracked.due = 0
        tables = self._now.get_block_ids(tracked.vllm.request_id) if self._now is not None and self._wants_state(tracked, end) else None
        if tables is not None:
            blocks = [(tables[group.number], end // group.block_tokens - 1) for group in self._states]
            self._store_state(tracked, end, [table[i] if i < len(table) else NULL_BLOCK for table, i in blocks])

    def _offered_states(self) -> None:
        """Stores states that the engine's kernels leave at the end of a block within the step."""
        for name, offers in (getattr(self._now, "boundary_state_offloads", None) or {}).items():
            tracked = self._requests.get(name)
            for end in sorted({end for _, _, end in offers}) if tracked is not None else ():
                pages = {number: page for number, page, at in offers if at == end}
                if end % self._unit == 0 and end <= self._hashed_tokens(tracked.vllm) and self._wants_state(tracked, end):
                    self._store_state(tracked, end, [pages.get(group.number, NULL_BLOCK) for group in self._states])

    def _wants_state(self, tracked: _HybridRequest, end: int) -> bool:
        if not self.settings.store or tracked.tainted or self.pool is None or any(link.ns is None for link in self._links):
            return False
        first = tracked.stated
        return end > first and (end in (self._prompt_end(tracked), tracked.junction) or end - first >= self._state_interval)

    def _store_state(self, tracked: _HybridRequest, end: int, pages: Sequence[int]) -> None:
        if NULL_BLOCK in pages:
            return
        tracked.stated = end
        for group, page in zip(self._states, pages):
            i = end // group.block_tokens - 1
            self._store_pages(tracked, group, self._keys(tracked, group, i, i + 1), [page], hold=True)

    def received_all(self, finished: Any, failed: Any, released: dict[int, int]) -> None:
        """The workers' report: requests whose loads ended, those of them that failed, and how many workers have given up each hold."""
        for name in failed or ():
            if name in self._requests:
                self._requests[name].failed = True
        self._loaded(finished)
        self._given_up(self._holds, released)
        self._end()

    def finished_all(self, request: Any, tables: Sequence[Sequence[int]]) -> tuple[bool, Optional[dict[str, Any]]]:
        self.look_at_weights()
        tracked = self._requests.pop(request.request_id, None)
        self.shared.forget(request.request_id)
        if tracked is None:
            return False, None
        self._release(tracked)
        self._behind.pop(request.request_id, None)
        if any(tables) and not tracked.loading:
            tracked.tables = [list(table) for table in tables]
            self._fill(tracked, request.num_computed_tokens, [0] * len(self._groups), ends=True)
            self._behind.pop(request.request_id, None)
        asked = (getattr(request, "kv_transfer_params", None) or {}).get(PREFILL)
        units = min((tracked.decided[g.number] * g.block_tokens for g in self._full), default=0) // self._unit if tracked.decided else 0
        handover = {HANDOVER: units} if asked and units else None
        if tracked.loading or not tracked.reported_later:
            return False, handover
        return self._keep(request.request_id, [block for table in tracked.tables for block in table]), handover


def _run(runs: Sequence[int], end: int) -> int:
    return runs[end] if end < len(runs) else 0


def _picked(keys: bytes, blocks: Sequence[int]) -> bytes:
    """Picks these blocks' keys from the keys of all blocks from their first to their last."""
    first, span = blocks[0], blocks[-1] + 1 - blocks[0]
    if span == len(blocks):
        return keys
    size = len(keys) // span
    return b"".join(keys[(i - first) * size : (i - first + 1) * size] for i in blocks)
