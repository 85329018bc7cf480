"""The compiled step in a run's directory: when the next start loads it, and when it compiles again."""

import json

import jax
import jax.numpy as jnp
import pytest

from jfsdp.trainer.run import compiled
from jfsdp.trainer.run.compiled import KEEP, kept_program
from jfsdp.trainer.run.stored import StoredRun
from tests import compiling
from tests.scripts.command import ONE_LAYER, read_metrics, train, write_corpus

_SETTINGS = ("enable_compilation_cache", "compilation_cache_dir", "persistent_cache_min_compile_time_secs")


@pytest.fixture(autouse=True)
def cache():
    """JAX's cache as the training script sets it; afterwards as it was."""
    names = [f"jax_{name}" for name in _SETTINGS]
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (True, None, 0.0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def start(directory, factor=3.0):
    """Compile a program as a new start does; return how, after a check of its result."""
    known = set(compiling._KEPT)
    with kept_program(directory) as program:
        assert jax.jit(lambda x: jnp.sin(x) * factor)(2.0) == pytest.approx(0.9092974 * factor)
    assert program.compile_s > 0
    for name in compiling._KEPT.keys() - known:  # so that the tests' own cache does not return it
        del compiling._KEPT[name]
    return program.compiled


def entries(directory):
    return sorted(directory.rglob("*-cache"))


def test_the_next_start_of_the_same_program_loads_it(tmp_path):
    assert [start(tmp_path) for _ in range(3)] == ["compiled", "loaded", "loaded"]
    assert start(tmp_path, 4.0) == "compiled"
    assert len(entries(tmp_path)) == 2 and jax.config.jax_compilation_cache_dir is None


def test_another_run_of_the_same_user_loads_it_and_keeps_it_too(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "user"))
    assert start(tmp_path / "one") == "compiled" and len(entries(tmp_path / "user")) == 1
    assert start(tmp_path / "two") == "loaded" and len(entries(tmp_path / "two")) == 1
    assert start(tmp_path / "one", 4.0) == "compiled"
    assert start(tmp_path / "two", 4.0) == "loaded" and len(entries(tmp_path / "two")) == 2
    jax.config.update("jax_compilation_cache_dir", None)
    assert start(tmp_path / "two") == "loaded"


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def rename(file):
    file.rename(file.with_name(file.name.split("-", 2)[2]))  # as JAX names it, without a digest


@pytest.mark.parametrize("damage", [cut, flip, rename])
def test_an_entry_without_its_digest_is_compiled_again_and_replaced(tmp_path, damage):
    assert start(tmp_path) == "compiled"
    (file,) = entries(tmp_path)
    damage(file)
    assert start(tmp_path) == "compiled"
    assert start(tmp_path) == "loaded"


def test_a_program_of_another_jaxlib_is_not_loaded(tmp_path, monkeypatch):
    from jax._src import cache_key

    assert start(tmp_path) == "compiled"
    monkeypatch.setattr(cache_key, "jaxlib_version_str", "0.0.1")
    assert start(tmp_path) == "compiled"


def test_only_the_newest_entries_are_kept(tmp_path):
    for factor in range(1, KEEP + 3):
        assert start(tmp_path, factor) == "compiled"
    assert len(entries(tmp_path)) == KEEP
    assert [start(tmp_path, factor) for factor in (KEEP + 2, 3)] == ["loaded", "loaded"]


def test_processes_that_see_different_entries_compile(tmp_path, monkeypatch):
    assert start(tmp_path) == "compiled"
    monkeypatch.setattr(compiled, "gather_json", lambda entries: [entries, [[] for _ in entries]])
    assert start(tmp_path) == "compiled"
    monkeypatch.setattr(compiled, "gather_json", lambda entries: [entries, entries])
    assert start(tmp_path) == "loaded"


def test_homes_that_are_not_shared_leave_the_entries_of_the_run(tmp_path, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "user"))
    assert [start(tmp_path / "one"), start(tmp_path / "two", 4.0)] == ["compiled", "compiled"]
    monkeypatch.setattr(compiled, "gather_json", lambda entries: [entries, [entries[0], []]])
    assert start(tmp_path / "one") == "loaded"
    assert start(tmp_path / "one", 4.0) == "compiled"


def test_a_run_in_an_object_store_keeps_its_newest_entries_there():
    first = StoredRun("memory://compiled/run")
    assert start(first / "compiled") == "compiled"
    first.push()
    second = StoredRun("memory://compiled/run")
    assert start(second / "compiled") == "loaded"
    for factor in range(KEEP):
        assert start(second / "compiled", factor) == "compiled"
    second.push()
    kept = [file.relative_to(second.local) for file in entries(second.local)]
    assert sorted(name for name in second.address.walk() if name.endswith("-cache")) == sorted(map(str, kept))
    assert len(kept) == KEEP


def test_nothing_is_kept_where_the_cache_is_disabled(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "gather_json", None)  # processes exchange nothing
    jax.config.update("jax_enable_compilation_cache", False)
    assert start(tmp_path) == "compiled" and not list(tmp_path.iterdir())


def test_a_run_loads_its_step_when_it_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    write_corpus(tmp_path / "corpus")
    model = ["--model", "llama-tiny", "--model-config", *ONE_LAYER, "--seq-len", 32, "--batch-per-device", 2]
    where = ["--data", tmp_path / "corpus", "--sample-tokens", 0, "--eval-fraction", 0, "--run-dir", tmp_path / "run"]
    for steps, outcome in (2, "compiled"), (4, "loaded"):
        done = train(*model, *where, "--decay-steps", 4, "--log-every", 1, "--steps", steps, "--resume")
        assert done.returncode == 0, done.stderr
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["compiled"] == outcome and summary["compile_s"] > 0
        assert f"its program was {outcome}" in done.stdout
    has = ["compile_s" in line for line in read_metrics(tmp_path / "run")]
    assert has == [True, False, True, False]
