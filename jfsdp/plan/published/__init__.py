"""Runs that others have measured and published, planned as they were run, and how far plans lie from them."""
