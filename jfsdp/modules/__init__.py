"""Flax models as pure functions with hooks; the only package that imports flax."""
