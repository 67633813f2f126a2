"""The weight path: export from the sharded trainer, node-local store, receivers."""
