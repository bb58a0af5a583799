"""Which weights an engine has, where one name may stand for others later.

A name is told apart by its files' names, sizes and times, or by a hub's commit. An engine reads the files at one time and is asked for their identity at
another, so both looks are compared. Where it is unknown which version was read there is a doubt, and whoever has one shares with nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

#: Files of a model's folder that decide about its KV: weights, code, and how images and videos are processed.
_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".npz", ".engine", ".json", ".py")
#: The clock of a file system may be this far behind, in seconds: it ticks.
_TICK = 0.05

#: For a path: what its files were when each load of it began, since it was last forgotten. Of this process.
_begun: dict[str, list["Files"]] = {}


@dataclass(frozen=True)
class Files:
    """kept: names, sizes and times. changed: of any of them or of a link to them, the last change, in seconds since 1970, which nobody can set back.
    exact: also which files these are."""

    kept: tuple[Any, ...]
    changed: float
    exact: tuple[Any, ...]
    #: When this was seen.
    at: float

    @property
    def settled(self) -> bool:
        """A further change would show, also in a file system whose clock ticks."""
        return self.at - _TICK > self.changed


@dataclass(frozen=True)
class Weights:
    """known: what tells them apart, for JSON. doubt: why that may be wrong; "": it is right."""

    known: Any
    doubt: str = ""


def local(path: str) -> Optional[str]:
    """Where a path lies on this host, as engines take it; None: it does not."""
    expanded = os.path.abspath(os.path.expanduser(path)) if path else ""
    return expanded if expanded and os.path.exists(expanded) else None


def files_at(path: str, suffixes: tuple[str, ...] = _FILES) -> Optional[Files]:
    """Of a folder the files with these suffixes, or of a file that one. None: they can't be read, or something is moving them."""
    at = time.time()
    try:
        links = [os.lstat(one).st_ctime for one in _above(path) if os.path.islink(one)]
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                found = sorted((e.name, e.stat(), e.stat(follow_symlinks=False)) for e in entries if e.name.endswith(suffixes) and e.is_file())
        else:
            found = [(os.path.basename(path), os.stat(path), os.lstat(path))]
        changed = max([*links, *(max(one.st_ctime, link.st_ctime) for _, one, link in found), os.stat(path).st_ctime])
    except OSError:
        return None
    kept = tuple((name, one.st_size, one.st_mtime_ns) for name, one, _ in found)
    return Files(kept, changed, tuple((name, one.st_dev, one.st_ino, one.st_ctime_ns) for name, one, _ in found), at)


def _above(path: str) -> Iterator[str]:
    while True:
        yield path
        path, below = os.path.dirname(path), path
        if path == below:
            return


def begins(name: str) -> None:
    """An engine begins to read these weights, in this process."""
    path = local(name)
    files = files_at(path) if path is not None else None
    if path is not None and files is not None:
        _begun.setdefault(path, []).append(files)


def forget() -> None:
    """What was read until now has been asked for."""
    _begun.clear()


def commit_of(name: str, revision: Optional[str] = None) -> Optional[str]:
    """Of a hub's model or adapter, as far as it lies on this host."""
    try:
        from huggingface_hub import snapshot_download

        return os.path.basename(os.path.realpath(snapshot_download(name, revision=revision, local_files_only=True)))
    except Exception:  # no such package, name or copy: each version has exceptions of its own
        return None


def weights_at(name: str, revision: Optional[str] = None, commit: Optional[str] = None) -> Weights:
    """commit: that the engine itself names, of a hub's model. Call it when the weights are read."""
    path = local(name)
    if path is None:
        here = commit_of(name, revision)
        if commit and here and commit != here:
            return Weights(commit, f"its configuration is of commit {commit}, and its files of {here}")
        return Weights(commit or here, "" if commit or here else "it is neither a path of this host nor of a known commit")
    files = files_at(path)
    if files is None or not files.kept:
        return Weights(None, "no files of it can be read" if files is None else "it has no files that are known to be weights")
    begun = _begun.get(path)
    if begun is None:
        late = files.changed >= process_began() - _TICK
        return Weights(files.kept, "its files changed after this process began, and may have been read before" if late else "")
    same = begun[0].settled and all(one.exact == files.exact for one in begun)
    return Weights(files.kept, "" if same else "its files changed while they were read")


def process_began() -> float:
    """Seconds since 1970."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
