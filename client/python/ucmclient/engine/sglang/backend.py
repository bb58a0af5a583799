"""SGLang's HiCache storage on ucmd: --hicache-storage-backend dynamic with this class (docs/engines.md).

A host pool is a namespace, and a page of it a block under the hash that SGLang gives the page. That hash covers the tokens before the page, the
adapter (extra_key) and the salt of the request. The namespace covers all else that decides about a page's bytes: model, element type, layout and sizes
of its pieces. Unless all ranks hold the same, it also covers which rank it is. SGLang takes the least of what its ranks find.

SGLang calls from threads of its own, never from the scheduler's."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Optional

from sglang.srt.mem_cache import utils
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from ..pages import Fragment, PageStore, key_of, settings_of, weights_of
from ..vllm.identity import EngineIdentity

logger = logging.getLogger("ucmclient.engine.sglang")
_WHERE = '"ucm" in --hicache-storage-backend-extra-config'
#: SGLang's arguments that decide which weights are read. It tells its storages only the name under which it serves them.
_WEIGHTS = ("model_path", "revision", "dtype", "quantization", "load_format", "json_model_override_args")
_DRAFT = ("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_model_quantization")


class Refused(ValueError):
    """The message says what would be right."""


def _of_all_ranks(mine: Any) -> list[Any]:
    """What each rank that works on the same requests says. The ranks register their pools in one order. If an SGLang names its groups of ranks
    otherwise, each rank speaks for itself."""
    try:
        from sglang.srt.runtime_context import get_parallel
        group = get_parallel().attn_tp_group
    except (ImportError, AttributeError, RuntimeError, AssertionError):
        return [mine]
    said: list[Any] = [mine] * group.world_size
    if group.world_size > 1:
        import torch
        torch.distributed.all_gather_object(said, mine, group=group.cpu_group)
    return said


class UcmStorage(HiCacheStorage):
    def __init__(self, storage_config: Any, kwargs: Optional[dict[str, Any]] = None):
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise Refused('ucmd moves pages without copies of them: set "interface_v1": 1 in --hicache-storage-backend-extra-config')
        if not hasattr(utils, "storage_namespace_seed"):
            raise Refused("this SGLang's page hashes leave out the LoRA adapter and the salt of a request, so pages of different ones would be "
                          "taken for each other: take a newer SGLang (0.5.23 has them)")
        if getattr(storage_config, "should_split_heads", False):
            raise Refused("tp_lcm_size splits pages by heads, which is not supported: remove it from --hicache-storage-backend-extra-config")
        ucm = dict(extra.get("ucm") or {})
        self._dtype = ucm.pop("dtype", "")
        self._config, self._settings = storage_config, settings_of(ucm, _WHERE)
        self._stores: dict[str, tuple[PageStore, int]] = {}

    # ---- pools ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._open(str(PoolName.KV), mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != str(PoolName.KV) or host_pool is not self.mem_pool_host:
            self._open(str(host_pool_name), host_pool)

    def _open(self, name: str, pool: Any) -> None:
        fragments, pages, tokens = self._geometry(name, pool)
        old = self._stores.pop(name, None)
        if old is not None:
            old[0].close()
        store = PageStore(self._settings, self._identity(name, pool, fragments, tokens), fragments, pages, f"sglang-{name}")
        self._stores[name] = store, tokens
        logger.info("ucmd: pool %s, %d pages of %d bytes, %s", name, pages, store.page_bytes,
                    "copied by the daemon" if store.direct else 'copied once more by this process: "allocator": "shm" avoids that')

    @staticmethod
    def _geometry(name: str, pool: Any) -> tuple[list[Fragment], int, int]:
        """Pieces of a page, pages, and tokens of a page, from what the pool says of its first pages and its last one."""
        import torch

        tokens = int(getattr(pool, "page_size", 1) or 1)
        pages = int(getattr(pool, "page_num", 0) or getattr(pool, "size", 0) // tokens)

        def pieces(page: int) -> tuple[list[int], list[int]]:
            try:
                addresses, sizes = pool.get_page_buffer_meta(torch.arange(page * tokens, (page + 1) * tokens))
            except (AttributeError, NotImplementedError, ValueError, AssertionError) as error:
                raise Refused(f"pool {name} does not say where its pages lie ({error}): try --hicache-mem-layout page_first") from None
            return [int(at) for at in addresses], [int(size) for size in sizes]

        (first, sizes), second, last = pieces(0), pieces(min(1, pages - 1)), pieces(pages - 1)
        fragments = [Fragment(at, max(next_ - at, size), size) for at, next_, size in zip(first, second[0], sizes)]
        regular = [fragment.address + (pages - 1) * fragment.stride for fragment in fragments] == last[0]
        if not fragments or sizes != second[1] or sizes != last[1] or (pages > 1 and not regular):
            raise Refused(f"pages of pool {name} do not lie at equal distances: try --hicache-mem-layout page_first")
        return fragments, pages, tokens

    def _identity(self, name: str, pool: Any, fragments: Sequence[Fragment], tokens: int) -> EngineIdentity:
        config, dtype = self._config, str(getattr(pool, "dtype", "")).removeprefix("torch.")
        if dtype == "uint8" and name == str(PoolName.KV):
            if not self._dtype:
                raise Refused(f'the pool keeps K and V as bytes: say of which type they are, such as "dtype": "fp8_e4m3", in {_WHERE}')
            dtype = self._dtype
        # A sidecar's bytes may be a rank's own where K and V are not: state of recurrent layers is.
        alike = config.is_mla_model and name != str(PoolName.MAMBA)
        rank = "" if alike else f"tp{config.tp_rank}/{config.tp_size}"
        what = [name, type(pool).__name__, getattr(pool, "layout", ""), getattr(pool, "storage_format_tag", None) or "",
                getattr(pool, "head_num", 0), getattr(pool, "head_dim", 0), getattr(pool, "start_layer", 0), getattr(pool, "end_layer", 0),
                rank, f"pp{config.pp_rank}/{config.pp_size}", f"cp{config.attn_cp_rank}/{config.attn_cp_size}",
                f"dcp{getattr(config, 'dcp_rank', 0)}/{getattr(config, 'dcp_size', 1)}", *(fragment.size for fragment in fragments)]
        digest = hashlib.sha256(repr([str(one) for one in what]).encode()).hexdigest()[:32]
        return EngineIdentity(
            model=config.model_name or "unnamed", dtype=dtype or "bytes", layout=f"sglang/1/{digest}", block_tokens=tokens,
            layer_bytes=sum(fragment.size for fragment in fragments), layers=(1,), revision=self._weights(name),
            salt=self._settings.salt.encode(),
        )

    def _weights(self, name: str) -> str:
        try:
            from sglang.srt.runtime_context import get_server_args
            args = get_server_args()
        except (ImportError, ValueError):
            return weights_of(self._settings, "", {"name": self._config.model_name})  # under which anything may be served
        told = {one: getattr(args, one, None) for one in (*_WEIGHTS, *(_DRAFT if name.startswith("draft") else ()))}
        draft = told.get("speculative_draft_model_path")
        drafts = [(str(draft), told.get("speculative_draft_model_revision"))] if draft else []
        return weights_of(self._settings, str(told["model_path"]), told, drafts, _of_all_ranks)

    def _store(self, name: str) -> tuple[PageStore, int]:
        if name not in self._stores:
            raise Refused(f"pool {name} was never registered; there are {', '.join(sorted(self._stores)) or 'none'}")
        return self._stores[name]

    # ---- K and V ----

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._store(str(PoolName.KV))[0].prefix([key_of(key) for key in keys])

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._moved("load", str(PoolName.KV), keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._moved("save", str(PoolName.KV), keys, host_indices)

    def _moved(self, verb: str, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        store, tokens = self._store(name)
        if host_indices is None or len(host_indices) != len(keys) * tokens:
            logger.error("ucmd: %d keys of pool %s, whose pages have %d tokens, and %d places", len(keys), name, tokens,
                         0 if host_indices is None else len(host_indices))
            return [False] * len(keys)
        return getattr(store, verb)([key_of(key) for key in keys], [int(at) // tokens for at in host_indices[::tokens]])

    # ---- several pools ----

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> PoolTransferResult:
        """The longest prefix of K and V that every pool can restore. A pool of all pages restores as far as it has them. A pool of trailing pages
        restores where it has the last ones."""
        pages = self.batch_exists(keys)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            has = self._store(str(transfer.name))[0].each([key_of(key) for key in keys[:pages]])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                good = set(range(1, (has.index(False) if False in has else pages) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                last = max(1, len(transfer.keys or ()))
                good = {n for n in range(1, pages + 1) if all(has[max(0, n - last) : n])}
            else:
                raise Refused(f"pool {transfer.name}: hits by {transfer.hit_policy} are not supported")
            if good:
                hits[transfer.name] = max(good)
            restorable = [n for n in restorable if n in good]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._moved("load", str(t.name), t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._moved("save", str(t.name), t.keys or [], t.host_indices) for t in transfers}

    # ---- the rest of the interface ----

    def clear(self) -> bool:
        """Drops every page of these pools, also those that other engines of the same model stored."""
        return all([store.drop() for store, _ in self._stores.values()])

    def close(self) -> None:
        while self._stores:
            self._stores.popitem()[1][0].close()

    def _by_value(self, *_: Any, **__: Any) -> Any:
        raise Refused('pages are moved by their places only: set "interface_v1": 1 in --hicache-storage-backend-extra-config')

    get = batch_get = set = batch_set = _by_value
