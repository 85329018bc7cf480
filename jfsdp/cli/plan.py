"""`jfsdp plan`: what training a job would do on a cluster, before it is rented."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jfsdp.cli.console import progress
from jfsdp.cli.report import GB, GIB, print_estimate, print_inference, print_plan, print_search
from jfsdp.plan.memory.peak import RESERVE_BYTES
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, File, Real, StepOptions, optional

if TYPE_CHECKING:
    from jfsdp.plan.cluster.hardware import Cluster

FITS_NOT = 3


@dataclasses.dataclass(frozen=True)
class PlanJob(StepOptions):
    """Say what training would do on GPUs that are not here: does it fit, what is sent, how long a step takes.

    Compiles the training step with the real XLA for them, which needs none. Takes the options of scripts/train.py that
    decide the step. Exit status: 0 fits, 3 does not fit, 2 bad arguments, 1 failure.
    """

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = option("none", "most used")
    """A recipe of scripts/train.py as defaults, which any other option overrides."""
    gpu: Annotated[str, tyro.conf.arg(metavar="NAME")] = option("h100", "cluster")
    """The GPU, such as h100, h200, a100-80, b200, gb200, l40s, rtx4090; an unknown name lists them all."""
    nodes: Count = option(1, "cluster")
    """How many machines."""
    gpus_per_node: Count = option(0, "cluster")
    """GPUs of each machine. 0: what is usual for this GPU."""
    network: Real = option(0.0, "cluster", least=0)
    """GB/s of a GPU's share of its machine's network adapters, one way. 0: what is usual for this GPU."""
    reserve: Real = option(RESERVE_BYTES / GIB, "cluster", least=0)
    """GiB of a GPU that the step must leave to others: CUDA, NCCL, the allocator."""
    target_config: File = option(None, "cluster")
    """A file with XLA's GpuTargetConfigProto as text, for a GPU that jfsdp does not know."""
    documents_per_row: Count = option(1, "cluster", least=1)
    """How many documents of equal length a packed row is taken to hold: for seconds alone. 1: the most attention."""
    inference: bool = option(False, "cluster")
    """Plan `jfsdp generate` in place of training: weights and cache for --batch-per-device rows of --seq-len tokens."""
    dump_hlo: File = option(None, "output")
    """Write the scheduled HLO there; `jfsdp audit` reads it."""
    timeline: File = option(None, "output")
    """Draw when the step computes, sends and waits, as PNG or SVG."""
    search: bool = option(False, "search")
    """Also change strategy, mesh, remat, batch and XLA's options, to find what fits and is predicted fastest."""
    budget: Real = option(900.0, "search", least=0)
    """Seconds that --search may take."""
    write_recipe: Annotated[str | None, optional(str, "FILE.json")] = option(None, "search")
    """With --search: write the fastest that fits as a recipe for scripts/train.py."""
    analytic: bool = option(False, "output")
    """Do not compile: state, bytes by formula and a roofline only. Works without a compiler."""
    json: bool = option(False, "output")
    """Print JSON: bytes per device, seconds per step."""

    def run(self) -> int:
        from jfsdp.plan.cluster.hardware import Cluster, find_gpu
        from jfsdp.plan.cluster.target import PlanUnavailable
        from jfsdp.plan.jobs import plan_job
        from jfsdp.plan.time.chart import plot_timeline

        gpu = find_gpu(self.gpu)
        gpu = dataclasses.replace(gpu, network_bandwidth=self.network * GB or gpu.network_bandwidth)
        cluster = Cluster(gpu, self.nodes, self.gpus_per_node)
        self._check_files()
        if self.analytic:
            return self._estimate(cluster)
        try:
            load_compiler(cluster)
        except PlanUnavailable as error:
            if self.inference:
                raise ValueError(str(error)) from error
            print(f"jfsdp: {error}\nWhat can be said without it (--analytic):", file=sys.stderr)
            self._estimate(cluster)
            return 1
        if self.inference:
            return self._inference(cluster)
        if self.search:
            return self._search(cluster)
        with failing_factory(self.factory), progress(quiet=self.json) as tell:
            plan = plan_job(self, cluster, **self._machine(), on_progress=tell)
        if self.dump_hlo:
            Path(self.dump_hlo).expanduser().write_text(plan.compiled.text)
        if self.timeline:
            plot_timeline(plan, Path(self.timeline).expanduser())
        return self._tell(plan.to_dict(), lambda: print_plan(plan), fits=plan.fits)

    def _tell(self, found: dict[str, Any], show: Callable[[], None], *, fits: bool) -> int:
        """Print what was found, as JSON or in words; return the exit status."""
        print(json.dumps(found, indent=2)) if self.json else show()
        return 0 if fits else FITS_NOT

    def _check_files(self) -> None:
        """Refuse what would be written nowhere, before anything takes time."""
        from jfsdp.plan.picture import ENDINGS

        if not self.search and self.write_recipe:
            raise ValueError("--write-recipe goes with --search")
        if (self.dump_hlo or self.timeline) and (self.search or self.analytic):
            option = "--dump-hlo" if self.dump_hlo else "--timeline"
            raise ValueError(f"{option} goes with a plan of one program: without --search and --analytic")
        if self.inference and (self.search or self.analytic or self.dump_hlo or self.timeline):
            raise ValueError("--inference is a plan by itself: without --search, --analytic, --dump-hlo and --timeline")
        if self.inference and (self.preference or self.accumulate > 1 or self.documents_per_row > 1):
            raise ValueError("--preference, --accumulate and --documents-per-row are of training, not of --inference")
        if self.target_config and self.analytic:
            raise ValueError(f"--target-config {self.target_config} is for the compiler; leave it or --analytic out")
        if self.search and self.analytic:
            raise ValueError("--search compiles, and --analytic does not; give one of them")
        suffixes = {
            "--write-recipe": (self.write_recipe, (".json",)),
            "--timeline": (self.timeline, ENDINGS),
        }
        for option, (name, known) in suffixes.items():
            if name and Path(name).suffix not in known:
                raise ValueError(f"{option} {name}: must end in {' or '.join(known)}")
        for name in (self.write_recipe, self.dump_hlo, self.timeline):
            if name and Path(name).expanduser().is_dir():
                raise ValueError(f"{name}: is a directory; name a file in it")
            if name and not Path(name).expanduser().parent.is_dir():
                raise ValueError(f"{name}: there is no directory {str(Path(name).parent)!r}")

    def _inference(self, cluster: Cluster) -> int:
        from jfsdp.plan.inference import plan_inference

        machine = {name: value for name, value in self._machine().items() if name != "documents_per_row"}
        with failing_factory(self.factory), progress(quiet=self.json) as tell:
            plan = plan_inference(self, cluster, self.batch_per_device, self.seq_len, **machine, on_progress=tell)
        return self._tell(plan.to_dict(), lambda: print_inference(plan), fits=plan.fits)

    def _search(self, cluster: Cluster) -> int:
        from jfsdp.plan.search.search import search_job
        from jfsdp.trainer.recipes import read_recipe

        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(StepOptions)}
        with failing_factory(self.factory), progress(quiet=self.json) as tell:
            search = search_job(
                StepOptions(**fields), cluster, **self._machine(), budget_s=self.budget, on_progress=tell
            )
        base = {name: value for name, value in read_recipe(self.recipe).items() if name != "recipe"}
        search = dataclasses.replace(search, base=base)
        if search.best and self.write_recipe:
            search.write_recipe(Path(self.write_recipe).expanduser())
        return self._tell(search.to_dict(), lambda: print_search(search), fits=search.best is not None)

    def _machine(self) -> dict[str, Any]:
        from jfsdp.plan.cluster.target import read_target_config

        text = read_target_config(self.target_config) if self.target_config else None
        assumed = {"reserve_bytes": self._reserve_bytes(), "documents_per_row": self.documents_per_row}
        return {"target_config": text, **assumed}

    def _reserve_bytes(self) -> int:
        return int(self.reserve * GIB)

    def _estimate(self, cluster: Cluster) -> int:
        from jfsdp.plan.jobs import bound_job

        with failing_factory(self.factory), progress(quiet=self.json) as tell:
            tell("sharding")
            bound = bound_job(self, cluster)
        estimate = bound.to_dict(cluster.gpu.memory_bytes - self._reserve_bytes())
        return self._tell(estimate, lambda: print_estimate(estimate, cluster), fits=estimate["state_fits"])


def load_compiler(cluster: Cluster) -> None:
    """Load the compiler for GPUs without the remarks that it makes where there is none.

    Raises:
      PlanUnavailable: if it is not there.
    """
    from jfsdp.launch.runtime import without_plugin_chatter
    from jfsdp.plan.cluster.target import topology_devices

    with without_plugin_chatter():
        topology_devices(cluster)


class FactoryError(Exception):
    """A user's factory or model raised; its traceback is its own."""


@contextlib.contextmanager
def failing_factory(factory: str | None) -> Iterator[None]:
    """Show the traceback of what a user's own factory raises, from its first line on, and not ours."""
    from jfsdp.plan.plan import EagerComputation

    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        if factory is None:
            raise
        origin = error.__cause__ if isinstance(error, EagerComputation) and error.__cause__ else error
        frames = traceback.extract_tb(origin.__traceback__)
        own = [place for place, frame in enumerate(frames) if "/jfsdp/" not in frame.filename]
        shown = traceback.format_list(frames[own[0] :] if own else frames)
        text = "".join([*shown, *traceback.format_exception_only(error)])
        raise FactoryError(f"factory {factory!r} failed:\n{text}") from error
