"""Recipes: options of tested runs, as plain data for `scripts/train.py --recipe NAME`."""

# A small Llama on the source code of Python's standard library, on eight simulated devices: minutes on two cores.
_STDLIB = {
    "model": "llama-tiny",
    "data": "stdlib",
    "seq_len": 256,
    "batch_per_device": 1,
    "steps": 800,
    "decay_steps": 800,
    "learning_rate": 3e-3,
    "remat": "none",
    "eval_every": 200,
    "eval_batches": 32,
    "checkpoint_every": 200,
    "log_every": 10,
    "sample_tokens": 160,
    "prompt": "def ",
    "simulate_devices": 8,
}
RECIPES = {
    "stdlib": _STDLIB,
    # The same with GPT-2, a model in Flax Linen.
    "gpt2-stdlib": _STDLIB | {"model": "gpt2-tiny"},
    # Llama 3 8B from scratch on a cluster, 4M tokens per step on 64 GPUs: pass --data, --tokenizer and --run-dir.
    "llama-8b": {
        "model": "llama-8b",
        "data": "data/*.jsonl",
        "tokenizer": "tokenizer.json",
        "seq_len": 8192,
        "batch_per_device": 8,
        "accumulate": 4,
        "steps": 20_000,
        "learning_rate": 3e-4,
        "warmup": 1000,
        "skip_nonfinite": True,
        "eval_every": 500,
        "checkpoint_every": 500,
        "sample_tokens": 0,
    },
}
