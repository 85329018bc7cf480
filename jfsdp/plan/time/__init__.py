"""A program on a clock: estimates from datasheets and a few measurements."""
