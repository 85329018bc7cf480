"""Damage: a flipped bit, a cut or a missing file of a checkpoint is told by the file's name, and never restored."""

import functools
import random
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.checkpoint.disk.digest import list_files, read_digests, write_digests
from jfsdp.checkpoint.disk.files import SUMS, DamagedError
from jfsdp.checkpoint.verify import verify
from tests.refusals import refuses, warning
from tests.sharding import fully_shard

TX = optax.adam(1e-3)
KINDS = ("flip", "truncate", "delete")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (40, 33)))
        self.bias = nnx.Param(jax.random.normal(rngs.params(), (7,)))


@functools.cache
def model() -> jfsdp.ShardedModel:
    return fully_shard(Net, mesh=jfsdp.make_mesh(), min_size=8)


@functools.cache
def state_of(step: int) -> jfsdp.TrainState:
    state = model().init(TX, seed=step)
    return jfsdp.TrainState(**{**vars(state), "step": state.step + step})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Any:
    """A run of the steps 1, 2 and 3, with everything that may stand beside the arrays."""
    with_steps = jfsdp.checkpoint.Checkpointer(tmp_path_factory.mktemp("damage") / "run")
    for step in (1, 2, 3):
        with_steps.save(step, state_of(step), {"data": step}, config={"lr": 1e-3}, metrics={"loss": 0.5})
    with_steps.wait()
    yield with_steps
    with_steps.close()


def damages(files: list[str], num: int, seed: int) -> list[tuple[str, str, float, int]]:
    """Choose what to do to which file, and where: every file in turn, in random order."""
    rng = random.Random(seed)
    order = [name for _ in range(-(-num // len(files))) for name in rng.sample(files, len(files))]
    return [(name, rng.choice(KINDS), rng.random(), rng.randrange(8)) for name in order[:num]]


def damage(file: Any, kind: str, where: float, bit: int) -> None:
    data = bytearray(file.read_bytes())
    place = int(where * len(data))
    if kind == "delete":
        file.unlink()
    elif kind == "truncate":
        file.write_bytes(data[:place])
    else:
        data[place] ^= 1 << bit
        file.write_bytes(data)


def problems_of(path: Path) -> list[str]:
    return list(verify(path).problems)


def check_refused(run: Any, name: str, *how: Any) -> None:
    path = run.directory / "3"
    whole = (path / name).read_bytes()
    damage(path / name, *how)
    try:
        (problem,) = problems_of(path)
        assert name in problem
        one = functools.partial(jfsdp.checkpoint.restore, path, like=state_of(1))
        refuses(one, f"checkpoint {path}: is damaged: ", name, error=DamagedError)
        refuses(lambda: run.restore(state_of(1)), name, error=DamagedError)
        with warning(name, "Falling back to step 2"):
            state, extra = run.restore(state_of(1), fall_back=True)
        assert (int(state.step), extra) == (2, {"data": 2})
        np.testing.assert_array_equal(state.params["weight"], state_of(2).params["weight"])
    finally:
        (path / name).write_bytes(whole)
    assert problems_of(path) == []


def check_all(run: Any, num: int, seed: int) -> None:
    files = [*list_files(run.directory / "3"), SUMS]
    assert not [name for name in files if not (run.directory / "3" / name).stat().st_size]
    chosen = damages(files, num, seed)
    assert {name for name, *_ in chosen} == set(files)
    for name, *how in chosen:
        check_refused(run, name, *how)
    assert int(run.restore(state_of(1))[0].step) == 3, "undamaged again"


def test_a_damage_of_each_file_is_named_and_refused(run):
    check_all(run, num=len(list_files(run.directory / "3")) + 1, seed=0)


@pytest.mark.proof
def test_each_of_a_thousand_damages_is_named_and_refused(run):
    check_all(run, num=1000, seed=1)


def test_a_manifest_that_still_reads_well_is_refused_all_the_same(run):
    """One digit or letter: the format, a name, a shape, a dtype; not mistaken for another model or a newer version."""
    file = run.directory / "3" / "manifest.json"
    whole = file.read_text()
    for old in ('"format": 2', "params.bias", "40"):
        file.write_text(whole.replace(old, old[:-1] + chr(ord(old[-1]) ^ 1), 1))
        assert file.read_text() != whole
        fact = "manifest.json has changed since it was written"
        refuses(lambda: jfsdp.checkpoint.restore(file.parent, like=state_of(1)), fact, error=DamagedError)
        with pytest.warns(UserWarning, match="Falling back to step 2"):
            assert int(run.restore(state_of(1), fall_back=True)[0].step) == 2
    file.write_text(whole)


def test_a_digest_of_a_file_outside_is_refused(run, tmp_path):
    shutil.copytree(run.directory / "3", tmp_path / "c")
    digests = read_digests(tmp_path / "c")
    write_digests(tmp_path / "c", digests | {"../secret": "0" * 64})
    refuses(lambda: jfsdp.checkpoint.restore(tmp_path / "c", like=state_of(1)), "'../secret'")


def test_falling_back_goes_on_to_the_newest_whole_step(run, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(run.directory, directory, ignore=shutil.ignore_patterns("lock"))
    (directory / "3" / SUMS).unlink()
    (directory / "2" / "layout.json").write_text("{}")
    other = jfsdp.checkpoint.Checkpointer(directory)
    with pytest.warns(UserWarning, match="Falling back to step") as told:
        state, extra = other.restore(state_of(1), fall_back=True)
    assert (int(state.step), extra, len(told)) == (1, {"data": 1}, 2)
    assert {warning.filename for warning in told} == {__file__}
    shutil.rmtree(directory / "1" / "arrays")
    with (
        pytest.warns(UserWarning, match="Falling back to step"),
        pytest.raises(DamagedError, match="/1: is damaged: arrays/"),
    ):
        other.restore(state_of(1), fall_back=True)


def test_a_step_that_lost_all_its_files_is_damaged(run, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(run.directory, directory, ignore=shutil.ignore_patterns("lock"))
    shutil.rmtree(directory / "3")
    (directory / "3").mkdir()
    assert problems_of(directory / "3") and not problems_of(directory / "2")
    other = jfsdp.checkpoint.Checkpointer(directory)
    refuses(lambda: other.restore(state_of(1)), "/3", "damaged", "empty", error=DamagedError)
    with pytest.warns(UserWarning, match="Falling back to step 2"):
        assert int(other.restore(state_of(1), fall_back=True)[0].step) == 2


def test_falling_back_is_no_answer_to_another_model(run):
    other = fully_shard(lambda rngs: nnx.Linear(3, 3, rngs=rngs)).abstract_state(TX)
    refuses(lambda: run.restore(other, fall_back=True), "another model or optimizer")


def test_who_reads_parameters_alone_is_not_stopped_by_damage_elsewhere(run):
    """Each part of a state has its own files; what is not read is not checked."""
    path = run.directory / "3"
    moments = max((path / "arrays" / "opt_state").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    whole = moments.read_bytes()
    damage(moments, "flip", 0.5, 3)
    try:
        state = jfsdp.checkpoint.restore(path, like=state_of(1), only="params")
        np.testing.assert_array_equal(state.params["weight"], state_of(3).params["weight"])
        with pytest.raises(DamagedError, match="arrays/opt_state/"):
            jfsdp.checkpoint.restore(path, like=state_of(1), only="opt_state")
    finally:
        moments.write_bytes(whole)


def test_a_copy_of_a_step_under_another_number_is_not_that_step(run, tmp_path):
    other = jfsdp.checkpoint.Checkpointer(tmp_path / "copied")
    for name in ("2", "3", "best"):
        shutil.copytree(run.directory / "2", tmp_path / "copied" / name)
    copied = tmp_path / "copied" / "3"
    for use in (lambda: other.restore(state_of(0)), lambda: jfsdp.checkpoint.restore(copied, state_of(0))):
        refuses(use, copied, "step 2", "step 3", error=DamagedError)
    (problem,) = verify(tmp_path / "copied" / "3").problems
    assert "step 2" in problem and verify(tmp_path / "copied" / "best").is_ok
    with pytest.warns(UserWarning, match="Falling back to step 2"):
        assert int(other.restore(state_of(0), fall_back=True)[0].step) == 2
    assert int(jfsdp.checkpoint.restore(tmp_path / "copied" / "best", state_of(0)).step) == 2
