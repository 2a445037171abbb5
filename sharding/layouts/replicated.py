"""Every array replicated on every device; no collectives."""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout("replicated", {})
