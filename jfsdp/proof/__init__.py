"""Comparison of sharded training steps with training on one device, for users' own models: `jfsdp.prove`."""
