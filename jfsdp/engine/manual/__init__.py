"""The driver of both programs: a traced step read as calls of units, and run by a schedule. Program `manual` runs it
inside a `shard_map`: collectives.py and engine.py are its own."""
