"""From the options of the training script to plans: one, or the best of many."""
