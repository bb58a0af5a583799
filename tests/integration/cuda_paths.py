"""For the tests of what runs on a GPU: where ucmclient and its examples are found; torch, or None; and whether it has a GPU. Import it
before ucmclient."""

import os
import pathlib
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "client/python/examples"), str(TOP / "client/python")]
if (TOP / "build/libucmclient.so").exists():
    os.environ.setdefault("UCMCLIENT_LIB", str(TOP / "build/libucmclient.so"))

try:
    import torch
except ImportError:
    torch = None
GPU = torch is not None and torch.cuda.is_available()
