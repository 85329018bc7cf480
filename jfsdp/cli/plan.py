"""`jfsdp plan`: predict memory, communication and time of training on a cluster."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from jfsdp.cli.console import Reporting
from jfsdp.cli.report import (
    GB,
    GIB,
    describe_training,
    print_differences,
    print_estimate,
    print_inference,
    print_plan,
    print_search,
)
from jfsdp.compat import check_thunks
from jfsdp.launch.runtime import without_plugin_chatter
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.cluster.target import topology_devices
from jfsdp.plan.diff import differences, read_plan
from jfsdp.plan.memory.peak import RESERVE_BYTES
from jfsdp.plan.time.chart import ENDINGS, plot_timeline
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.option_errors import spell
from jfsdp.trainer.options import Count, File, Real, StepOptions, optional, step_options
from jfsdp.trainer.recipes import read_recipe, write_recipe
from jfsdp.trainer.run.config import TrainConfig

DOES_NOT_FIT = 3


@dataclasses.dataclass(frozen=True)
class PlanJob(Reporting, StepOptions):
    """Predict memory, communication and time of training on a cluster, without its GPUs.

    Compiles the training step with XLA for the cluster's GPUs.

    Takes the options of scripts/train.py that affect the step.

    Exit status: 0 fits, 3 does not fit, 2 bad arguments, 1 failure.
    """

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.toml")] = option("none", "most used")
    """Recipe of scripts/train.py with defaults. Other options override them."""
    gpu: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.toml")] = option("h100", "cluster")
    """GPU, such as h100, h200, a100-80, b200, gb200, l40s, rtx4090; an unknown name lists them all.
    A file describes another GPU (docs/plan.md)."""
    nodes: Count = option(1, "cluster", least=1)
    """Number of nodes."""
    gpus_per_node: Count = option(0, "cluster")
    """GPUs per node. 0: the usual number for this GPU."""
    network: Real = option(0.0, "cluster", least=0)
    """Network bandwidth per GPU in GB/s, in one direction. 0: the usual value for this GPU."""
    reserve: Real = option(RESERVE_BYTES / GIB, "cluster", least=0)
    """GiB of a GPU that the step must leave free, for CUDA, NCCL and the allocator."""
    documents_per_row: Count = option(1, "cluster", least=1)
    """Assumed documents per row of tokens, of equal length. Affects only seconds. 1: the most attention."""
    inference: bool = option(False, "cluster")
    """Plan `jfsdp generate` instead of training: weights and cache for --batch-per-device rows of --seq-len tokens."""
    tokens: Real = option(0.0, "training")
    """Also estimate training on this many tokens (rows, if the model has no tokens), such as 1e12. 0: do not."""
    checkpoint_every: Count = option(200, "training", least=0)
    """With --tokens: steps between checkpoints."""
    checkpoint_gbs: Real = option(2.0, "training", least=0.001)
    """With --tokens: GB/s at which a node writes checkpoints. The default is an assumption; measure your storage."""
    mtbf_hours: Real = option(0.0, "training", least=0)
    """With --tokens: mean hours between failures of one node, which end the run. 0: no failures."""
    restart_s: Real = option(300.0, "training", least=0)
    """With --mtbf-hours: seconds from a failure to the start of the new processes. Compiling and reading the checkpoint
    are added. The default is an assumption."""
    verbose: bool = option(False, "output")
    """Also print the largest buffers, the communication of each unit, and XLA's options."""
    dump_hlo: File = option(None, "output")
    """File for the scheduled HLO, for `jfsdp audit`."""
    timeline: File = option(None, "output")
    """File for a chart of compute, communication and waits, as PNG or SVG."""
    launches: bool = option(False, "output")
    """Also print what the GPU executes, in order: kernels, copies, collectives, waits and loops. Needs JAX 0.12."""
    diff: Annotated[str | None, optional(str, "OLD.json")] = option(None, "output")
    """Print only what differs from an earlier plan, a file that `jfsdp plan --json` wrote."""
    search: bool = option(False, "search")
    """Also vary strategy, mesh, remat, batch and XLA's options, to find the fastest that fits."""
    budget: Real = option(900.0, "search", least=0)
    """Limit of --search in seconds."""
    write_recipe: Annotated[str | None, optional(str, "FILE.toml")] = option(None, "output")
    """Write the options as a recipe for scripts/train.py; with --search, the fastest options that fit. FILE.json is
    written as JSON."""
    analytic: bool = option(False, "output")
    """Do not compile: print only the state, bytes by formula and a roofline."""

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

    def _print(self, found: dict[str, Any], show: Callable[[], None], *, fits: bool) -> int:
        """Print the result as JSON or text; return the exit status."""
        self.report(found, show)
        return 0 if fits else DOES_NOT_FIT

    def _check_options(self) -> None:
        """Check that options do not conflict and that files can be written, before any work.

        Raises:
          ValueError: naming the option or the file.
        """
        given = (spell(name) for name in ("dump_hlo", "timeline", "launches", "diff") if getattr(self, name))
        of_program = next(given, "")
        refused = {
            f"--tokens {self.tokens}: must be a positive number, such as 1e12": not 0 <= self.tokens < math.inf,
            "--write-recipe needs a compiled plan of training: leave --analytic and --inference out": self.write_recipe
            and (self.analytic or self.inference),
            "--tokens needs a plan of one program: leave --search, --analytic and --inference out": self.tokens
            and (self.search or self.analytic or self.inference),
            "--mtbf-hours needs a number of tokens: add --tokens": self.mtbf_hours and not self.tokens,
            "--search compiles, but --analytic does not; pass one of them": self.search and self.analytic,
            f"{of_program} needs a plan of one program: leave --search and --analytic out": of_program
            and (self.search or self.analytic),
            f"--inference plans two programs: leave {of_program or '--search and --analytic'} out": self.inference
            and (self.search or self.analytic or of_program),
            "--preference, --accumulate and --documents-per-row are for training: leave --inference out": self.inference
            and (self.preference or self.accumulate > 1 or self.documents_per_row > 1),
        }
        for message, is_refused in refused.items():
            if is_refused:
                raise ValueError(message)
        if self.launches:
            check_thunks()
        if self.diff:
            read_plan(self.diff)
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
                raise ValueError(f"{what} {name}: is a directory; pass a file in it")
            if name and not path.parent.is_dir():
                raise ValueError(f"{what} {name}: directory {str(Path(name).parent)!r} does not exist; make it")

    def _plan(self, cluster: Cluster, **more: Any) -> int:
        from jfsdp.plan.advice import advise_job
        from jfsdp.plan.jobs import plan_job
        from jfsdp.plan.search.space import recipe_of

        with self.phases() as report:
            plan = plan_job(self, cluster, **more, launches=self.launches, on_progress=report)
            report("estimating other options")
            advice, note = [], ""
            try:
                advice = advise_job(self, cluster, plan.limit_bytes, plan)
            except Exception as error:  # the plan is printed anyway
                note = f"no other options were estimated: {type(error).__name__}: {error}"
        found, outlook = plan.to_dict() | _plain(advice) | {"job": step_options(self)}, {}
        if self.tokens:
            training = plan.train(self.tokens, self.checkpoint_every, self.checkpoint_gbs * GB)
            found["training"] = dataclasses.asdict(training)
            if self.mtbf_hours:
                failures = plan.failures(training, self.mtbf_hours * 3600, self.restart_s)
                found["failures"] = failures.to_dict(self.checkpoint_every or training.steps)
            outlook = describe_training(plan, training, found.get("failures"))
        show = functools.partial(print_plan, plan, self, advice, outlook, verbose=self.verbose)
        if self.diff:
            changes = differences(read_plan(self.diff), found)
            found, show = {"differences": changes}, functools.partial(print_differences, changes)
        status = self._print(found, show, fits=plan.fits)
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

        with self.phases() as report:
            plan = plan_inference(self, cluster, self.batch_per_device, self.seq_len, reserve_bytes, on_progress=report)
        return self._print(plan.to_dict(), lambda: print_inference(plan), fits=plan.fits)

    def _base(self) -> dict[str, Any]:
        """Return the options of the recipe, including those that do not affect a plan."""
        fields = {name: value for name, value in read_recipe(self.recipe).items() if name != "recipe"}
        return fields | {"model": self.model, "factory": self.factory}

    def _write_recipe(self, fields: dict[str, Any]) -> None:
        if self.write_recipe:
            write_recipe(self.write_recipe, fields, TrainConfig)

    def _search(self, cluster: Cluster, **more: Any) -> int:
        from jfsdp.plan.search.search import search_job

        options = StepOptions(**step_options(self))
        with self.phases() as report:
            search = search_job(options, cluster, **more, budget_s=self.budget, on_progress=report)
        search = dataclasses.replace(search, base=self._base())
        if search.best:
            self._write_recipe(search.recipe())
        return self._print(search.to_dict(), lambda: print_search(search), fits=search.best is not None)

    def _estimate(self, cluster: Cluster, reserve_bytes: int) -> int:
        from jfsdp.plan.advice import advise_job
        from jfsdp.plan.jobs import bound_job

        limit_bytes = cluster.gpu.memory_bytes - reserve_bytes
        with self.phases() as report:
            report("sharding")
            bound = bound_job(self, cluster)
            advice = advise_job(self, cluster, limit_bytes, bound)
        estimate = bound.to_dict(limit_bytes) | _plain(advice)
        return self._print(estimate, lambda: print_estimate(estimate, cluster, advice), fits=estimate["state_fits"])


def _plain(advice: list[Any]) -> dict[str, Any]:
    return {"advice": [dataclasses.asdict(one) for one in advice]}
