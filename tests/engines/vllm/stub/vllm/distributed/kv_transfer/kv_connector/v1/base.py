import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field


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


@dataclass
class KVConnectorTransferResults:
    finished_sending: set = field(default_factory=set)
    finished_recving: set = field(default_factory=set)
    failed_recving: set = field(default_factory=set)


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

    def bind_gpu_block_pool(self, gpu_block_pool):
        return None

    def get_finished(self, finished_req_ids):
        return None, None

    def get_transfer_results(self, finished_req_ids):
        sent, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(set(sent or ()), set(received or ()))

    def handle_preemptions(self, kv_connector_metadata):
        return None

    def build_connector_worker_meta(self):
        return None

    def get_block_ids_with_load_errors(self):
        return set()
