"""Options of commands that open a trained model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import tyro

from jfsdp.launch.runtime import start_jax
from jfsdp.trainer.help_groups import Options, option
from jfsdp.trainer.options import Location, Mesh, Name, optional
from jfsdp.trainer.parse import read_mesh
from jfsdp.trainer.run.config import TrainConfig

if TYPE_CHECKING:
    from jfsdp.trainer.run.load_model import LoadedModel

_MODEL = tyro.conf.arg(metavar="RUN|HF_DIR", help="A run of scripts/train.py, or config.json and weights.")


@dataclasses.dataclass(frozen=True)
class OpenOptions(Options):
    """A run or a Hugging Face directory, and options to open it."""

    path: tyro.conf.Positional[Annotated[str, _MODEL]]
    adapter: Location = None
    """Directory of a PEFT adapter."""
    mesh: Mesh = option((("fsdp", -1),), read=read_mesh)
    """Number of devices of each mesh axis: fsdp=8, or tensor=4,fsdp=2. -1 takes the rest."""
    param_dtype: Annotated[str, tyro.conf.arg(metavar="DTYPE")] = "bfloat16"
    """Dtype of weights, cache and compute: bfloat16, float16 or float32."""
    model: Name = None
    """Model for Hugging Face weights. none: the first that fits."""
    step: Annotated[str, tyro.conf.arg(metavar="auto|STEP")] = "auto"
    """Checkpoint of a run. auto: the newest."""
    tokenizer: Annotated[str | None, optional(str, "byte|PATH")] = None
    """byte, or the path of a tokenizer.json or of its directory. none: the tokenizer of the run or of the directory."""
    eod_token: Name = None
    """Token of a tokenizer.json that ends a document. none: the run's, with its tokenizer, or detected."""
    chat_template: Location = None
    """File with the jinja template of conversations, or the name of one of the tokenizer's templates. none: the
    tokenizer's template."""

    def open(self) -> LoadedModel:
        """Open the model.

        Raises:
          ValueError: as `open_model`.
        """
        from jfsdp.trainer.run.load_model import open_model

        start_jax()
        given = TrainConfig(
            model=self.model, mesh=self.mesh, param_dtype=self.param_dtype, init_adapter=self.adapter, check_loss=False
        )
        named = {name: getattr(self, name) for name in ("tokenizer", "chat_template", "eod_token")}
        return open_model(self.path, given, step=self.step, **named)
