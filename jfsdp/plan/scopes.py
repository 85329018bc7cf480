"""The engine's scopes, as they stand in the names of a program's operations: `jfsdp.gather.layers`."""

from __future__ import annotations

import re

# Those of `engine.engine.scoped`, each with a unit ("root" for the root unit), and that of the step's update, which has
# none. Where XLA joins the names of several operations, a colon parts them.
_SCOPE = re.compile(r"jfsdp\.(gather|regather|keep|reduce|update)(?:\.([^/():]+))?")


def find_scopes(op_name: str) -> list[tuple[str, str]]:
    """Return the scopes in the name of an operation as (verb, unit), the outermost first; the update has unit ""."""
    return _SCOPE.findall(op_name)


def split_names(op_name: str, num: int) -> list[str]:
    """Return the name of each of the arrays that XLA combined; JAX 0.12 writes `jit(f)/(a:b)`. Moves no data."""
    start = op_name.find("/(")
    if start >= 0 and op_name.endswith(")"):
        names, depth = [""], 0
        for letter in op_name[start + 2 : -1]:
            depth += (letter == "(") - (letter == ")")
            if letter == ":" and not depth:
                names.append("")
            else:
                names[-1] += letter
        if len(names) == num:
            return names
    return [op_name] * num
