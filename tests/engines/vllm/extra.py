"""kv_connector_extra_config of settings by name: each where the connector wants it."""

from ucmclient.engine.vllm.settings import kinds


def extra_of(settings):
    advanced = {name: value for name, value in settings.items() if kinds().get(name) == "advanced"}
    plain = {name: value for name, value in settings.items() if name not in advanced}
    return {**plain, "advanced": advanced} if advanced else plain
