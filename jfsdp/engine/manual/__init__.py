"""Program `manual`: a traced step read as calls of units, and run by a schedule inside a `shard_map`."""
