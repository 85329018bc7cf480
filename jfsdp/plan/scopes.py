"""The engine's scopes, as they stand in the names of a program's operations: `jfsdp.gather.layers`."""

from __future__ import annotations

import re

# Those of `engine.engine.scoped`, each with a unit ("root" for the root unit), and that of the step's update, which has
# none. Where XLA joins the names of several operations, a colon parts them.
_SCOPE = re.compile(r"jfsdp\.(gather|regather|keep|reduce|update)(?:\.([^/():]+))?")


def find_scopes(op_name: str) -> list[tuple[str, str]]:
    """Return the scopes in the name of an operation as (verb, unit), the outermost first; the update has unit ""."""
    return _SCOPE.findall(op_name)
