"""Training states and steps."""
