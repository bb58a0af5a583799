"""The connector for vLLM: see connector.py, and docs/vllm.md."""
