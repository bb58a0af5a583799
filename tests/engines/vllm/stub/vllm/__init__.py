"""As much of vLLM as its connectors import, for machines without it: names and defaults as in vLLM 0.33."""
