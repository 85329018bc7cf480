"""The driver of both programs: a traced step read as calls of units, and run by a schedule."""
