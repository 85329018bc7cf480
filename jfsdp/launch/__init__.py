"""How processes start, and end together: what must be said to JAX and XLA first, and who else is there."""

from jfsdp.launch.processes import initialize
from jfsdp.launch.watch import Watch, tell_and_end

__all__ = ["Watch", "initialize", "tell_and_end"]
