"""A run of the training script: data, options, jobs, loop, metrics."""
