"""The memory of a rank of engine.py, on the host or on a GPU, and what a connector sees of it."""

from types import SimpleNamespace

import numpy as np

from ucmclient import SharedMemory


class Tensor:
    """What a connector sees of a torch tensor."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, array, dtype=None):
        self.array, self.shape = array, array.shape
        if dtype is not None:
            self.dtype = dtype

    def data_ptr(self):
        return self.array.__array_interface__["data"][0]

    def stride(self):
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def element_size(self):
        return self.array.itemsize


class HostPages:
    """A rank's memory on the host: numpy arrays in memory that can be shared. numpy has no bfloat16: such are uint16."""

    def __init__(self, elements, dtype):
        self.dtype, kind = dtype, {"bfloat16": np.uint16}.get(dtype, dtype)
        self.memory = SharedMemory(elements * np.dtype(kind).itemsize)
        self.whole = np.frombuffer(self.memory.buffer, kind)

    def tensor(self, array):
        return Tensor(array, self.dtype)

    def forget(self):
        self.whole[:] = 0x7fc0 if self.dtype == "bfloat16" else np.nan

    def put(self, pages, at, rows):
        if self.dtype == "bfloat16":
            bits = rows.view(np.uint32)
            rows = (bits + 0x7fff + (bits >> 16 & 1)) >> 16
        pages[at] = rows

    def get(self, pages):
        return (pages.astype(np.uint32) << 16).view(np.float32) if self.dtype == "bfloat16" else pages.astype(np.float32)


class GpuPages:
    """The same on a GPU, by torch; the model still computes on the host."""

    def __init__(self, elements, dtype):
        import torch
        self.torch = torch
        self.whole = torch.empty(elements, dtype=getattr(torch, dtype), device="cuda")

    @staticmethod
    def tensor(array):
        return array

    def forget(self):
        self.whole[:] = np.nan

    def put(self, pages, at, rows):
        pages[at] = self.torch.from_numpy(rows).to(pages.device, pages.dtype)

    def get(self, pages):
        return pages.float().cpu().numpy()
