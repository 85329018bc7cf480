"""`jfsdp plan`: what training a job would do on a cluster, before it is rented."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from jfsdp.cli.console import progress
from jfsdp.cli.report import GB, GIB, print_estimate, print_inference, print_plan, print_search
from jfsdp.launch.runtime import without_plugin_chatter
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.cluster.target import topology_devices
from jfsdp.plan.memory.peak import RESERVE_BYTES
from jfsdp.plan.time.chart import ENDINGS, plot_timeline
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, File, Real, StepOptions, optional
from jfsdp.trainer.recipes import read_recipe, write_recipe
from jfsdp.trainer.run.config import TrainConfig

FITS_NOT = 3


@dataclasses.dataclass(frozen=True)
class PlanJob(StepOptions):
    """Say what training would do on GPUs that are not here: does it fit, what is sent, how long a step takes.

    Compiles the training step with the real XLA for them, which needs none. Takes the options of scripts/train.py that
    decide the step. Exit status: 0 fits, 3 does not fit, 2 bad arguments, 1 failure.
    """

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.toml")] = option("none", "most used")
    """A recipe of scripts/train.py as defaults, which any other option overrides."""
    gpu: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.toml")] = option("h100", "cluster")
    """The GPU, such as h100, h200, a100-80, b200, gb200, l40s, rtx4090; an unknown name lists them all.
    A file describes one that is not among them (docs/plan.md)."""
    nodes: Count = option(1, "cluster", least=1)
    """How many machines."""
    gpus_per_node: Count = option(0, "cluster")
    """GPUs of each machine. 0: what is usual for this GPU."""
    network: Real = option(0.0, "cluster", least=0)
    """GB/s of a GPU's share of its machine's network adapters, one way. 0: what is usual for this GPU."""
    reserve: Real = option(RESERVE_BYTES / GIB, "cluster", least=0)
    """GiB of a GPU that the step must leave to others: CUDA, NCCL, the allocator."""
    documents_per_row: Count = option(1, "cluster", least=1)
    """How many documents of equal length a row of tokens is taken to hold: for seconds alone. 1: the most attention."""
    inference: bool = option(False, "cluster")
    """Plan `jfsdp generate` in place of training: weights and cache for --batch-per-device rows of --seq-len tokens."""
    tokens: Real = option(0.0, "training")
    """Also estimate the training on this many tokens (rows, if the model has no tokens): 1e12. 0: do not."""
    checkpoint_every: Count = option(200, "training", least=0)
    """With --tokens: steps between checkpoints."""
    checkpoint_bandwidth: Real = option(2.0, "training", least=0.001)
    """With --tokens: GB/s at which one node writes a checkpoint. The default is assumed; measure yours."""
    verbose: bool = option(False, "output")
    """Also print the largest buffers, the communication of each unit, and XLA's options."""
    dump_hlo: File = option(None, "output")
    """Write the scheduled HLO there; `jfsdp audit` reads it."""
    timeline: File = option(None, "output")
    """Draw when the step computes, sends and waits, as PNG or SVG."""
    search: bool = option(False, "search")
    """Also change strategy, mesh, remat, batch and XLA's options, to find what fits and is predicted fastest."""
    budget: Real = option(900.0, "search", least=0)
    """Seconds that --search may take."""
    write_recipe: Annotated[str | None, optional(str, "FILE.toml")] = option(None, "output")
    """Write the options as a recipe for scripts/train.py; with --search those of the fastest that fits. FILE.json
    writes JSON."""
    analytic: bool = option(False, "output")
    """Do not compile: state, bytes by formula and a roofline only. Works without a compiler."""
    json: bool = option(False, "output")
    """Print JSON: bytes per device, seconds per step."""

    def run(self) -> int:
        gpu = find_gpu(self.gpu)
        gpu = dataclasses.replace(gpu, network_bandwidth=self.network * GB or gpu.network_bandwidth)
        cluster, reserve_bytes = Cluster(gpu, self.nodes, self.gpus_per_node), int(self.reserve * GIB)
        self._check_options()
        if self.analytic:
            return self._estimate(cluster, reserve_bytes)
        with without_plugin_chatter():
            topology_devices(cluster)
        if self.inference:
            return self._inference(cluster, reserve_bytes)
        return (self._search if self.search else self._plan)(
            cluster, reserve_bytes=reserve_bytes, documents_per_row=self.documents_per_row
        )

    def _tell(self, found: dict[str, Any], show: Callable[[], None], *, fits: bool) -> int:
        """Print what was found, as JSON or in words; return the exit status."""
        print(json.dumps(found, indent=2)) if self.json else show()
        return 0 if fits else FITS_NOT

    def _check_options(self) -> None:
        """Refuse options that contradict each other, and files that cannot be written, before anything takes time."""
        of_program = "--dump-hlo" if self.dump_hlo else "--timeline" if self.timeline else ""
        refused = {
            f"--tokens {self.tokens}: must be a positive number, such as 1e12": not 0 <= self.tokens < math.inf,
            "--write-recipe goes with a compiled plan: without --analytic and --inference": self.write_recipe
            and (self.analytic or self.inference),
            "--tokens goes with a plan of one program: without --search, --analytic and --inference": self.tokens
            and (self.search or self.analytic or self.inference),
            "--search compiles, and --analytic does not; give one of them": self.search and self.analytic,
            f"{of_program} goes with a plan of one program: without --search and --analytic": of_program
            and (self.search or self.analytic),
            "--inference is a plan by itself: without --search, --analytic, --dump-hlo and --timeline": self.inference
            and (self.search or self.analytic or of_program),
            "--preference, --accumulate and --documents-per-row are of training, not of --inference": self.inference
            and (self.preference or self.accumulate > 1 or self.documents_per_row > 1),
        }
        for message, is_refused in refused.items():
            if is_refused:
                raise ValueError(message)
        written = {
            "--write-recipe": (self.write_recipe, (".toml", ".json")),
            "--timeline": (self.timeline, ENDINGS),
            "--dump-hlo": (self.dump_hlo, ()),
        }
        for what, (name, endings) in written.items():
            path = Path(name or "x").expanduser()
            if name and endings and path.suffix not in endings:
                raise ValueError(f"{what} {name}: must end in {' or '.join(endings)}")
            if name and path.is_dir():
                raise ValueError(f"{name}: is a directory; name a file in it")
            if name and not path.parent.is_dir():
                raise ValueError(f"{name}: there is no directory {str(Path(name).parent)!r}")

    def _plan(self, cluster: Cluster, **more: Any) -> int:
        from jfsdp.plan.advice import advise_job
        from jfsdp.plan.jobs import plan_job
        from jfsdp.plan.search.space import recipe_of

        with progress(quiet=self.json) as tell:
            plan = plan_job(self, cluster, **more, on_progress=tell)
            tell("estimating other options")
            advice, note = [], ""
            try:
                advice = advise_job(self, cluster, plan.limit_bytes, plan)
            except Exception as error:  # a plan was made, and is printed
                note = f"no other options were estimated: {type(error).__name__}: {error}"
        rate = self.checkpoint_bandwidth * GB
        training = plan.train(self.tokens, self.checkpoint_every, rate) if self.tokens else None
        found = plan.to_dict() | _plain(advice) | ({"training": dataclasses.asdict(training)} if training else {})
        status = self._tell(found, lambda: print_plan(plan, advice, training, verbose=self.verbose), fits=plan.fits)
        if note:
            print(f"note: {note}", file=sys.stderr)
        if self.dump_hlo:
            Path(self.dump_hlo).expanduser().write_text(plan.compiled.text)
        if self.timeline:
            plot_timeline(plan, Path(self.timeline).expanduser())
        self._write_recipe(recipe_of(self, self._base()))
        return status

    def _inference(self, cluster: Cluster, reserve_bytes: int) -> int:
        from jfsdp.plan.inference import plan_inference

        with progress(quiet=self.json) as tell:
            plan = plan_inference(self, cluster, self.batch_per_device, self.seq_len, reserve_bytes, on_progress=tell)
        return self._tell(plan.to_dict(), lambda: print_inference(plan), fits=plan.fits)

    def _base(self) -> dict[str, Any]:
        """Return the options of the given recipe, also those that no plan depends on."""
        fields = {name: value for name, value in read_recipe(self.recipe).items() if name != "recipe"}
        return fields | {"model": self.model, "factory": self.factory}

    def _write_recipe(self, fields: dict[str, Any]) -> None:
        if self.write_recipe:
            write_recipe(self.write_recipe, fields, TrainConfig)

    def _search(self, cluster: Cluster, **more: Any) -> int:
        from jfsdp.plan.search.search import search_job

        options = StepOptions(**{field.name: getattr(self, field.name) for field in dataclasses.fields(StepOptions)})
        with progress(quiet=self.json) as tell:
            search = search_job(options, cluster, **more, budget_s=self.budget, on_progress=tell)
        search = dataclasses.replace(search, base=self._base())
        if search.best:
            self._write_recipe(search.recipe())
        return self._tell(search.to_dict(), lambda: print_search(search), fits=search.best is not None)

    def _estimate(self, cluster: Cluster, reserve_bytes: int) -> int:
        from jfsdp.plan.advice import advise_job
        from jfsdp.plan.jobs import bound_job

        limit_bytes = cluster.gpu.memory_bytes - reserve_bytes
        with progress(quiet=self.json) as tell:
            tell("sharding")
            bound = bound_job(self, cluster)
            advice = advise_job(self, cluster, limit_bytes, bound)
        estimate = bound.to_dict(limit_bytes) | _plain(advice)
        return self._tell(estimate, lambda: print_estimate(estimate, cluster, advice), fits=estimate["state_fits"])


def _plain(advice: list[Any]) -> dict[str, Any]:
    return {"advice": [dataclasses.asdict(one) for one in advice]}
