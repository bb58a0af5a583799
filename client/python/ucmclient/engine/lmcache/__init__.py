"""LMCache's L2 on ucmd: adapter.py is the adapter of its type "plugin". docs/engines.md."""
