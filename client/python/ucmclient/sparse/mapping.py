"""Shared mappings: memory of the daemon in which this process reads referenced blocks by itself."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Optional, Union

from .._native import lib
from ..client import Namespace
from ..errors import check
from ..handle import _Handle, _timeout
from . import _native as native
from .sequence import BlockSequence

MISS = 1
NO_PLACE = 0xFFFFFFFF


@dataclass(frozen=True)
class Referenced:
    """places: one for each block, for SharedMapping.read; those of blocks outside the mapping are empty. The counts are of this
    call: blocks with a place, copied within DRAM, read from lower tiers, and not cached any more."""

    places: "ctypes.Array[native.Place]"
    placed: int
    moved: int
    read: int
    missing: int

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, block: int) -> Optional[native.Place]:
        """None: the block is not in the mapping."""
        place = self.places[block]
        return None if place.slab == NO_PLACE else place

    def __iter__(self) -> Iterator[Optional[native.Place]]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True)
class MappedRange:
    """Memory of the mapping: a slab, or the table of sequence numbers (slab None). wanted: call SharedMapping.release for
    it."""

    address: int
    bytes: int
    slab: Optional[int]
    wanted: bool
    opened: int


class SharedMapping(_Handle):
    """The mapping of one part of a namespace: references blocks of its sequences, and reads them without a message.

    addresses: for kernels, which read by address(). Then ranges stay until release(). ucmclient_mapping.h has the rules."""

    _free = lib.ucm_mapping_close

    def __init__(self, ns: Namespace, part: int = 0, *, addresses: bool = False, timeout: Optional[float] = None):
        super().__init__(ns.client)
        out = c_void_p()
        check(lib.ucm_mapping_open(ns.handle, part, int(addresses), _timeout(timeout), byref(out)))
        self.ns = ns
        self._handle = out.value

    def _info(self) -> native.MappingInfo:
        info = native.MappingInfo()
        check(lib.ucm_mapping_info(self.handle, byref(info)))
        return info

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's part."""
        return self._info().part_bytes

    @property
    def budget(self) -> int:
        """The daemon's mapping.size when the mapping was opened, for all tenants."""
        return self._info().budget

    @property
    def opened(self) -> int:
        """Counts openings: a reconnect makes another one, and ends all places. 0: it is not open now."""
        return self._info().opened

    def ref(
        self,
        sequence: BlockSequence,
        first: int = 0,
        n: Optional[int] = None,
        *,
        priority: int = 0,
        daemon_timeout: float = 0.0,
        timeout: Optional[float] = None,
    ) -> Referenced:
        """Brings n blocks of the sequence into the mapping and keeps them there; n None: all from `first` on."""
        count = len(sequence) - first if n is None else n
        places = (native.Place * max(count, 0))()
        ref = native.MappingRef(
            sequence.handle, first, max(count, 0), priority, _timeout(daemon_timeout), ctypes.addressof(places)
        )
        result = native.MappingReferenced()
        check(lib.ucm_mapping_ref(self.handle, byref(ref), _timeout(timeout), byref(result)))
        return Referenced(places, result.placed, result.moved, result.read, result.missing)

    def unref(
        self, sequence: BlockSequence, first: int = 0, n: Optional[int] = None, *, timeout: Optional[float] = None
    ) -> None:
        """n None: all blocks from `first` on."""
        count = NO_PLACE if n is None else n
        check(lib.ucm_mapping_unref(self.handle, sequence.handle, first, count, _timeout(timeout)))

    def read(
        self, place: Optional[native.Place], offset: int = 0, size: Optional[int] = None
    ) -> Union[bytearray, None]:
        """The block's bytes, `size` of them from `offset` on; None: they are not there any more, a miss."""
        if place is None:
            return None
        out = bytearray(self.block_bytes - offset if size is None else size)
        view = (ctypes.c_char * len(out)).from_buffer(out)
        rc = check(lib.ucm_mapping_read(self.handle, byref(place), offset, len(out), view))
        return None if rc == MISS else out

    def address(self, place: native.Place) -> Optional[tuple[int, int]]:
        """Where the block's bytes and its sequence number lie, for a kernel; None: a miss."""
        where, seq = c_void_p(), c_void_p()
        rc = check(lib.ucm_mapping_address(self.handle, byref(place), byref(where), byref(seq)))
        return None if rc == MISS else (where.value or 0, seq.value or 0)

    def ranges(self) -> list[MappedRange]:
        room, n = 16, c_uint32()
        while True:
            out = (native.MappedRange * room)()
            check(lib.ucm_mapping_ranges(self.handle, out, room, byref(n)))
            if n.value <= room:
                break
            room = n.value
        return [
            MappedRange(m.address, m.bytes, None if m.slab == NO_PLACE else m.slab, bool(m.wanted), m.opened)
            for m in out[: n.value]
        ]

    def release(self, mapped: MappedRange) -> None:
        """Unmaps it. No kernel may still read from it."""
        check(lib.ucm_mapping_release(self.handle, mapped.address))
