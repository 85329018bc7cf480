"""What a run will cost on a cluster: compiled without it, read from the scheduled program."""
