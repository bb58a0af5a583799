"""The attention backend of sparse decoding, `--attention-backend CUSTOM`: the platform's own, except for tokens that a policy makes
sparse. docs/sparse.md says how to switch it on.

An engine without the setting `sparse` gets the platform's backend unchanged. With it, all dense tokens, prompts and short
requests, still go to the platform's kernels. backend_cpu.py and backend_gpu.py have the platforms' forms; SparseBackend is the one of
this platform.
"""

from __future__ import annotations

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from .backend_cpu import SparseBackend
elif current_platform.is_cuda():
    from .backend_gpu import SparseBackend
else:
    raise ImportError("sparse decoding in vLLM runs on CPUs and NVIDIA GPUs: start without --attention-backend CUSTOM")

__all__ = ["SparseBackend"]
