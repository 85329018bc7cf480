"""Attention over rows whose tokens are split over mesh axis `context`."""
