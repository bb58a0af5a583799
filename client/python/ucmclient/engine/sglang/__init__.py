"""SGLang's HiCache on ucmd: backend.py is the storage, plugin.py the host memory that the daemon reaches. docs/engines.md."""
