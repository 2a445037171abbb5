"""One file a layout, each listed in ``sharding.registry``."""
