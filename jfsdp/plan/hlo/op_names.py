"""Names in a program: the engine's scopes in those of operations (`jfsdp.gather.layers`), and those of arguments."""

from __future__ import annotations

import re
from collections.abc import Container

# Those of `engine.engine.scoped`, each with a unit ("root" for the root unit), and that of the step's update, which has
# none. Where XLA joins the names of several operations, a colon parts them.
_SCOPE = re.compile(r"jfsdp\.(gather|regather|keep|reduce|update)(?:\.([^/():]+))?")


def find_scopes(op_name: str) -> list[tuple[str, str]]:
    """Return the scopes in the name of an operation as (verb, unit), the outermost first; the update has unit ""."""
    return _SCOPE.findall(op_name)


_FIELD = re.compile(r"^(?:state\.|lent\[')(\w+)(?:'\])?(.*)$")
_KEY = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def find_argument(op_name: str, leaves: Container[str]) -> tuple[str, str]:
    """Return the field of the state that an argument of a step is, and the leaf that it speaks of, or "".

    `state.opt_state[0].mu['layers']['up']['kernel'].value` is ("opt_state", "layers.up.kernel"): the longest of the
    names that the last keys spell. What is no part of the state has field "". Of an adapter, NNX has the parts inside
    the Param of its matrix: `['kernel'].value['lora_a']`.
    """
    found = _FIELD.match(op_name.replace("\\'", "'"))
    if found is None:
        return "", ""
    keys = ["".join(key) for key in _KEY.findall(found[2].replace(".value[", "["))]
    spelled = (".".join(keys[start:end]) for end in range(len(keys), 0, -1) for start in range(end))
    return found[1], next((name for name in spelled if name in leaves), "")


def split_names(op_name: str, num: int) -> list[str]:
    """Return the name of each of the arrays that XLA combined; JAX 0.12 writes `jit(f)/(a:b)`."""
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
