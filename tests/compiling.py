"""What XLA has compiled in this process, for all who build the same program."""

import collections
import gc
import io
import pathlib

# A program of a step takes some 60 maps of memory, and Linux gives a process 65,530: with 1000 programs XLA crashes.
MOST_PROGRAMS = 300
MOST_MAPS = 20_000
# Programs for GPUs are compiled to be read, and none is run. These leave them as they are, in under half of the time.
FOR_NO_GPU = {
    "xla_gpu_autotune_level": 0,  # without a GPU nothing measures which tiling is fastest
    "xla_gpu_cuda_data_dir": str(pathlib.Path(__file__).parent / "cuda"),  # nothing assembles kernels
    "xla_gpu_libnvjitlink_mode": "LIB_NV_JIT_LINK_MODE_DISABLED",  # nothing links them
}
_KEPT = collections.OrderedDict()


def compile_once():
    """Let XLA compile once per process what many tests build alike: first states, steps, references.

    Programs are the same if they are so to the letter, names of operations included, for the same devices and options.
    Compiled ones stay in memory as they are: nothing is written or loaded.
    """
    from jax._src import compiler

    compile_program, kept = compiler.compile_or_get_cached, _KEPT

    def find_or_compile(backend, module, devices, options, host_callbacks, *args):
        if host_callbacks:  # a program that calls Python calls the functions of its own test
            return compile_program(backend, module, devices, options, host_callbacks, *args)
        if backend.platform in ("cuda", "gpu"):
            options.env_option_overrides = [*options.env_option_overrides, *FOR_NO_GPU.items()]
        module.operation.write_bytecode(text := io.BytesIO())
        key = (backend, tuple(devices.flat), options.SerializeAsString(), text.getvalue())
        if key not in kept:
            kept[key] = compile_program(backend, module, devices, options, host_callbacks, *args)
            if len(kept) > MOST_PROGRAMS:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    compiler.compile_or_get_cached = find_or_compile


def free_programs():
    """Free all compiled programs, those in caches of tests too, where this process has many maps of memory."""
    import jax

    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        _KEPT.clear()
        jax.clear_caches()
        gc.collect()
