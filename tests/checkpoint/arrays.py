"""A source for tests."""

import jax
import numpy as np


class Arrays:
    """Arrays in memory as a source."""

    def __init__(self, values):
        self.values = values
        self.arrays = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in values.items()}

    def read(self, name, index):
        return np.array(self.values[name][index])
