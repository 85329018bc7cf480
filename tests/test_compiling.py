"""Programs that compile_once lets XLA compile once are the same to the letter."""

import jax
import jax.numpy as jnp
import numpy as np


def compiled(scope, scale):
    def run(x):
        with jax.named_scope(scope):
            return x * scale

    return jax.jit(run).lower(jnp.ones(3)).compile().runtime_executable()


def test_a_program_is_compiled_once_and_another_name_or_number_makes_another():
    first = compiled("a", 2.0)
    assert compiled("a", 2.0) is first
    assert compiled("b", 2.0) is not first
    assert compiled("a", 3.0) is not first


def test_a_program_that_calls_python_calls_its_own_function():
    def calling(value):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return float(jax.jit(lambda: jax.pure_callback(lambda: np.float32(value), shape))())

    assert [calling(1.0), calling(2.0)] == [1.0, 2.0]
