import enum
from abc import ABC, abstractmethod


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):
    pass


class KVConnectorHandshakeMetadata(ABC):
    pass


class KVConnectorWorkerMetadata(ABC):
    @abstractmethod
    def aggregate(self, other):
        pass


class SupportsHMA(ABC):
    pass


class KVConnectorBase_V1(ABC):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        self._connector_metadata = None
        self._role = role

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata

    def get_handshake_metadata(self):
        return None

    def set_xfer_handshake_metadata(self, metadata):
        return None

    def handle_preemptions(self, kv_connector_metadata):
        return None

    def build_connector_worker_meta(self):
        return None

    def get_block_ids_with_load_errors(self):
        return set()
