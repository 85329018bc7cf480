"""Peak memory of a program by category."""
