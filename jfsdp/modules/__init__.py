"""Flax models as pure functions with hooks; the only room that imports flax."""
