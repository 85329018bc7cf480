"""Where things live: pure data, no arrays, no collectives."""
