"""The checkpoint format on disk: writing, committing, digests, finding and reading."""
