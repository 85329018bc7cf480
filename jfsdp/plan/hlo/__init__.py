"""A compiled program as records: instructions, how often they run, what they depend on, what they move."""
