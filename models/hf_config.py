"""Reading of Hugging Face's `config.json` such that no option is silently ignored."""

import math
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any

from .checks import MAX_SIZE, is_count

# Options without effect on the logits of a prompt: bookkeeping, initialization, generation, parallelism.
NEUTRAL = frozenset(
    [
        *["_name_or_path", "architectures", "model_type", "transformers_version", "tokenizer_class"],
        *["torch_dtype", "dtype", "torchscript", "use_bfloat16", "initializer_range", "gradient_checkpointing"],
        *["use_cache", "max_position_embeddings", "pretraining_tp", "chunk_size_feed_forward"],
        *["attn_implementation", "_attn_implementation", "_attn_implementation_autoset"],
        *["bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"],
        *["return_dict", "output_hidden_states", "output_attentions"],
        *["id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"],
        *["max_length", "min_length", "do_sample", "early_stopping", "num_beams", "repetition_penalty"],
        *["temperature", "top_k", "top_p", "typical_p", "length_penalty", "num_beam_groups", "num_return_sequences"],
        # In published repositories: old names of `use_cache` and of the number of labels, and marks of writers.
        *["output_past", "num_labels", "_num_labels", "max_sequence_length", "is_llama_config"],
        *["unsloth_fixed", "unsloth_version", "transformers.js_config"],
    ]
)


class Options:
    """Options of a `config.json`, with a record of those that were read; `refuse_others` raises for the rest."""

    def __init__(self, options: Mapping[str, Any]):
        self._options = dict(options)
        self._taken: set[str] = set(NEUTRAL)
        self.architecture = str(self._options.get("model_type"))

    def take(self, name: str, default: Any = None) -> Any:
        """Return an option, or its default if it is absent."""
        self._taken.add(name)
        return self._options.get(name, default)

    def need(self, name: str) -> Any:
        """Return an option that has no default.

        Raises:
          ValueError: if it is missing.
        """
        if self._options.get(name) is None:
            raise ValueError(f"{name} is missing; a {self.architecture} needs it")
        return self.take(name)

    def count(self, name: str, default: int | None = None, *, maximum: int = MAX_SIZE) -> int:
        """Return an option that is a whole number from 1 to `maximum`. Null means absent; required without a default.

        Raises:
          ValueError: for another value, before that many parts are created.
        """
        value = self.need(name) if default is None else self.take(name)
        value = default if value is None else value
        if not is_count(value, maximum):
            raise ValueError(f"{name}={value!r} must be a whole number from 1 to {maximum:,}; fetch config.json again")
        return value  # type: ignore[return-value]

    def number(self, name: str, default: float) -> float:
        """Return an option that is a positive finite number.

        Raises:
          ValueError: for another value.
        """
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
            raise ValueError(f"{name}={value!r} must be positive and finite; fetch config.json again")
        return value  # type: ignore[return-value]

    def take_only(self, name: str, *allowed: Any) -> None:
        """Check that an option has one of the allowed values; if absent, it has the first.

        Raises:
          ValueError: naming option, value and allowed values.
        """
        value = self.take(name, allowed[0])
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
            raise refusal(name, value, allowed)

    def skip(self, names: Iterable[str]) -> None:
        """Mark options as read that have no effect on the model."""
        self._taken.update(names)

    def refuse_others(self) -> None:
        """Check that all options were read; null, false and empty ones are ignored.

        Raises:
          ValueError: naming options and values.
        """
        others = {name: value for name, value in self._options.items() if name not in self._taken and value}
        if others:
            listed = ", ".join(f"{name}={value!r}" for name, value in others.items())
            raise ValueError(
                f"options that the model does not know: {listed}; if they do not affect its results, remove them from "
                "config.json"
            )


def refusal(name: str, value: Any, allowed: Collection[Any]) -> ValueError:
    """Return the error for an option that the model does not support."""
    choices = " or ".join(map(repr, allowed))
    return ValueError(f"{name}={value!r} is not supported by the model (only {choices}); use another checkpoint")


def check_architecture(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Check that a configuration has a known architecture.

    Raises:
      ValueError: naming the architecture and the known ones.
    """
    if options.get("model_type") not in known:
        raise ValueError(
            f"model_type={options.get('model_type')!r} is another architecture than this model; use a checkpoint of "
            f"{' or '.join(known)}"
        )
