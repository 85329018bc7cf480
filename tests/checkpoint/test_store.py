"""Checkpoints: bitwise from any layout into any other, and typed errors for what cannot be read or written."""

import errno
import functools
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jfsdp
from jfsdp.checkpoint.disk import writer
from jfsdp.checkpoint.disk.commit import commit
from jfsdp.checkpoint.disk.digest import hash_files, list_files, write_digests
from jfsdp.checkpoint.disk.files import MANIFEST, read_manifest
from jfsdp.train.state import TrainState
from tests.checkpoint.arrays import assert_same_bits
from tests.checkpoint.elastic import lived_in
from tests.refusals import refuses, refusing
from tests.states import logical
from tests.steps import fully_shard

TX = optax.adamw(1e-3)


class Net(nnx.Module):
    """A stack, a matrix that divides by nothing, a small vector, integers; beside them statistics and keys."""

    def __init__(self, rngs, dim=12, rows=13, extra=False, dtype="float32"):
        make = nnx.vmap(lambda rngs: nnx.Linear(dim, 24, rngs=rngs), in_axes=0, out_axes=0)
        self.stack = nnx.split_rngs(splits=2)(make)(rngs)
        self.odd = nnx.Param(jax.random.normal(rngs.params(), (rows, 11)))
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (5,), dtype))
        self.table = nnx.Param(jax.random.randint(rngs.params(), (8, 8), 0, 99))
        self.seen = nnx.BatchStat(jax.random.normal(rngs.params(), (3, 3)))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        if extra:
            self.extra = nnx.Param(jnp.ones(4))


# Name -> how a model is sharded. On 3, 4 and 8 devices leaves are padded, each by another number; on 8 some of them
# hold nothing of a leaf.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"sizes": {"fsdp": 1}},
    "full4": {"sizes": {"fsdp": 4}},
    "full3": {"sizes": {"fsdp": 3}},
    "hybrid2x2": {"sizes": {"replica": 2, "fsdp": 2}},
    "zero1bf16": {"sizes": {"fsdp": 4}, "strategy": "zero1", "param_dtype": "bfloat16"},
    "hfsdp2x3bf16": {"sizes": {"replica": 2, "fsdp": 3}, "opt_over": ("replica", "fsdp"), "param_dtype": "bfloat16"},
    "ddp4": {"sizes": {"fsdp": 4}, "strategy": "ddp"},
    "flat4": {"sizes": {"fsdp": 4}, "program": "manual", "storage": "flat"},
    "flat8": {"sizes": {"fsdp": 8}, "program": "manual", "storage": "flat"},
    "flatzero1bf16": {
        "sizes": {"fsdp": 3},
        "strategy": "zero1",
        "param_dtype": "bfloat16",
        "program": "manual",
        "storage": "flat",
    },
}

# From every layout into other padding, and from padded leaves with a low-precision copy into every layout.
PAIRS = sorted({(name, "full3") for name in LAYOUTS} | {("hfsdp2x3bf16", name) for name in LAYOUTS if name != "flat4"})


def make_model(name: str, factory: Any = Net) -> jfsdp.ShardedModel:
    settings = dict(LAYOUTS[name])
    sizes = settings.pop("sizes")
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    mp_policy = jfsdp.MixedPrecisionPolicy(settings.pop("param_dtype", None))
    return fully_shard(factory, mesh=mesh, units=[nnx.Linear], mp_policy=mp_policy, min_size=8, **settings)


@functools.cache
def saved_state(name: str) -> TrainState:
    """Every layout's state has its own seed, so that no restore passes by chance."""
    return lived_in(make_model(name).init(TX, seed=list(LAYOUTS).index(name)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Any:
    """Save a layout's state once; return the path."""

    @functools.cache
    def save(name: str) -> Path:
        path = tmp_path_factory.mktemp("saved") / name
        jfsdp.checkpoint.save(path, saved_state(name), extra={"from": name})
        return path

    return save


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{source}-to-{target}" for source, target in PAIRS])
def test_restore_is_bitwise_into_any_mesh_and_strategy(source, target, saved):
    like = make_model(target).abstract_state(TX)
    state = jfsdp.checkpoint.restore(saved(source), like=like)
    assert_same_bits(logical(state), logical(saved_state(source)))
    assert jax.tree.structure(state) == jax.tree.structure(like)
    for value, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert (value.shape, value.dtype, value.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)
    assert set(state.work) == set(like.work)
    for name, copy in state.work.items():
        assert np.asarray(copy).tobytes() == np.asarray(state.params[name].astype("bfloat16")).tobytes()


def test_names_in_the_manifest_carry_no_mesh_and_no_strategy(saved):
    manifests = [read_manifest(saved(name)) for name in LAYOUTS]
    assert all(manifest["arrays"] == manifests[0]["arrays"] for manifest in manifests)
    arrays = manifests[0]["arrays"]
    assert arrays["params.odd"] == {"shape": [13, 11], "dtype": "float32", "key_impl": None}
    assert arrays["opt_state.0.mu.odd"]["shape"] == [13, 11]
    assert arrays["step"]["shape"] == []
    assert not [name for name in arrays if name.startswith("work")]


def test_nothing_saved_is_ever_overwritten(saved, tmp_path):
    with refusing("/one"):
        jfsdp.checkpoint.save(saved("one"), saved_state("full4"))
    again = jfsdp.checkpoint.restore(saved("one"), like=make_model("one").abstract_state(TX))
    assert_same_bits(logical(again), logical(saved_state("one")))
    (tmp_path / "file").write_text("mine")
    refuses(lambda: jfsdp.checkpoint.save(tmp_path / "file", saved_state("one")), "already exists")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_somebody_makes_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    def commit_late(partial: Path, path: Path, documents: Any) -> None:
        path.mkdir()
        commit(partial, path, documents)

    monkeypatch.setattr(writer, "commit", commit_late)
    refuses(lambda: jfsdp.checkpoint.save(tmp_path / "c", saved_state("one")), "/c", "meanwhile")
    assert [*tmp_path.rglob("*")] == [tmp_path / "c"]


def test_what_is_no_checkpoint_is_refused(tmp_path):
    like = make_model("one").abstract_state(TX)
    (tmp_path / "file").write_text("text")
    (tmp_path / "run directory" / "100").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("missing", "empty", "file", "run directory"):
        refuses(functools.partial(jfsdp.checkpoint.restore, tmp_path / name, like=like), name)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_by_names_and_shapes(saved, tmp_path):
    """The state is one of `Net` on 4 devices, where the 13 rows are stored as 16."""
    moments = "opt_state.0.mu.extra, opt_state.0.nu.extra, params.extra"
    for options, tx, facts in (
        ({"extra": True}, TX, ["missing", moments]),
        ({"dim": 20}, TX, ["params.stack.kernel", "float32[2, 12, 24]", "float32[2, 20, 24]", "only=, skip="]),
        ({"rows": 16}, TX, ["params.odd", "float32[13, 11]", "float32[16, 11]"]),
        ({"dtype": "bfloat16"}, TX, ["params.scale", "float32[5]", "bfloat16[5]"]),
        ({}, optax.sgd(1e-3, 0.9), ["opt_state.0.trace.odd", "not in the model", "opt_state.0.count"]),
    ):
        like = make_model("full3", functools.partial(Net, **options)).abstract_state(tx)
        refuses(functools.partial(jfsdp.checkpoint.restore, saved("full4"), like), saved("full4"), *facts)
    jfsdp.checkpoint.save(tmp_path / "c", make_model("full3", functools.partial(Net, extra=True)).init(TX))
    with refusing("not in the model", moments) as error:
        jfsdp.checkpoint.restore(tmp_path / "c", make_model("full3").abstract_state(TX))
    assert "missing" not in str(error.value)


def test_a_checkpoint_of_another_format_is_refused(saved, tmp_path):
    path = tmp_path / "c"
    shutil.copytree(saved("one"), path)
    file = path / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    write_digests(path, hash_files(path, list_files(path)))
    like = make_model("one").abstract_state(TX)
    refuses(lambda: jfsdp.checkpoint.restore(path, like=like), path, "format 99, not 2", "jfsdp that wrote it")


def test_a_path_is_no_pattern_and_no_other_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state, path = saved_state("one"), tmp_path / "a b#100%a%41?*:äö" / "c"
    (tmp_path / "a b#100%aA?*:äö").mkdir()
    jfsdp.checkpoint.save(path, state)
    assert_same_bits(logical(jfsdp.checkpoint.restore(path, like=state)), logical(state))
    for wrong, fact in (("lr[1]/c", "'['"), ("http://host/saved", "s3://BUCKET/PATH"), ("s3://", "'s3://'")):
        for use in (jfsdp.checkpoint.save, jfsdp.checkpoint.restore):
            if use is jfsdp.checkpoint.save or fact != "'['":
                refuses(functools.partial(use, wrong, state), fact)
        refuses(functools.partial(jfsdp.checkpoint.Checkpointer, wrong), fact)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_path_may_begin_at_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    jfsdp.checkpoint.save("~/saved", saved_state("one"))
    assert jfsdp.checkpoint.Checkpointer("~/run").directory == tmp_path / "home" / "run"
    assert [path.name for path in tmp_path.iterdir()] == ["home"] and (tmp_path / "home" / "saved").is_dir()


def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    """Whoever wrote it, and the directories too: a power failure leaves no step that is listed and not whole."""
    synced, fsync, rename = set(), os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file))[1])
    found = []

    def watched(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if Path(target) == tmp_path / "c":
            everything = [Path(source), *Path(source).rglob("*")]
            found.extend((str(path), path.stat().st_ino in synced) for path in everything)
        rename(source, target, *args, **kwargs)

    monkeypatch.setattr(os, "rename", watched)
    jfsdp.checkpoint.save(tmp_path / "c", saved_state("one"))
    assert found and [path for path, is_synced in found if not is_synced] == []
    assert tmp_path.stat().st_ino in synced


def test_what_orbax_did_not_merge_is_never_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", lambda self, directory: None)
    with pytest.raises(OSError, match="did not merge"):
        jfsdp.checkpoint.save(tmp_path / "c", saved_state("one"))
    assert not (tmp_path / "c").exists()


def test_errors_of_storage_libraries_become_one_kind_of_error(tmp_path, monkeypatch):
    """Simulated where the bytes would be written: a full or read-only disk cannot be made portably."""
    for error, code in (
        (RuntimeError("Error opening file: Permission denied"), errno.EACCES),
        (OSError(errno.EROFS, "Read-only file system"), errno.EROFS),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), errno.EDQUOT),
    ):
        monkeypatch.setattr(ocp.AsyncCheckpointer, "save", mock.Mock(side_effect=error))
        with pytest.raises(OSError, match="earlier") as raised:  # PermissionError too
            jfsdp.checkpoint.save(tmp_path / "c", saved_state("one"))
        assert (raised.value.errno, raised.value.__cause__) == (code, error)
        assert not (tmp_path / "c").exists()
