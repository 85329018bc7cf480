"""Parse the names of a program's operations (`jfsdp.gather.layers`) and arguments (`state.params[...]`)."""

from __future__ import annotations

import re
from collections.abc import Container

# The scopes of `engine.engine.scoped`, each with a unit ("root" for the root unit), and the scope of the step's update,
# without one; the movements of whole matrices have the name of their first leaf. XLA joins names with a colon.
_SCOPE = re.compile(r"jfsdp\.(gather|regather|keep|reduce|update|matrices)(?:\.([^/():]+))?")


def find_scopes(op_name: str) -> list[tuple[str, str]]:
    """Return the engine's scopes in an operation's name as (verb, unit), outermost first; the update has unit ""."""
    return _SCOPE.findall(op_name)


_FIELD = re.compile(r"^(?:state\.|lent\[')(\w+)(?:'\])?(.*)$")
_KEY = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def find_argument(op_name: str, leaves: Container[str]) -> tuple[str, str]:
    """Return the state's field and the leaf of a step's argument, each "" if it has none.

    `state.opt_state[0].mu['layers']['up']['kernel'].value` is ("opt_state", "layers.up.kernel"): the leaf is the
    longest path among the last keys. With NNX, an adapter's arrays are inside the Param of its matrix:
    `['kernel'].value['lora_a']`.
    """
    found = _FIELD.match(op_name.replace("\\'", "'"))
    if found is None:
        return "", ""
    keys = ["".join(key) for key in _KEY.findall(found[2].replace(".value[", "["))]
    spelled = (".".join(keys[start:end]) for end in range(len(keys), 0, -1) for start in range(end))
    return found[1], next((name for name in spelled if name in leaves), "")


def split_names(op_name: str, num: int) -> list[str]:
    """Return the name of each array that XLA combined; JAX 0.12 writes `jit(f)/(a:b)`."""
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
