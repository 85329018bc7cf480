"""Steps: which program, from a batch to gradients, and what is checked on the way."""
