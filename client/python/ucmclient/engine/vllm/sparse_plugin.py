"""What vLLM calls in each of its processes, by the wheel's entry point `vllm.general_plugins`. It makes `--attention-backend CUSTOM` this
package's, which changes nothing for engines without the setting `sparse`. It also lets watching.py note what vLLM tells no connector."""

from __future__ import annotations

from . import watching

_BACKEND = "ucmclient.engine.vllm.backend.SparseBackend"


def register() -> None:
    watching.loads()
    watching.names()
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    if current_platform.is_cpu():
        # This platform has one backend and asks for no other, whatever --attention-backend says.
        register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)
