"""One run of the training script: from its configuration to its results on disk."""

from jfsdp.extras import need

need("train")
