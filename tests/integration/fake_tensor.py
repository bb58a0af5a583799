"""Tensors of torch that only say where they lie, for checks before a launch."""

import math

SIZES = {"int32": 4, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class Device:
    def __init__(self, type, index):
        self.type, self.index = type, index

    def __eq__(self, other):
        return (self.type, self.index) == (other.type, other.index)

    def __str__(self):
        return f"{self.type}:{self.index}"


class Fake:
    """What the checks ask of a tensor of torch."""

    def __init__(self, dtype, *shape, strides=None, at=0x10000, device=("cuda", 0)):
        self.dtype, self.shape, self.at, self.device = f"torch.{dtype}", shape, at, Device(*device)
        self.size = SIZES[dtype]
        self.strides = strides or tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))

    def data_ptr(self):
        return self.at

    def element_size(self):
        return self.size

    def stride(self):
        return self.strides

    def numel(self):
        return math.prod(self.shape)

    def is_contiguous(self):
        return self.strides == tuple(math.prod(self.shape[i + 1:]) for i in range(len(self.shape)))

    def __getitem__(self, i):
        step = self.strides[0] * self.size
        return Fake(self.dtype[6:], *self.shape[1:], strides=self.strides[1:], at=self.at + i * step)

    def __len__(self):
        return self.shape[0]

    def new_empty(self, shape):
        return Fake("int32", *shape, at=0x990000)
