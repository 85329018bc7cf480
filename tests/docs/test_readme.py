"""The first screen of the README: its diff gives the same losses, and its lines fit a terminal."""

import re

import jax
import pytest

from examples import minimal
from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text()


def train(code):
    """Run one side of the diff for three batches; return the loss of each."""
    losses = []

    class Batches:
        def __iter__(self):
            for number in range(3):
                yield minimal.make_batch(number)
                losses.append(float(names["metrics"]["loss"] if "metrics" in names else names["loss"]))

    def mean(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    names = {"Model": minimal.Model, "Block": minimal.Block, "loss_fn": mean, "batches": Batches()}
    exec("import optax\nfrom flax import nnx\n" + code, names)
    return losses


def test_both_sides_of_the_diff_compute_the_same_losses():
    diff = re.search(r"```diff\n(.*?)```", README, re.S)
    assert diff
    lines = diff[1].splitlines()
    plain, sharded = ("\n".join(line[1:] for line in lines if line[:1] in (" ", "", side)) for side in "-+")
    assert len([line for line in lines if line.startswith("+")]) == 4
    with jax.default_matmul_precision("highest"):
        assert train(sharded) == pytest.approx(train(plain), rel=1e-5)


def test_the_lines_fit_a_page():
    lines = README.splitlines()
    assert len(lines) <= 140 and max(map(len, lines)) <= 100
