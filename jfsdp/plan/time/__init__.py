"""Estimate the time of a program, from datasheets and a few measurements."""
