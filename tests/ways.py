"""Strategies by name: the presets, full_shard with other defaults, and states or all stages split over both axes."""

import dataclasses

from jfsdp.layout.mesh import DATA_AXES
from jfsdp.layout.strategy import NODE, STRATEGIES, Split, Strategy, get_strategy

FULL = STRATEGIES["full_shard"]
WAYS = STRATEGIES | {
    "kept": dataclasses.replace(FULL, name="kept", reshard_after_forward=False),
    "node": dataclasses.replace(FULL, name="node", reshard_after_forward=NODE),
    "hfsdp": get_strategy("full_shard", {}, DATA_AXES),
    "all": Strategy("all", Split.ALL, Split.ALL, Split.ALL),
}
