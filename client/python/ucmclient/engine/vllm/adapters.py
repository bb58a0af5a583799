"""What tells LoRA adapters apart, besides the name by which the engine hashes them.

An adapter's files may change between a request's lookup and the engine's reading of them, and again before it reads them again. So the scheduler's half says
with each copy which version its keys stand for. The workers' halves, in whose processes adapters are read, take part in no copy of another version.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional
from weakref import WeakKeyDictionary

from ..weights import before_reading, commit_of, files_at, local

logger = logging.getLogger("ucmclient.engine.vllm")

#: What this process has read last: by its engines' managers of adapters (mostly one) and by the adapters' numbers.
_read: WeakKeyDictionary[Any, dict[int, bytes]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Adapter:
    """The engine's number of it, and a hash of its path and the names, sizes and times of its files."""

    number: int
    digest: bytes


def adapter_of(request: Any) -> Optional[Adapter]:
    """As its files are now."""
    lora = getattr(request, "lora_request", None)
    return None if lora is None else Adapter(getattr(lora, "lora_int_id", 0), digest_of(lora))


def digest_of(lora: Any, refresh: bool = False) -> bytes:
    """Random if nothing is known of the files, as for an adapter that came as tensors. refresh: look at a hub's adapter again, instead of remembering an
    earlier look."""
    path = str(getattr(lora, "lora_path", "") or getattr(lora, "path", ""))
    of = _files_in(path, refresh)
    known = repr((*of, bool(getattr(lora, "is_3d_lora_weight", False)))).encode() if of is not None else os.urandom(32)
    return hashlib.sha256(known).digest()


def _commit(path: str, refresh: bool) -> Optional[str]:
    """The commit of a hub's adapter, which the engine may not have fetched yet."""
    return commit_of(path, refresh=refresh) if path and not path.startswith(("~", "/")) else None


def _files_in(path: str, refresh: bool) -> Optional[tuple[Any, ...]]:
    """The files of an adapter. Of one on a hub, its name and commit."""
    here = local(path)
    if here is None:
        commit = _commit(path, refresh)
        return (path, commit) if commit else None
    files = files_at(here, ("",))
    return (here, files.kept) if files is not None and files.kept else None


def right(adapter: Optional[Adapter]) -> bool:
    """Whether this process has read that version of it, and no other."""
    return adapter is None or {of[adapter.number] for of in _read.values() if adapter.number in of} == {adapter.digest}


@contextmanager
def reading(manager: Any, lora: Any) -> Iterator[None]:
    """Around the engine's reading of an adapter."""
    read = _read.setdefault(manager, {})
    number, path = getattr(lora, "lora_int_id", 0), str(getattr(lora, "lora_path", ""))
    read.pop(number, None)
    here = local(path)
    before = before_reading(here, ("",)) if here is not None else None
    commit = _commit(path, refresh=True) if here is None else None
    yield
    digest = digest_of(lora, refresh=True)
    if here is not None:
        after = files_at(here, ("",), closely=True)
        same = before is not None and after is not None and before.settled and before.exact == after.exact
    else:
        same = commit in (None, _commit(path, refresh=False))  # None: the engine has fetched it
    if same:
        read[number] = digest
    else:
        logger.warning("the files of LoRA adapter %s changed while they were read: this engine shares nothing of it until it reads it again", path)


def watch() -> None:
    """Notes what this process reads from now on. If a vLLM reads adapters in another way nothing is noted, so they are not shared."""
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager as manager

        load = manager._load_adapter
    except (ImportError, AttributeError) as error:
        logger.warning("this vLLM does not show when it reads LoRA adapters (%s): nothing that depends on one is shared", error)
        return
    if hasattr(load, "noted"):
        return

    @functools.wraps(load)
    def noted(self: Any, lora: Any, *args: Any, **named: Any) -> Any:
        with reading(self, lora):
            return load(self, lora, *args, **named)

    noted.noted = True  # type: ignore[attr-defined]
    manager._load_adapter = noted
