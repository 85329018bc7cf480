"""How large a cluster may be. Imports nothing, so that arithmetic on clusters starts no JAX."""

from __future__ import annotations

__all__ = ["MOST_DEVICES", "check_number"]

MOST_DEVICES = 1 << 18  # twice the largest cluster known: below it, a mesh without devices costs seconds and 2 GiB


def check_number(what: str, num_devices: int) -> None:
    """Refuse more devices than a mesh or a plan is ever made of, before anything is made for each.

    Raises:
      ValueError: with both numbers.
    """
    if num_devices > MOST_DEVICES:
        raise ValueError(f"{what}: {num_devices:,} devices, and a mesh has at most {MOST_DEVICES:,}; lower a size")
