"""Of Mooncake's Python client, what ucmd-backend-mooncake calls, played over a directory (store.py)."""
