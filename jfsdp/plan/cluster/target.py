"""Devices of an absent cluster, for which `jax.jit(...).lower(...).compile()` needs no GPU.

[Note: the plugin without a driver] JAX's CUDA plugin does not load without a driver, unless JAX_PLATFORMS excludes CUDA
or JAX_SKIP_CUDA_CONSTRAINTS_CHECK is set. It loads once per process, when JAX first uses a device. So a process that
only compiles should start with JAX_PLATFORMS=cpu. In a process without it, this module skips the check if no device was
used before. Otherwise a new process is needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jfsdp.arguments import checked
from jfsdp.extras import installed_version
from jfsdp.plan.cluster.hardware import Cluster, Gpu

_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"

# Fields of the target config that older XLAs do not know, with the first jaxlib that does. Tested: 0.10.2 refuses them,
# 0.12.0 accepts them. 0.11 was not tested, so `topology_devices` tries both forms.
FIELDS_SINCE = {"collective_memory_granularity: 2097152": (0, 11)}


class PlanUnavailable(ValueError):
    """A package for compiling for absent devices is missing or has the wrong version; the message names it."""


@checked
def topology_devices(cluster: Cluster) -> Sequence[Any]:
    """Return devices of an absent cluster, to make a mesh for compilation.

    Raises:
      PlanUnavailable: if JAX's CUDA plugin is missing, has another version than JAX, or cannot be loaded.
    """
    require_gpu_compiler()
    import jax

    topology = f"{cluster.num_domains}x{cluster.nodes_per_domain}x{cluster.gpus_per_node}"
    newest_first = dict.fromkeys([render_target_config(cluster.gpu), render_target_config(cluster.gpu, (0,))])
    for text in newest_first:
        try:
            return _describe(topology, text).devices
        except jax.errors.JaxRuntimeError as error:
            if "GpuTargetConfigProto" not in str(error):  # not an error of the parser
                raise
    raise PlanUnavailable(
        f"{cluster.gpu.name}: jaxlib {installed_version('jaxlib')} cannot parse jfsdp's description of this GPU; use a "
        "tested jaxlib (0.10.2, 0.12.0)"
    )


def render_target_config(gpu: Gpu, jaxlib_version: tuple[int, ...] | None = None) -> str:
    """Return the text of XLA's target config of a GPU, for the installed jaxlib or `jaxlib_version`."""
    version = parse_version(installed_version("jaxlib") or "0") if jaxlib_version is None else jaxlib_version
    # Since Hopper, XLA compiles for the architecture-specific variant (sm_90a), required by the newer matmuls.
    features = "ACCELERATED_FEATURES" if gpu.capability >= (9, 0) else "NONE"
    optional = [f"device_interconnect_info {{ active_links: {gpu.num_links} }}"] if gpu.num_links else []
    optional += [field for field, since in FIELDS_SINCE.items() if version >= since]
    # XLA enables features by the CUDA version in the text.
    template = Path(__file__).with_name("target.textproto").read_text(encoding="utf-8")
    return template.format(gpu=gpu, features=features, optional="".join(f"  {field}\n" for field in optional))


def require_gpu_compiler(version: Callable[[str], str | None] | None = None) -> None:
    """Check that JAX's CUDA plugin is installed in the version of jaxlib. Does not load it.

    Args:
      version: returns an installed distribution's version; by default from the running Python.

    Raises:
      PlanUnavailable: if it is not; names the installed and required versions, and the packages to install.
    """
    version = version or installed_version
    jaxlib = version("jaxlib")
    found = {name: version(name) for cuda in (12, 13) for name in _plugin(cuda)}
    for cuda in (12, 13):
        if all(found[name] and parse_version(found[name]) == parse_version(jaxlib or "") for name in _plugin(cuda)):
            return
    # Name the plugin for CUDA 13 only if just that one is installed.
    cuda = 13 if found["jax-cuda13-plugin"] and not found["jax-cuda12-plugin"] else 12
    needed = _plugin(cuda)
    has = ", ".join(f"{name} {found[name] or 'missing'}" for name in needed)
    exact = " ".join(f"'{name}=={jaxlib}'" for name in needed)
    raise PlanUnavailable(
        f"compiling for absent GPUs needs JAX's CUDA plugin in the version of jaxlib, {jaxlib}; "
        f"found {has}; `jfsdp plan --analytic` works without it; pip install {exact} nvidia-cudnn-cu{cuda}"
    )


def _plugin(cuda: int) -> tuple[str, str]:
    return f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt"


def _describe(topology: str, target_config: str) -> Any:
    from jfsdp.compat import describe_topology  # starts JAX

    # See [Note: the plugin without a driver]. With a driver, the plugin's check is useful.
    skips = not has_nvidia_driver() and _SKIP_CHECK not in os.environ
    if skips:
        os.environ[_SKIP_CHECK] = "1"
    try:
        return describe_topology(topology, target_config)
    except NotImplementedError as error:
        raise PlanUnavailable(
            f"JAX's CUDA plugin did not load in this process ({error}): JAX was used before without JAX_PLATFORMS=cpu "
            "and found no driver; start the process with JAX_PLATFORMS=cpu"
        ) from error
    finally:
        if skips:
            del os.environ[_SKIP_CHECK]


def has_nvidia_driver() -> bool:
    """Return whether this machine has an NVIDIA driver with a device. Checks files only."""
    return Path("/dev/nvidiactl").exists()


def parse_version(version: str | None) -> tuple[int, ...]:
    """Return the dotted numbers at the start of a version, which JAX compares: 0.12.0.1 is not 0.12.0."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()
