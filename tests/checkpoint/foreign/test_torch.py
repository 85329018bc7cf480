"""PyTorch checkpoints as sources: bit by bit what PyTorch saved, by slices, and no code run that a file brings."""

import functools
import itertools
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from jfsdp.checkpoint.foreign.torch_source import open_torch
from jfsdp.checkpoint.source import Index, read_whole
from tests.refusals import refuses, refusing

DTYPES = ["bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128", "uint8", "int8", "uint16"]
DTYPES += ["int16", "uint32", "int32", "int64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
WRITER = Path(__file__).with_name("torch_writer.py")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """What two processes of PyTorch's FSDP2 saved."""
    root = tmp_path_factory.mktemp("torch")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, WRITER, root, str(rank)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return root


@pytest.fixture(scope="module")
def expected(saved) -> dict[str, np.ndarray]:
    return dict(np.load(saved / "expected.npz"))


def write_dcp(path: Path, state: Any) -> Path:
    """Save with DCP from this process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save_dcp(state, checkpoint_id=path)
    return path


def write_pt(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def slices_of(shape: tuple[int, ...]) -> list[Index]:
    """Every slice along the first dim, empty ones too, with parts of the others in turn."""
    ranges = itertools.combinations_with_replacement(range(shape[0] + 1), 2)
    inner = itertools.cycle([slice(0, size), slice(1, size), slice(size // 2, size // 2)] for size in shape[1:])
    choice = itertools.cycle(range(3))
    return [(slice(a, b), *(next(inner)[next(choice)] for _ in shape[1:])) for a, b in ranges]


# ---- what comes out ----


@pytest.mark.parametrize("file", ["dcp", "whole.pt"])
def test_every_tensor_of_a_sharded_model_comes_out_bitwise_and_its_slices_too(file, saved, expected):
    source = open_torch(saved / file, key="model")
    assert sorted(source.arrays) == sorted(expected)
    with ThreadPoolExecutor(4) as pool:  # threads may read at once
        found = dict(zip(expected, pool.map(lambda name: read_whole(source, name), expected), strict=True))
    for name, value in expected.items():
        whole = found[name]
        dtype = "bfloat16" if name.startswith("layers.1") else value.dtype
        assert whole.dtype == source.arrays[name].dtype == dtype, name
        assert whole.shape == source.arrays[name].shape == value.shape, name
        assert whole.tobytes() == value.tobytes(), name
    for name in ("head.weight", "layers.1.weight", "gate.weight", "layers.0.bias"):
        for index in slices_of(found[name].shape):
            part = source.read(name, index)
            assert (part.shape, part.tobytes()) == (found[name][index].shape, found[name][index].tobytes()), index


@pytest.mark.parametrize(("rows", "ranks"), [(slice(0, 7), {0}), (slice(7, 13), {1}), (slice(6, 8), {0, 1})])
def test_only_the_chunks_that_a_slice_overlaps_are_read(rows, ranks, saved, expected, tmp_path):
    """All other bytes of the checkpoint are overwritten after it was opened, so reading one of them would show."""
    (tmp_path / "dcp").mkdir()
    for file in (saved / "dcp").iterdir():
        (tmp_path / "dcp" / file.name).write_bytes(file.read_bytes())
    source = open_torch(tmp_path / "dcp", key="model")
    places = FileSystemReader(saved / "dcp").read_metadata().storage_data
    kept = [p for at, p in places.items() if at.fqn == "model.embed.weight" and int(p.relative_path[2]) in ranks]
    assert len(kept) == len(ranks)
    for file in (tmp_path / "dcp").iterdir():
        whole, noise = file.read_bytes(), bytearray(b"\xff" * file.stat().st_size)
        for place in (p for p in kept if p.relative_path == file.name):
            inside = slice(place.offset, place.offset + place.length)
            noise[inside] = whole[inside]
        file.write_bytes(noise)
    part = source.read("embed.weight", (rows, slice(0, 6)))
    assert part.tobytes() == expected["embed.weight"][rows].tobytes()
    with refusing("dcp:") as error:
        read_whole(source, "layers.0.weight")
    assert "weights_only" not in str(error.value), "torch's advice to unpickle without restriction was passed on"


@pytest.mark.parametrize("write", [write_dcp, write_pt])
def test_every_dtype_that_is_read_comes_out_bitwise(write, tmp_path):
    bits = torch.arange(32, dtype=torch.uint8)
    state = {n: (bits % 2 == 1) if n == "bool" else bits.view(getattr(torch, n)).clone() for n in DTYPES}
    source = open_torch(write(tmp_path / "c.pt", state))
    for name, tensor in state.items():
        found = read_whole(source, name)
        assert found.dtype.name == source.arrays[name].dtype.name == name
        assert found.tobytes() == tensor.view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("write", [write_dcp, write_pt])
def test_tied_transposed_and_empty_tensors_are_read_as_they_look(write, tmp_path):
    weight = torch.nn.Parameter(torch.randn(5, 3))
    state = {"a": weight, "tied": weight, "turned": weight.T, "rows": weight[1:3], "none": weight[:0]}
    source = open_torch(write(tmp_path / "c.pt", state))
    for name, tensor in state.items():
        found = read_whole(source, name)
        np.testing.assert_array_equal(found, tensor.detach().numpy())
        found[...] = 0
        np.testing.assert_array_equal(read_whole(source, name), tensor.detach().numpy())


# ---- names ----


def test_wrappers_are_taken_out_of_names_and_nothing_else(tmp_path):
    names = {
        "module._orig_mod.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.w": "layers.0.mlp.w",
        "_fsdp_wrapped_module.head.module.w": "head.module.w",
        "module.norm.weight": "norm.weight",
    }
    path = write_pt(tmp_path / "c.pt", {name: torch.ones(1) for name in names})
    assert set(open_torch(path).arrays) == set(names.values())
    refused(write_pt(tmp_path / "twice.pt", {"module.w": torch.ones(1), "_orig_mod.w": torch.ones(1)}), "two", " w ")


NESTED = {
    "app": {"model": {"module.w": torch.ones(2), "inner": {"v": torch.zeros(3)}}, "optimizer": [torch.ones(4)]},
    "b.ema": {"w": torch.ones(1)},
    "step": 7,
}


@pytest.mark.parametrize("write", [write_dcp, write_pt])
def test_key_chooses_a_dict_by_its_path_and_none_is_guessed(write, tmp_path):
    path = write(tmp_path / "c.pt", NESTED)
    for key, names in {
        "app.model": {"w": 2, "inner.v": 3},
        "app": {"model.module.w": 2, "model.inner.v": 3, "optimizer.0": 4},
        "b.ema": {"w": 1},
        "": {"app.model.module.w": 2, "app.model.inner.v": 3, "app.optimizer.0": 4, "b.ema.w": 1},
    }.items():
        assert {name: x.shape[0] for name, x in open_torch(path, key=key).arrays.items()} == names
    for key in (None, "model", "step", "app.model.inner.v"):
        refused(
            path, "app (3 tensors)", "b.ema (1 tensors)", "step (no tensor)", f"{key!r}" if key else "key=", key=key
        )


# ---- what is refused ----


def refused(path: Path, *facts: str, key: str | None = None) -> None:
    refuses(lambda: open_torch(path, key=key), path, *facts)


def test_without_torch_the_error_names_the_extra(tmp_path, monkeypatch):
    path = write_pt(tmp_path / "c.pt", {"w": torch.ones(1)})
    monkeypatch.setitem(sys.modules, "torch", None)
    for each in (path, tmp_path):
        with refusing("pip install torch"):
            open_torch(each)


def test_what_is_no_complete_checkpoint_is_refused(saved, tmp_path):
    refused(tmp_path / "none", "there is no such file")
    for part in (".metadata", "__0_0.distcp"):
        refused(saved / "dcp" / part, "directory", str(saved / "dcp"))
    (tmp_path / "c").mkdir()
    refused(tmp_path / "c", ".metadata")
    path = write_dcp(tmp_path / "d", {"w": torch.ones(3)})
    for content in (b"", b"\x80\x04garbage", pickle.dumps({"no": "metadata"})):
        (path / ".metadata").write_bytes(content)
        refused(path, ".metadata")
    (path / ".metadata").unlink()
    refused(path, ".metadata", "__0_0.distcp", "not finished")


def test_a_missing_or_short_file_of_one_process_is_named(saved, tmp_path):
    path = tmp_path / "dcp"
    path.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (path / name).write_bytes((saved / "dcp" / name).read_bytes())
    refused(path, "__1_0.distcp", "missing", key="model")
    (path / "__1_0.distcp").write_bytes((saved / "dcp" / "__1_0.distcp").read_bytes()[:-1])
    refused(path, "__1_0.distcp", "bytes", key="model")


def change_metadata(path: Path, change: Any) -> Path:
    metadata = FileSystemReader(path).read_metadata()
    (path / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))
    return path


def test_chunks_that_are_not_there_or_lead_out_of_the_directory_are_refused(tmp_path):
    def no_place(metadata: Any) -> None:
        metadata.storage_data.clear()

    def no_chunk(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].chunks.clear()

    def lead_out(outside: str, metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = outside

    outside = ["../0/__0_0.distcp", "/tmp/__0_0.distcp"]
    cases: list[Any] = [(no_place, ["w [3, 2]", "missing"]), (no_chunk, ["w [3, 2]", "missing"])]
    cases += [(functools.partial(lead_out, path), [path, "leads out"]) for path in outside]
    for number, (change, facts) in enumerate(cases):
        path = write_dcp(tmp_path / str(number), {"w": torch.ones(3, 2)})
        refused(change_metadata(path, change), *facts)


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path):
    plain = write_pt(tmp_path / "plain.pt", {"w": torch.zeros(1000)})
    with zipfile.ZipFile(plain) as whole, zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for name in whole.namelist():
            small.writestr(name, whole.read(name))
    refused(tmp_path / "c.pt", "compressed")


class Trap:
    """What makes a directory when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_that_a_checkpoint_brings_is_not_run(tmp_path):
    path = write_dcp(tmp_path / "c", {"w": torch.ones(3)})
    (path / ".metadata").write_bytes(pickle.dumps({"a": Trap(tmp_path / "trapped")}))
    refused(path, "posix.mkdir", "run code")
    file = write_pt(tmp_path / "c.pt", {"w": torch.ones(3), "a": Trap(tmp_path / "trapped")})
    refused(file, "posix.mkdir", "run code", "model.state_dict()")
    refused(write_pt(tmp_path / "module.pt", torch.nn.Linear(2, 2)), "torch.nn.modules.linear.Linear", "run code")
    assert not (tmp_path / "trapped").exists()
    pickle.loads(pickle.dumps(Trap(tmp_path / "trapped")))
    assert (tmp_path / "trapped").exists(), "the trap does not work, so nothing was shown"


def test_damaged_and_old_files_and_those_without_named_tensors_are_refused(tmp_path):
    path = write_pt(tmp_path / "c.bin", {"w": torch.ones(300)})
    for content in (b"garbage", b"", path.read_bytes()[:-100]):
        path.write_bytes(content)
        refused(path, "damaged" if len(content) > 100 else "torch.save")
    torch.save({"w": torch.ones(300)}, path, _use_new_zipfile_serialization=False)
    refused(path, "torch.save")
    for state in (torch.ones(3), [torch.ones(3)], {"w": 1}, {}):
        refused(write_pt(tmp_path / "c.pt", state), "tensors")


def test_what_one_process_holds_and_sparse_tensors_are_not_taken_for_the_whole(saved, tmp_path):
    refused(saved / "shard0.pt", "embed.weight", "DTensor", "full_state_dict=True")
    refused(write_pt(tmp_path / "c.pt", {"w": torch.eye(3).to_sparse()}), " w ", "torch.sparse_coo")


@pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_quantized_tensors_are_refused_where_they_are_chosen(tmp_path):
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    path = write_pt(tmp_path / "c.pt", {"model": {"w": quantized}, "other": {"w": torch.ones(3)}})
    refused(path, "w has dtype qint8", key="model")
    assert list(open_torch(path, key="other").arrays) == ["w"]


@pytest.mark.parametrize("write", [write_dcp, write_pt])
def test_flat_parameters_of_fsdp1_are_refused_with_the_way_out(write, tmp_path):
    path = write(tmp_path / "c.pt", {"_fsdp_wrapped_module.layers.0._flat_param": torch.ones(30)})
    refused(path, "_flat_param", "FSDP1", "full_state_dict=True")
