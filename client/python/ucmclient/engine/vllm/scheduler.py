"""The scheduler's half of the connector: decides for each request what to look up, load and store.

Uses a few attributes of vLLM's objects (request_id, block_hashes, num_tokens, the fields of SchedulerOutput) and
imports nothing of vLLM.

Promises: a hit is leased until it is loaded or its request is gone. A store covers only blocks that are complete after
the step whose plan contains it, computed from valid blocks. A request's blocks are not reused while a store reads them.

A load within a step can fail after every rank has computed with its blocks. So stores of that step, and of steps that
were scheduled before its outcome was known, are held until all ranks have reported the outcome.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from . import watching
from .adapters import adapter_of
from .held_pages import NULL_BLOCK, HeldPages
from .lookup_table import LookupTable
from .identity import EngineIdentity
from .inputs import Mask, chosen_items, mask_of, more_of
from .link import Link
from .metadata import MetadataSender
from .nvme import NvmeRate
from .plan import Copy, Plan
from .settings import Settings
from .shared_wait import SharedWait
from .sparse_scheduler import SparseScheduler
from .tracked import NEVER, Promise, Request

if TYPE_CHECKING:
    from ...client import PrefixHits
    from .gather_loads import GatherPlanner

logger = logging.getLogger("ucmclient.engine.vllm")

#: Most keys of one request to the daemon (proto/limits.h).
_MAX_KEYS = 16384

#: In kv_transfer_params: PREFILL goes to the prefill instance; its answer has HANDOVER, which goes to decode.
PREFILL, HANDOVER = "ucmd_prefill", "ucmd_blocks"


@dataclass
class _Held:
    """A store that waits until the outcome of all plans up to `plan` is known."""

    plan: int
    request: Request
    first: int
    copy: Copy


class SchedulerHalf(HeldPages):
    def __init__(
        self, settings: Settings, block_tokens: int, sparse: Optional[SparseScheduler] = None, reads_next: bool = False, workers: int = 1
    ):
        """reads_next: a block's bytes are a function of the token after it, too. workers: of the engine."""
        self.settings, self._reads_next = settings, block_tokens if reads_next else 0
        self.sparse = sparse
        if sparse is not None:
            sparse.given_back = self.given_back
        self.block_tokens = self.hash_tokens = block_tokens
        self.link: Optional[Link] = None
        self._requests: dict[str, Request] = {}
        self._plan = Plan()
        self._nvme = NvmeRate(settings)
        #: Stores of so many blocks and more go by layers.
        self._layered = -(-settings.layer_stores // block_tokens) or NEVER
        self._raw_blocks = -(-settings.raw_first // block_tokens)
        #: For an engine whose ranks share loads out.
        self.gathers: Optional[GatherPlanner] = None
        self.lookup_table = LookupTable(settings)
        self.shared = SharedWait(settings)
        self.metadata_sender = self._metadata_sender()
        #: Random, part of all keys after a reset: no older block matches.
        self._epoch = b""
        #: Numbers of plans: the latest, the latest with loads within its step, the latest with a known outcome.
        self._number = self._risky = self._known = 0
        self._held: list[_Held] = []
        #: Requests that filled a block without a hash yet, and how many blocks they have filled. The engine may schedule before it knows the
        #: last token.
        self._behind: dict[str, int] = {}
        #: Blocks are stored at all, and the daemon is there.
        self._stores = False
        #: Requests with a `past`.
        self._lost: list[Request] = []
        #: Block ids that a failed load within a step left invalid, with the request that computes them again ("":
        #: none).
        self._invalid: dict[int, str] = {}
        #: Finished requests with loads within a step: the plan that decides, their blocks, and which were loaded.
        self._gone: list[tuple[int, list[int], frozenset[int]]] = []
        #: Finished requests whose stores are held.
        self._ending: set[str] = set()
        super().__init__(workers)
        #: Changes of weights that were seen, and whether the engine's own resets count as changes, since none could be seen otherwise.
        self._changes = watching.changes(not settings.keep_on_reset)
        self.resets_count = False

    def connect(self, identity: EngineIdentity, name: str) -> None:
        """Keeps the connection if the identity is the same, as after the engine slept."""
        if self.link is not None and self.link.identity == identity:
            return
        for tracked in self._requests.values():
            self._release(tracked)
        self.close()
        self.metadata_sender = self._metadata_sender()
        self.link = Link(self.settings, identity, name)
        if self.link.ns is not None:
            self.lookup_table.open(self.link.ns)

    def _metadata_sender(self) -> MetadataSender:
        return MetadataSender(
            lambda: self.link.ns if self.link is not None and self.settings.block_metadata else None, self.block_tokens
        )

    def close(self) -> None:
        self.lookup_table.close()
        self.metadata_sender.close()
        if self.link is not None:
            self.link.close()

    def reset(self) -> None:
        """This engine's weights may have changed, and no other engine knows. From now on it loads nothing older and
        shares only with itself."""
        self._epoch = os.urandom(16)
        logger.warning("the engine's weights may have changed: it shares with no other engine until its restart")
        for tracked in self._requests.values():
            self._release(tracked)
            if tracked.loading:
                self._plan.void.add(tracked.vllm.request_id)
            self._name(tracked)
            tracked.stored = 0
            # A request that keeps its blocks continues with old KV.
            self._look_at(tracked)
            tracked.tainted |= bool(tracked.blocks)

    def look_at_weights(self) -> None:
        """Before anything that the engine has scheduled is named."""
        seen = watching.changes(not self.settings.keep_on_reset)
        if seen != self._changes:
            self._changes = seen
            self.reset()

    # ---- lookups ----

    def matched_tokens(self, request: Any, computed: int) -> tuple[Optional[int], bool]:
        """How many tokens after `computed` can be loaded, and whether between steps. The engine always computes a
        request's last token. None: ask again, since a prefill instance is still storing them, or the shared tier is asked for them."""
        self.look_at_weights()
        if self.sparse is not None and self.sparse.is_sparse(request):
            self._tracked(request)
            if not self.sparse.admit(request):
                return None, False
        if self.link is None or not self.settings.load or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        tracked = self._tracked(request)
        if tracked.failed:
            self.shared.give_up(request.request_id)
        if tracked.promise is None and self.shared.holds(request.request_id):
            return None, False
        self.shared.begin(request.request_id)
        promise = self._promise(tracked)
        if self.shared.pending(request.request_id):
            return None, False
        if self._handed_over(tracked) > (promise.blocks if promise else 0) and time.monotonic() < tracked.wait_until:
            self._release(tracked)
            self.shared.extend(request.request_id, tracked.wait_until)
            return None, False
        if promise is None or tracked.failed:
            return 0, False
        promise.start = computed // self.block_tokens
        tokens = min(promise.blocks * self.block_tokens, request.num_tokens - 1) - computed
        slow = min(promise.on_nvme, promise.blocks - promise.start) * self.block_tokens
        if tokens >= max(1, self.settings.min_load_tokens):
            if self._nvme.worth(tokens, slow):
                return tokens, self.settings.async_load
            self._bring_in(tracked, promise, slow)
        self._release(tracked)
        return 0, False

    def _bring_in(self, tracked: Request, promise: Promise, slow: int) -> None:
        if self.link is not None:
            self._nvme.bring_in(self.link, tracked.keys(promise.start, promise.blocks), slow, tracked.vllm.request_id)

    def _tracked(self, request: Any) -> Request:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = Request(request, reads_next=self._reads_next, preemptions=getattr(request, "num_preemptions", 0))
            self._name(tracked)
            if self.sparse is not None and self.sparse.is_sparse(request):
                tracked.own_from, tracked.own = self.sparse.own_blocks(request), self.sparse.own_name(request)
            self._requests[request.request_id] = tracked
        self._look_at(tracked)
        return tracked

    def _look_at(self, tracked: Request) -> None:
        """Notices if the request was preempted."""
        if tracked.preempted() and tracked.past:
            self._lost.append(tracked)

    def _name(self, tracked: Request) -> None:
        """What its keys stand for, besides the engine's hashes."""
        tracked.adapter = adapter_of(tracked.vllm)
        tracked.prefix = self._epoch + self._adapter(tracked) + more_of(tracked.vllm)
        tracked.hash_tokens, mask = self.hash_tokens, mask_of(tracked.vllm)
        tracked.mask, tracked.items = Mask(mask, self.hash_tokens) if mask is not None else None, chosen_items(tracked.vllm)
        tracked.raw = not (tracked.prefix or tracked.reads_next or tracked.items or mask is not None)

    def _adapter(self, tracked: Request) -> bytes:
        return tracked.adapter.digest if tracked.adapter is not None else b""

    def _promise(self, tracked: Request) -> Optional[Promise]:
        """Looks the request up, unless a promise still holds (vLLM asks again in every step), or the lookup table says that nothing is there.
        The lookup includes the engine's own hits. So the daemon knows that they are in use, and those that it lost are stored again."""
        promise = tracked.promise
        if promise and time.monotonic() < promise.until:
            return promise
        self._release(tracked)
        keys = tracked.keys(0, min(tracked.hashed, _MAX_KEYS))
        hits = self._ask(tracked, self.link, keys) if self.link is not None else None
        if hits is None:
            return None
        tracked.stored = hits.blocks
        if hits.blocks == 0:
            return None
        self.metadata_sender.found(tracked, hits.blocks)
        # This leaves half of the lease for the load.
        until = time.monotonic() + self.settings.lease / 2
        tracked.promise = Promise(hits.blocks, hits.lease, until, hits.blocks - hits.in_dram)
        return tracked.promise

    def _ask(self, tracked: Request, link: Link, keys: bytes) -> Optional[PrefixHits]:
        """What a lookup answers. None: nothing is known, or the lookup table says that nothing is there."""
        ns = link.ns
        if ns is None or not keys:
            return None
        advice = self.lookup_table.look(ns, keys) if link is self.link else None
        if self.lookup_table.spares(advice):
            if not tracked.told:
                link.tell(ns.lookup_note, keys, timeout=self.settings.lookup_timeout, request=tracked.vllm.request_id)
            tracked.told, tracked.stored = True, 0
            return None
        hits = self.shared.prefix(link, tracked.vllm.request_id, keys)
        if hits is None or hits.pending:
            return None
        if link is self.link:
            self.lookup_table.learn(ns, advice, hits)
        return hits

    def _handed_over(self, tracked: Request) -> int:
        """How many blocks a prefill instance hands over. Starts the time limit for waiting."""
        params = getattr(tracked.vllm, "kv_transfer_params", None) or {}
        blocks = params.get(HANDOVER, 0)
        if not isinstance(blocks, int) or tracked.failed or self.link is None or self.link.ns is None:
            return 0
        if tracked.wait_until == 0.0:
            tracked.wait_until = time.monotonic() + self.settings.handover_wait
        return min(blocks, tracked.hashed, _MAX_KEYS)

    def _release(self, tracked: Request) -> None:
        promise, tracked.promise = tracked.promise, None
        if promise is not None and self.link is not None:
            self.link.release(promise.lease)

    # ---- steps ----

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        """vLLM gave the request blocks. `tokens` of the promised tokens are to be loaded into them."""
        tracked = self._tracked(request)
        tracked.blocks = list(blocks)
        promise = tracked.promise
        if tokens == 0 or promise is None:
            if not tracked.loading:
                self._release(tracked)
            return
        first, end = promise.start, promise.start + -(-tokens // self.block_tokens)
        copy = self._copy(tracked, first, end)
        if self.gathers is not None:
            self.gathers.begin(copy)
        self._plan.loads.append(copy)
        if self.sparse is not None and self.sparse.rules.on_gpu and blocks[:1] == [NULL_BLOCK]:
            pageless = next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
            self._plan.ahead[request.request_id] = tracked.keys(0, pageless)
        tracked.loads, tracked.began = frozenset(copy.blocks), time.monotonic()
        tracked.slow = min(promise.on_nvme, end - first) * self.block_tokens
        # After a load within a step the lease stays until the request ends, or runs out.
        tracked.loading = self.settings.async_load

    def given_back(self, request_id: str, blocks: int) -> None:
        """The engine has taken the pages of so many first blocks of a request."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.blocks[:blocks] = [NULL_BLOCK] * len(tracked.blocks[:blocks])

    def from_nvme(self, request: Any) -> int:
        """How many tokens of its load come from NVMe."""
        tracked = self._requests.get(request.request_id)
        return tracked.slow if tracked is not None else 0

    def step(self, output: Any) -> Plan:
        """Returns the workers' plan for this step."""
        self._number += 1
        self.look_at_weights()
        self._look_whether_to_store()
        if getattr(output, "has_sync_kv_loads", False) or (self._plan.loads and not self.settings.async_load):
            self._risky = self._number
        lost = set(getattr(output, "preempted_req_ids", None) or ())
        for request_id in lost & self._requests.keys():
            self._look_at(self._requests[request_id])
        self._held = [held for held in self._held if held.copy.request not in lost]
        self._plan.stores = [copy for copy in self._plan.stores if copy.request not in lost]
        self._forget_invalid(lost)
        self._end()
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.blocks = list(new.block_ids[0])
                self._sparse_step(tracked, new.num_computed_tokens, output, reset=True)
                self._begin_anew(tracked, new.num_computed_tokens)
                self._store(tracked, (new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]) // self.block_tokens)
        self._go_on(output.scheduled_cached_reqs, output)
        plan, self._plan = self._plan, Plan()
        plan.preempted, plan.ours = lost, self.pool is not None
        plan.gathers = self.gathers.take() if self.gathers is not None else []
        plan.gone = lost | set(output.finished_req_ids) if self.sparse is not None else set()
        plan.number = self._number if self._risky > self._known else 0
        plan.connected = self.link is not None
        plan.computes = bool(output.num_scheduled_tokens)
        return plan

    def _go_on(self, cached: Any, output: Any) -> None:
        """Handles running requests. In most steps most of them get no block: a filled block is stored when its request gets the next one, or
        ends."""
        ids, added, computed = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        scheduled, size = output.num_scheduled_tokens, self.block_tokens
        behind, self._behind = self._behind, {}
        if self._invalid or self.sparse is not None or cached.resumed_req_ids:
            due = list(range(len(ids)))
        else:
            due = [i for i, blocks in enumerate(added) if blocks]
            for name in behind.keys() & scheduled.keys() & self._requests.keys():
                self._store(self._requests[name], behind[name])
        for i in due:
            name, blocks = ids[i], added[i]
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            resumed = name in cached.resumed_req_ids
            if resumed:
                tracked.blocks = list(blocks[0]) if blocks else []
                self._begin_anew(tracked, computed[i])
            elif blocks:
                for block in blocks[0] if self._invalid else ():
                    self._invalid.pop(block, None)
                tracked.blocks.extend(blocks[0])
            if self.sparse is not None:
                self._sparse_step(tracked, computed[i], output, reset=resumed)
            end = (computed[i] + scheduled[name]) // size
            if end > tracked.stored or self._invalid:
                self._store(tracked, end)

    def _sparse_step(self, tracked: Request, computed: int, output: Any, reset: bool) -> None:
        """A rank may lack a block that the step attends, and then all ranks' results are worthless. So stores wait."""
        tokens = output.num_scheduled_tokens[tracked.vllm.request_id]
        step = self.sparse.step(tracked, computed, tokens, reset) if self.sparse is not None else None
        if step is not None:
            self._risky = self._number
            self._plan.sparse.append(step)

    def _store(self, tracked: Request, end: int) -> None:
        """Stores blocks up to `end`, if they have a key. Speculated tokens, which may be rejected, have none."""
        hashed, blocks = tracked.hashed, tracked.blocks
        if self._invalid:
            self._judge(tracked, blocks[:end])
        if end > hashed:
            self._behind[tracked.vllm.request_id] = end
        end = min(end, hashed, len(blocks))
        if end <= tracked.stored or tracked.tainted or not self._stores:
            return
        tracked.reported_later = True
        if tracked.stored < tracked.read_from:
            tracked.read_from = tracked.stored
        if end > tracked.read_to:
            tracked.read_to = end
        self.metadata_sender.stored(tracked, tracked.stored, end)
        while tracked.stored < end:
            first = tracked.stored
            raw = first < self._raw_blocks  # as it is, though the engine encodes
            tracked.stored = min(end, self._raw_blocks if raw else end, first + _MAX_KEYS)
            copy = self._copy(tracked, first, tracked.stored, raw)
            if not copy.blocks:
                continue
            if self._risky > self._known:
                self._held.append(_Held(self._number, tracked, first, copy))
            else:
                copy.layered = len(copy.blocks) >= self._layered
                self._plan.stores.append(copy)

    def _judge(self, tracked: Request, blocks: list[int]) -> None:
        """Whether what it computes with these is right. Of blocks whose load failed, only those that it computes itself are right."""
        if self._invalid.keys().isdisjoint(blocks):
            return
        name = tracked.vllm.request_id
        for block in blocks:
            if self._invalid.get(block, name) != name:
                tracked.tainted = True
            else:
                self._invalid.pop(block, None)

    def _look_whether_to_store(self) -> None:
        """Once a step: the daemon may have gone."""
        self._stores = self.settings.store and self.link is not None and self.link.ns is not None

    @staticmethod
    def _copy(tracked: Request, first: int, end: int, raw: bool = False) -> Copy:
        """The copy of these blocks, without those that have no pages."""
        if end == first + 1 and tracked.blocks[first] != NULL_BLOCK:  # nearly all are of one block
            return Copy(tracked.vllm.request_id, tracked.key(first), [tracked.blocks[first]], raw, adapter=tracked.adapter)
        there = [i for i in range(first, end) if tracked.blocks[i] != NULL_BLOCK]
        keys = b"".join(tracked.keys(i, i + 1) for i in there) if len(there) < end - first else tracked.keys(first, end)
        return Copy(tracked.vllm.request_id, keys, [tracked.blocks[i] for i in there], raw, adapter=tracked.adapter)

    def received(self, finished: Any, invalid: Any, number: int) -> None:
        """The workers' report. finished: requests whose loads ended. invalid: blocks that failed, which are computed
        and stored again. number: the latest plan that all ranks have carried out, 0 if unknown."""
        self._loaded(finished, bool(invalid))
        if invalid:
            self._failed(invalid)
        self._known = max(self._known, number)
        self._gone = [gone for gone in self._gone if gone[0] > self._known]
        if self._risky <= self._known and self._lost:
            for tracked in self._lost:
                tracked.past.clear()
            self._lost = []
        if self._held:
            self._plan.stores += [held.copy for held in self._held if held.plan <= self._known]
            self._held = [held for held in self._held if held.plan > self._known]
        self._end()

    def _loaded(self, finished: Any, invalid: bool = False) -> None:
        for request_id in finished or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                if tracked.loading and not (invalid or tracked.failed):
                    self._nvme.measured(tracked.slow, time.monotonic() - tracked.began)
                tracked.loading = False
                self._release(tracked)

    def spoiled(self, requests: Any) -> None:
        """What the latest step computed of these is wrong, and the engine preempts them. Nothing of it is stored."""
        for held in self._held:
            if held.copy.request in requests:
                held.request.stored = min(held.request.stored, held.first)
        self._held = [held for held in self._held if held.copy.request not in requests]

    def _failed(self, invalid: Any) -> None:
        """Drops all held stores: their steps may have used these blocks."""
        for held in self._held:
            held.request.stored = min(held.request.stored, held.first)
        self._held = []
        if not self.settings.async_load:
            # If no request computes them again, the engine treats them as valid.
            self._invalid.update({block: "" for block in invalid if block not in self._invalid})
            gone = [(blocks, loads) for _, blocks, loads in self._gone]
            for blocks, loads in gone + [past for tracked in self._lost for past in tracked.past]:
                bad = next((i for i, block in enumerate(blocks) if block in invalid and block in loads), len(blocks))
                self._invalid.update(dict.fromkeys(blocks[bad:], ""))
        for tracked in self._requests.values():
            bad = [i for i, block in enumerate(tracked.blocks) if block in invalid]
            if not bad:
                continue
            tracked.failed = True
            if tracked.blocks[bad[0]] in tracked.loads:
                tracked.stored = min(tracked.stored, bad[0])
                if not self.settings.async_load:
                    self._invalid.update(dict.fromkeys(tracked.blocks[bad[0] :], tracked.vllm.request_id))
            else:
                # The other request computes that block again, perhaps after this one has used it. If the other is gone,
                # this one does.
                tracked.tainted = True
                for block in tracked.blocks[bad[0] :]:
                    if self._invalid.get(block) == "":
                        self._invalid[block] = tracked.vllm.request_id

    def _forget_invalid(self, requests: set[str]) -> None:
        """These requests will not compute their invalid blocks; nobody does until the engine reuses the blocks."""
        for block, owner in self._invalid.items():
            if owner in requests:
                self._invalid[block] = ""

    def _begin_anew(self, tracked: Request, computed: int) -> None:
        """Blocks that the request will compute or load are no longer invalid. Those from the engine's cache may still be."""
        for i, block in enumerate(tracked.blocks if self._invalid else ()):
            if i >= computed // self.block_tokens or block in tracked.loads:
                self._invalid.pop(block, None)

    def _end(self) -> None:
        """Passes finished requests to the plan, once none of their stores is held."""
        held = {held.copy.request for held in self._held}
        self._plan.ended |= self._ending - held
        self._ending &= held

    def finished(self, request: Any, blocks: list[int]) -> tuple[bool, Optional[dict[str, Any]]]:
        """Returns whether its blocks must stay until the workers report it, and kv_transfer_params for decode if the
        request asked for prefill only."""
        self.look_at_weights()
        tracked = self._requests.pop(request.request_id, None)
        self.shared.forget(request.request_id)
        self._plan.ahead.pop(request.request_id, None)
        if self.sparse is not None:
            self.sparse.finished(request.request_id)
        if tracked is None:
            return False, None
        self._release(tracked)
        self._lost = [lost for lost in self._lost if lost is not tracked]
        self._forget_invalid({request.request_id})
        if not self.settings.async_load and self._risky > self._known:
            now = [(list(blocks or tracked.blocks), tracked.loads)] if tracked.loads else []
            self._gone += [(self._number, *gone) for gone in tracked.past + now]
        if blocks and not tracked.loading:
            tracked.blocks = list(blocks)
            self._look_whether_to_store()
            self._store(tracked, request.num_computed_tokens // self.block_tokens)
        asked = (getattr(request, "kv_transfer_params", None) or {}).get(PREFILL)
        handover = {HANDOVER: tracked.stored} if asked and tracked.stored else None
        if tracked.loading or not tracked.reported_later:
            return False, handover  # vLLM itself waits for the load
        return self._keep(request.request_id, tracked.blocks[tracked.read_from : tracked.read_to]), handover
