"""The sharding laboratory: layouts planned for devices that need not exist, from a model's config.json alone."""
