"""A run of the training script, from its configuration to its results on disk."""
