"""Compile a lowered step for a cluster that is not there, with what XLA says of its memory while it does."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jfsdp.compat import reset_compilation_cache
from jfsdp.engine.options import naming_options
from jfsdp.plan.memory.buffer_assignment import read_dump

# Without a GPU nothing measures which tiling of a matmul is fastest: XLA would compile candidates and take the first
# one that compiles. The scheduled program, its live ranges and its memory do not depend on the tiling.
_UNTUNED = {"xla_gpu_autotune_level": 0}
# Over these the process would hold gigabytes of printed constants for nothing that a plan reads.
_DUMP = {"xla_dump_hlo_as_text": True, "xla_dump_large_constants": False}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A scheduled program as text.

    Attributes:
      text: the scheduled HLO.
      live_ranges, buffers: XLA's texts of when each value lives, and where.
      memory_stats: `compiled.memory_analysis()`.
      compile_s: seconds of the compiler, without tracing and lowering.
      options: what it was compiled with.
    """

    text: str
    live_ranges: str
    buffers: str
    memory_stats: Any
    compile_s: float
    options: Mapping[str, Any]


def compile_step(lowered: Any, options: Mapping[str, Any]) -> CompiledStep:
    """Compile `step.lower(...)`. Allocates nothing on any device, and tunes no kernel unless `options` say so.

    Args:
      options: options of XLA's compiler, such as `step.compiler_options`.

    Raises:
      ValueError: if XLA refuses an option, or leaves out the texts.
      jax.errors.JaxRuntimeError: whatever else XLA cannot compile.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="jfsdp-plan-") as directory:
        with naming_options():
            compiled = lowered.compile(compiler_options={**_UNTUNED, **options, **_DUMP, "xla_dump_to": directory})
        compile_s = time.perf_counter() - begin
        text = compiled.as_text() or ""
        name = re.match(r"HloModule ([^\s,]+)", text)
        live_ranges, buffers = read_dump(directory, name[1] if name else "")
    return CompiledStep(text, live_ranges, buffers, compiled.memory_analysis(), compile_s, dict(options))


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Leave JAX's persistent compilation cache alone (`JAX_COMPILATION_CACHE_DIR`).

    JAX (0.10.2, 0.12) finds programs there that it compiled for devices which are not there, cannot load them, and
    warns. One that it could load would come without the dump that a plan reads.
    """
    is_used = (getattr(jax.config, f"jax_{name}") for name in ("enable_compilation_cache", "compilation_cache_dir"))
    if not all(is_used):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    reset_compilation_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        reset_compilation_cache()
