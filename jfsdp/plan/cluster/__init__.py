"""GPUs and clusters that are not there, devices to compile for, and what is wrong with a machine that is."""
