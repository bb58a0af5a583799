"""The part of Mooncake's Python client that ucmd-backend-mooncake calls, played over a directory (store.py)."""
