"""Adapters: ucmd behind the engines and caches that have an interface for it. docs/engines.md has how each is started."""
