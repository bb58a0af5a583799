"""The model that a path holds."""

import os

from gemma import Gemma
from model import Model, Trained


def load(path, cached):
    """A folder of train.py's, or a GGUF file of Llama's or Gemma's architecture."""
    if os.path.isdir(path):
        return Trained(path, cached)
    import gguf
    architecture = gguf.GGUFReader(path).fields["general.architecture"].contents()
    return {"llama": Model, "gemma3": Gemma}[architecture](path, cached)
