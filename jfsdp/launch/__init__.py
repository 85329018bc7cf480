"""How processes start: what must be said to JAX and XLA first."""
