"""Search options for the fastest plan that fits."""
