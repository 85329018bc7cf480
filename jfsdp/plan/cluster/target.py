"""Devices of a cluster that is not there, to compile for: `jax.jit(...).lower(...).compile()` on them needs no GPU.

[Note: the plugin without a driver] JAX's CUDA plugin looks for a driver when it is loaded, and refuses to load without
one unless JAX_PLATFORMS leaves CUDA out or JAX_SKIP_CUDA_CONSTRAINTS_CHECK is set. Loading happens once in a process,
at JAX's first use of a device. So a process that will only compile should start with JAX_PLATFORMS=cpu. In one that did
not, and has used no device yet, the check is skipped here for a moment; in one that has, only a new process helps.
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

# Fields of the target config that older XLAs do not know, with the first jaxlib that does. Seen: 0.10.2 refuses them
# and 0.12.0 takes them; of 0.11, which lies between, nothing was tried, so there it is the parser that decides.
FIELDS_SINCE = {"collective_memory_granularity: 2097152": (0, 11)}


class PlanUnavailable(ValueError):
    """What compiling for absent devices needs is missing, or of another version; the message says what to install."""


@checked
def topology_devices(cluster: Cluster) -> Sequence[Any]:
    """Return the devices of a cluster nobody has rented, to make a mesh of.

    Raises:
      PlanUnavailable: if JAX's CUDA plugin is missing, of another version than JAX, or could not be loaded.
    """
    require_gpu_compiler()
    import jax

    topology = f"{cluster.num_domains}x{cluster.nodes_per_domain}x{cluster.gpus_per_node}"
    newest_first = dict.fromkeys([render_target_config(cluster.gpu), render_target_config(cluster.gpu, (0,))])
    for text in newest_first:
        try:
            return _describe(topology, text).devices
        except jax.errors.JaxRuntimeError as error:
            if "GpuTargetConfigProto" not in str(error):  # it was parsed
                raise
    raise PlanUnavailable(
        f"{cluster.gpu.name}: jaxlib {installed_version('jaxlib')} does not take our description of this GPU; use a "
        "jaxlib that was tried (0.10.2, 0.12.0)"
    )


def render_target_config(gpu: Gpu, jaxlib_version: tuple[int, ...] | None = None) -> str:
    """Return XLA's description of a GPU, as text, for the installed jaxlib or for another version of it."""
    version = parse_version(installed_version("jaxlib") or "0") if jaxlib_version is None else jaxlib_version
    # From Hopper on, XLA compiles for the architecture's own variant (sm_90a), which alone has the newer matmuls.
    features = "ACCELERATED_FEATURES" if gpu.capability >= (9, 0) else "NONE"
    optional = [f"device_interconnect_info {{ active_links: {gpu.num_links} }}"] if gpu.num_links else []
    optional += [field for field, since in FIELDS_SINCE.items() if version >= since]
    # The text names a CUDA too: the features that XLA turns on go by it.
    template = Path(__file__).with_name("target.textproto").read_text(encoding="utf-8")
    return template.format(gpu=gpu, features=features, optional="".join(f"  {field}\n" for field in optional))


def require_gpu_compiler(version: Callable[[str], str | None] | None = None) -> None:
    """Check that JAX's CUDA plugin is there and of the version of jaxlib; starts nothing.

    Args:
      version: finds an installed distribution's version; by default the running Python's.

    Raises:
      PlanUnavailable: if it is not; names the versions found, those needed, and what to install.
    """
    version = version or installed_version
    jaxlib = version("jaxlib")
    found = {name: version(name) for cuda in (12, 13) for name in _plugin(cuda)}
    for cuda in (12, 13):
        if all(found[name] and parse_version(found[name]) == parse_version(jaxlib or "") for name in _plugin(cuda)):
            return
    # Which CUDA somebody meant shows in what they have.
    cuda = 13 if found["jax-cuda13-plugin"] and not found["jax-cuda12-plugin"] else 12
    needed = _plugin(cuda)
    has = ", ".join(f"{name} {found[name] or 'missing'}" for name in needed)
    exact = " ".join(f"'{name}=={jaxlib}'" for name in needed)
    raise PlanUnavailable(
        f"compiling for GPUs that are not there needs JAX's CUDA plugin in the version of jaxlib, {jaxlib}; "
        f"found {has}; `jfsdp plan --analytic` needs none; pip install {exact} nvidia-cudnn-cu{cuda}"
    )


def _plugin(cuda: int) -> tuple[str, str]:
    return f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt"


def _describe(topology: str, target_config: str) -> Any:
    from jfsdp.compat import describe_topology  # starts JAX

    # See [Note: the plugin without a driver]. With a driver, the plugin's check is the user's friend.
    skips = not has_nvidia_driver() and _SKIP_CHECK not in os.environ
    if skips:
        os.environ[_SKIP_CHECK] = "1"
    try:
        return describe_topology(topology, target_config)
    except NotImplementedError as error:
        raise PlanUnavailable(
            f"JAX's plugin for cuda did not load in this process ({error}): JAX was used here before, "
            "without JAX_PLATFORMS=cpu, and found no driver; start the process with JAX_PLATFORMS=cpu"
        ) from error
    finally:
        if skips:
            del os.environ[_SKIP_CHECK]


def has_nvidia_driver() -> bool:
    """Return whether this machine has an NVIDIA driver with a device; looks at files only."""
    return Path("/dev/nvidiactl").exists()


def parse_version(version: str | None) -> tuple[int, ...]:
    """Return the dotted numbers at a version's start, as JAX compares them: 0.12.0.1 is not 0.12.0."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()
