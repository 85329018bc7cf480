"""How processes start: what must be said to JAX and XLA first, and who else is there."""

from jfsdp.launch.processes import initialize

__all__ = ["initialize"]
