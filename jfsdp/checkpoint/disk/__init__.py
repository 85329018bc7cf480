"""What a checkpoint is on the disk: written, committed, digested, found and read."""
