"""How things move: gathers, reductions, remat."""
