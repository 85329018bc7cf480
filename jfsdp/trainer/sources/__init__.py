"""Data sources of a run: tokens, pairs of answers, or custom data."""
