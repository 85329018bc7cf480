"""`jfsdp models`: which jobs installed packages offer."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Models:
    """List the models that installed packages offer by name (entry-point group jfsdp.jobs)."""

    def run(self) -> int:
        from jfsdp.trainer.job import job_names

        names = job_names()
        print("\n".join(names) if names else "no installed package offers a model; use --factory module:function")
        return 0
