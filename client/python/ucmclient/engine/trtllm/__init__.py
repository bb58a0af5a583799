"""TensorRT-LLM's KV cache connector on ucmd: connector.py has its scheduler's and its worker's half. docs/engines.md."""
