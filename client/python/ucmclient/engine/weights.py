"""Which weights an engine has, since one name may stand for others later.

A name is identified by its files' names, sizes and times, or by a hub's commit. An engine reads the files at one time and is asked for their identity at
another, so two looks are compared. If it is unknown which version was read, there is a doubt. An engine in doubt shares with no other.

A file's times are by the clock of its file server. A file system of this host has this host's clock. A file server has its own, which may be wrong by more than
the time that matters. So how old its files seem proves nothing."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Optional

#: Files of a model's directory that decide about its KV: weights, code, and how images and videos are processed.
_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".npz", ".engine", ".json", ".py")
_libc = ctypes.CDLL(None)
#: A file system's clock ticks, so it may lag by this much, in seconds. The second value: where its times have no fractions.
_TICK, _COARSE_TICK = 0.05, 2.0
#: The clocks of this host and of a file server differ by at most so many seconds.
_APART = 600.0
#: File systems whose times are by this host's clock, by statfs(2)'s f_type: ext2 to ext4, xfs, btrfs, bcachefs, f2fs, zfs, overlay, tmpfs, ramfs, squashfs,
#: erofs. (A list of mounts leaves out the one that a chroot lies in.)
_OWN = frozenset((0xEF53, 0x58465342, 0x9123683E, 0xCA451A4E, 0xF2F52010, 0x2FC12FC1, 0x794C7630, 0x01021994, 0x858458F6, 0x73717368, 0xE0F5E1E2))
#: A close look reads so many bytes of so many of the largest files.
_SAMPLED, _SAMPLE = 16, 4096
#: For how many seconds, and for how many names, the result of a search for a commit is remembered. A search reads a hub's directories.
_FOUND, _NOT_FOUND, _NAMES = 60.0, 1.0, 1024

#: By path: what its files were when each load of it began, since it was last forgotten. For this process.
_begun: dict[str, list["Files"]] = {}
#: By a hub's name and a revision: the commit, and until when that counts, by the monotonic clock. For this process.
_commits: dict[tuple[str, Optional[str]], tuple[Optional[str], float]] = {}


@dataclass(frozen=True)
class Files:
    """kept: names, sizes and times. changed: the last change of any of them or of a link to them, in seconds since 1970; nobody can set it back. exact: also
    which files these are, and after a close look some of their bytes."""

    kept: tuple[Any, ...]
    changed: float
    exact: tuple[Any, ...]
    #: Two changes that are further apart than this, in seconds, have different times.
    tick: float
    #: When this was seen, by this host's clock, and all that was looked at.
    at: float
    paths: tuple[str, ...]
    #: The files were the same a tick before.
    twice: bool = False

    @functools.cached_property
    def own_clock(self) -> bool:
        """The times are by this host's clock."""
        return _own_clock(self.paths)

    @property
    def settled(self) -> bool:
        """A further change would show in the times."""
        return self.twice or (self.at - self.tick > self.changed and self.own_clock)


@dataclass(frozen=True)
class Weights:
    """known: what tells them apart, for JSON. doubt: why that may be wrong; "": it is right."""

    known: Any
    doubt: str = ""


def local(path: str) -> Optional[str]:
    """Where a path lies on this host, as engines resolve it. None: it does not."""
    expanded = os.path.abspath(os.path.expanduser(path)) if path else ""
    return expanded if expanded and os.path.exists(expanded) else None


def files_at(path: str, suffixes: tuple[str, ...] = _FILES, closely: bool = False) -> Optional[Files]:
    """A directory's files with these suffixes, or the one file. None: they can't be read, or something is moving them. closely: opens each, as a reader does,
    so that the file server answers instead of this host's cache."""
    at = time.time()
    try:
        links = [one for one in _above(path) if os.path.islink(one)]
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                places = sorted(e.path for e in entries if e.name.endswith(suffixes) and e.is_file())
        else:
            places = [path]
        found = _opened(places) if closely else [(os.stat(place), "") for place in places]
        changed = max(one.st_ctime for one in (*(file for file, _ in found), *map(os.lstat, (*links, *places)), os.stat(path)))
    except OSError:
        return None
    whole = all(file.st_ctime_ns % 1_000_000_000 == 0 for file, _ in found)
    kept = tuple((os.path.basename(place), file.st_size, file.st_mtime_ns) for place, (file, _) in zip(places, found))
    exact = tuple((file.st_dev, file.st_ino, file.st_ctime_ns, some) for file, some in found)
    return Files(kept, changed, (kept, exact), _COARSE_TICK if whole else _TICK, at, (*links, *places, path))


def _opened(places: list[str]) -> list[tuple[os.stat_result, str]]:
    """Which files they are, and a hash of bytes from the middle of the largest ones."""
    largest = set(sorted(places, key=os.path.getsize)[-_SAMPLED:])
    found = []
    for place in places:
        fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            file = os.fstat(fd)
            some = os.pread(fd, _SAMPLE, file.st_size // 2) if place in largest and stat.S_ISREG(file.st_mode) else b""
        finally:
            os.close(fd)
        found.append((file, hashlib.sha256(some).hexdigest()))
    return found


def _own_clock(paths: Iterable[str]) -> bool:
    """Whether all of them lie in file systems whose times are by this host's clock."""
    return all(_file_system(path) in _OWN for path in paths)


def _file_system(path: str) -> int:
    """The type of the file system that has the path, as statfs(2) tells it; 0 if the call fails."""
    about = ctypes.create_string_buffer(256)  # struct statfs, which begins with f_type, a long
    if _libc.statfs(os.fsencode(path), about) != 0:
        return 0
    return int(ctypes.c_long.from_buffer(about).value) & 0xFFFFFFFF


def before_reading(path: str, suffixes: tuple[str, ...] = _FILES) -> Optional[Files]:
    """A close look at what an engine is about to read. If it is not known whether a further change would show, it waits until one would. Two looks that agree,
    with a tick of the file system between them, need no clock."""
    first = files_at(path, suffixes, closely=True)
    if first is None or first.settled:
        return first
    time.sleep(first.tick)
    again = files_at(path, suffixes, closely=True)
    return replace(again, twice=True) if again is not None and again.exact == first.exact else again


def _above(path: str) -> Iterator[str]:
    while True:
        yield path
        path, below = os.path.dirname(path), path
        if path == below:
            return


def begins(name: str) -> None:
    """An engine begins to read these weights, in this process."""
    path = local(name)
    files = before_reading(path) if path is not None else None
    if path is not None and files is not None:
        _begun.setdefault(path, []).append(files)


def forget() -> None:
    """Forgets what was read until now, since its identity has been asked for."""
    _begun.clear()


def commit_of(name: str, revision: Optional[str] = None, refresh: bool = False) -> Optional[str]:
    """The commit of a hub's model or adapter on this host. refresh: an engine reads it now. Otherwise the answer may be up to a minute old."""
    commit, until = _commits.get((name, revision), (None, 0.0))
    if refresh or time.monotonic() >= until:
        commit = _commit_here(name, revision)
        if len(_commits) >= _NAMES:
            _commits.clear()
        _commits[name, revision] = commit, time.monotonic() + (_FOUND if commit else _NOT_FOUND)
    return commit


def _commit_here(name: str, revision: Optional[str]) -> Optional[str]:
    try:
        from huggingface_hub import snapshot_download

        return os.path.basename(os.path.realpath(snapshot_download(name, revision=revision, local_files_only=True)))
    except Exception:  # no such package, name or copy: each version has exceptions of its own
        return None


def weights_at(name: str, revision: Optional[str] = None, commit: Optional[str] = None) -> Weights:
    """commit: of a hub's model, if the engine itself names it. Call it when the weights are read."""
    path = local(name)
    if path is None:
        here = commit_of(name, revision, refresh=True)
        if commit and here and commit != here:
            return Weights(commit, f"its configuration is of commit {commit}, and its files of {here}")
        return Weights(commit or here, "" if commit or here else "it is neither a path of this host nor of a known commit")
    begun = _begun.get(path)
    files = files_at(path, closely=begun is not None)
    if files is None or not files.kept:
        return Weights(None, "no files of it can be read" if files is None else "it has no files that are known to be weights")
    if begun is None:
        age = process_began() - files.changed
        late = age <= files.tick or (age <= _APART and not files.own_clock)
        return Weights(files.kept, "its files changed after this process began, and may have been read before" if late else "")
    same = begun[0].settled and all(one.exact == files.exact for one in begun)
    return Weights(files.kept, "" if same else "its files changed while they were read")


def process_began() -> float:
    """Seconds since 1970."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
