"""The stores of UCM (unified-cache-management), kept by the daemon: store_v1.py has its interface V1, store_v0.py the older one. docs/engines.md."""


def register() -> None:
    """Makes both known to UCM's factories under the name UcmdStore."""
    from ucm.store.factory import UcmConnectorFactory
    from ucm.store.factory_v1 import UcmConnectorFactoryV1

    UcmConnectorFactoryV1.register_connector("UcmdStore", "ucmclient.engine.ucm.store_v1", "UcmdStore")
    UcmConnectorFactory.register_connector("UcmdStore", "ucmclient.engine.ucm.store_v0", "UcmdStore")
