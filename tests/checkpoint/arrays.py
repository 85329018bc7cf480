"""A source for tests."""

import jax
import numpy as np

from jfsdp.checkpoint.source import read_whole


class Arrays:
    """Arrays in memory as a source, which notes what is read: names, slices and bytes."""

    def __init__(self, values):
        self.values, self.reads, self.most_bytes = values, [], 0
        self.arrays = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in values.items()}

    def read(self, name, index):
        self.reads.append((name, index))
        part = np.array(self.values[name][index])
        self.most_bytes = max(self.most_bytes, part.nbytes)
        return part


def arrays_of(source):
    """Read all arrays of a source."""
    return {name: read_whole(source, name) for name in source.arrays}


def assert_same_bits(one, other):
    """Assert that two dicts hold the same names, and under each the same dtype, shape and bits."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert value.tobytes() == other[name].tobytes(), name
