"""The maximum number of devices. Imports nothing, so that arithmetic on clusters does not start JAX."""

from __future__ import annotations

__all__ = ["MOST_DEVICES", "check_number"]

MOST_DEVICES = 1 << 18  # twice the largest known cluster; a mesh without devices up to this size takes seconds, 2 GiB


def check_number(what: str, num_devices: int) -> None:
    """Check that a mesh or a plan has at most `MOST_DEVICES` devices, before objects are made for each.

    Raises:
      ValueError: with both numbers.
    """
    if num_devices > MOST_DEVICES:
        raise ValueError(f"{what}: {num_devices:,} devices, but a mesh has at most {MOST_DEVICES:,}; lower a size")
