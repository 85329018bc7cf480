"""Start and end of a run's processes: settings of JAX and XLA, joining, watchdog, launcher."""

from jfsdp.launch.processes import initialize
from jfsdp.launch.watch import Watch, tell_and_end

__all__ = ["Watch", "initialize", "tell_and_end"]
