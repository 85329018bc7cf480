"""A cache, per process, of the programs that XLA compiled."""

import collections
import gc
import io
import pathlib

# The program of a step has about 60 memory maps, and Linux allows a process 65,530: with 1000 programs XLA crashes.
MAX_PROGRAMS = 300
MAX_MAPS = 20_000
# Programs for GPUs are only read, never run. These options do not change them, and halve the time to compile them.
FOR_NO_GPU = {
    "xla_gpu_autotune_level": 0,  # without a GPU tilings cannot be timed
    "xla_gpu_cuda_data_dir": str(pathlib.Path(__file__).parent / "cuda"),  # kernels are not assembled
    "xla_gpu_libnvjitlink_mode": "LIB_NV_JIT_LINK_MODE_DISABLED",  # kernels are not linked
}
_KEPT = collections.OrderedDict()


def compile_once():
    """Make XLA compile each program once per process: many tests build equal states, steps and references.

    Programs are equal if their text, including names of operations, their devices and their options are equal. They
    stay in memory, and are not serialized.
    """
    from jax._src import compiler

    compile_program, kept = compiler.compile_or_get_cached, _KEPT

    def find_or_compile(backend, module, devices, options, host_callbacks, *args):
        if host_callbacks:  # a program with callbacks calls the Python functions of its test
            return compile_program(backend, module, devices, options, host_callbacks, *args)
        if backend.platform in ("cuda", "gpu"):
            options.env_option_overrides = [*options.env_option_overrides, *FOR_NO_GPU.items()]
        module.operation.write_bytecode(text := io.BytesIO())
        key = (backend, tuple(devices.flat), options.SerializeAsString(), text.getvalue())
        if key not in kept:
            kept[key] = compile_program(backend, module, devices, options, host_callbacks, *args)
            if len(kept) > MAX_PROGRAMS:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    compiler.compile_or_get_cached = find_or_compile


def free_programs():
    """Free all compiled programs, including those in caches of tests, if this process has many memory maps."""
    import jax

    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        _KEPT.clear()
        jax.clear_caches()
        gc.collect()
