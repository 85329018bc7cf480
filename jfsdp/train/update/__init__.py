"""From gradients to the next state: the optimizer on the tree of the user, averages, low-precision moments."""
