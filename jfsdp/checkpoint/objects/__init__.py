"""Checkpoints in an object store: writing, committing and reading."""
