"""Compile a lowered step for absent devices, and read XLA's memory dump."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from jfsdp.compat import read_thunks, using_cache
from jfsdp.engine.options import naming_options
from jfsdp.plan.memory.buffer_assignment import read_dump

# Without a GPU XLA cannot measure the fastest tiling of a matmul: it would compile candidates and use the first that
# compiles. The scheduled program, its live ranges and its memory do not depend on the tiling.
_UNTUNED = {"xla_gpu_autotune_level": 0}
# Plans do not read large constants, and their text takes gigabytes of host memory.
_DUMP = {"xla_dump_hlo_as_text": True, "xla_dump_large_constants": False}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A scheduled program as text.

    Attributes:
      text: the scheduled HLO.
      live_ranges, buffers: XLA's texts of live ranges and of buffer assignment.
      memory_stats: `compiled.memory_analysis()`.
      compile_s: seconds of the compiler, without tracing and lowering.
      options: compiler options.
      thunks: from `compat.read_thunks`; None if not requested.
    """

    text: str
    live_ranges: str
    buffers: str
    memory_stats: Any
    compile_s: float
    options: Mapping[str, Any]
    thunks: Any = None


def compile_step(lowered: Any, options: Mapping[str, Any], *, with_thunks: bool = False) -> CompiledStep:
    """Compile `step.lower(...)`. Allocates nothing on any device, and tunes no kernels unless `options` says so.

    Args:
      options: options of XLA's compiler, such as `step.compiler_options`.
      with_thunks: also return the thunks, which needs JAX 0.12.

    Raises:
      ValueError: if XLA refuses an option, or does not write the texts.
      jax.errors.JaxRuntimeError: for other errors of XLA.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="jfsdp-plan-") as directory:
        with naming_options():
            compiled = lowered.compile(compiler_options={**_UNTUNED, **options, **_DUMP, "xla_dump_to": directory})
        compile_s = time.perf_counter() - begin
        text = compiled.as_text() or ""
        name = re.match(r"HloModule ([^\s,]+)", text)
        live_ranges, buffers = read_dump(directory, name[1] if name else "")
        thunks = read_thunks(compiled) if with_thunks else None
    return CompiledStep(text, live_ranges, buffers, compiled.memory_analysis(), compile_s, dict(options), thunks)


def without_cache() -> contextlib.AbstractContextManager[None]:
    """Disable JAX's persistent compilation cache (`JAX_COMPILATION_CACHE_DIR`).

    JAX (0.10.2, 0.12) cannot load cached programs for absent devices, and warns. A program from the cache would also
    lack the dump that a plan reads.
    """
    return using_cache(jax_enable_compilation_cache=False)
