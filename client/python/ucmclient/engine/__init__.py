"""Adapters of ucmd for the engines and caches that have an interface for it. docs/engines.md says how to start each."""
