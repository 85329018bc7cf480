"""Runs of DeepSpeed, torchtitan and PyTorch that continue here: the losses of their next steps, from their files."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.distributed.checkpoint.state_dict import get_state_dict

import jfsdp
from jfsdp.checkpoint.foreign.adam import open_adam
from jfsdp.checkpoint.foreign.deepspeed import DeepSpeedSource
from jfsdp.checkpoint.foreign.export import write_safetensors
from jfsdp.checkpoint.foreign.mapping import Exported, Imported, as_name_map
from jfsdp.checkpoint.foreign.pretrained import fit_job, foreign_source, load_pretrained
from jfsdp.checkpoint.foreign.torch_source import load_torch
from jfsdp.checkpoint.source import read_whole, subset
from jfsdp.modules.adapt import as_model
from jfsdp.trainer.job import load_job
from tests.checkpoint.arrays import Arrays, arrays_of, assert_same_bits
from tests.checkpoint.foreign.test_mapping import random_slices
from tests.checkpoint.foreign.test_torch import write_dcp
from tests.refusals import refuses, warning
from tests.steps import fully_shard

THEIRS = Path(__file__).with_name("theirs")
LOSSES = json.loads((THEIRS / "losses.json").read_text())
FROZEN: dict[str, tuple[str, ...]] = {"zero1": (), "zero2": ("norm.scale",), "zero3": ("embed",)}
FORMS: dict[str, dict[str, Any]] = {
    "full_shard on 4": {"mesh": {"fsdp": 4}, "min_size": 8},
    "zero1": {"mesh": {"fsdp": 2}, "strategy": "zero1", "min_size": 8},
    "flat storage": {"mesh": {"fsdp": 2}, "program": "manual", "storage": "flat"},
}


def adamw(mask=None, **more):
    return optax.adamw(optax.constant_schedule(1e-2), 0.9, 0.95, weight_decay=0.1, mask=mask, **more)


def mesh_of(sizes):
    return jfsdp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def sharded(job, *, mesh, **settings):
    return fully_shard(job.model, mesh=mesh_of(mesh), units=job.units, **settings)


def tokens(step):
    """The rows that make_deepspeed.py trains on."""
    return np.random.default_rng(step).integers(19, size=(4, 9)).astype(np.int32)


TITAN: dict[str, Any] = {"vocab_size": 19, "dim": 16, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2, "ffn_dim": 20}
TITAN |= {"norm_eps": 1e-5, "rope_theta": 10_000.0}


def titan_job(**fields):
    return load_job("llama-tiny", None).with_config(**{**TITAN, **fields})


def losses_after(name, job, tx, form, frozen=()):
    model = sharded(job, **FORMS[form], frozen=frozen)
    state = load_pretrained(THEIRS / name, model, tx, job.pretrained, config=job.config, optimizer=True)
    assert int(state.step) == 3
    counts = [int(x) for role, x in zip(state.roles.arrays, jax.tree.leaves(state.opt_state)) if "count" in role.name]
    assert counts == [3, 3]  # of Adam, and of the schedule
    step, found = model.train_step(job.loss, tx), []
    for number in range(3, 6):
        rows = tokens(number)
        state, metrics = step(state, {"tokens": rows[:, :-1], "targets": rows[:, 1:]})
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize(("name", "form"), [*zip(FROZEN, FORMS)])
def test_a_run_of_deepspeed_continues_with_its_losses(name, form):
    job = fit_job(load_job("llama-tiny", None), THEIRS / name, {})
    found = losses_after(name, job, adamw(job.decay_mask), form, FROZEN[name])
    assert found == pytest.approx(LOSSES[name], abs=3e-6)


@pytest.mark.parametrize(("form", "stacked"), [("full_shard on 4", True), ("zero1", False)])
def test_a_run_of_torchtitan_continues_with_its_losses(form, stacked):
    """With fused projections, whose states the optimizer keeps fused, and another order of rotary elements."""
    found = losses_after("torchtitan", titan_job(stacked=stacked), adamw(), form)
    assert found == pytest.approx(LOSSES["torchtitan"], abs=3e-6)


def permuted(rows, heads):
    """As `_reverse_permute` of torchtitan's adapters."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("fused", [False, True])
def test_slices_of_weights_of_meta_and_of_fused_states_are_those_of_hugging_face(fused):
    """Imported gives the same leaves as the rules for Hugging Face, in any slice."""
    names = as_name_map(titan_job().pretrained)
    leaves = as_model(titan_job().model).params
    rng = np.random.default_rng(0)
    ours = {name: rng.normal(size=x.shape).astype(np.float32) for name, x in leaves.items()}
    hf = arrays_of(Exported(Arrays(ours), names))
    theirs = {"tok_embeddings.weight": hf["model.embed_tokens.weight"], "norm.weight": hf["model.norm.weight"]}
    theirs |= {"output.weight": hf["lm_head.weight"], "rope.freqs": np.zeros(2, np.float32)}
    if fused:
        theirs["lm_head.weight"] = theirs.pop("output.weight")
    for layer in range(TITAN["num_layers"]):
        of = {name.split(f"layers.{layer}.")[1]: x for name, x in hf.items() if f"layers.{layer}." in name}
        to = f"layers.{layer}"
        q, k = (permuted(of[f"self_attn.{x}_proj.weight"], heads) for x, heads in (("q", 4), ("k", 2)))
        v = of["self_attn.v_proj.weight"]
        if fused:
            parts = [x.reshape(2, -1, 4, 16) for x in (q, k, v)]
            theirs[f"{to}.attention.qkv_linear.wqkv.weight"] = np.concatenate(parts, 1).reshape(-1, 16)
        else:
            theirs |= {f"{to}.attention.w{x}.weight": y for x, y in (("q", q), ("k", k), ("v", v))}
        theirs[f"{to}.attention.wo.weight"] = of["self_attn.o_proj.weight"]
        theirs |= {f"{to}.feed_forward.w{i}.weight": of[f"mlp.{x}_proj.weight"] for i, x in ((1, "gate"), (3, "up"))}
        theirs[f"{to}.feed_forward.w2.weight"] = of["mlp.down_proj.weight"]
        theirs[f"{to}.attention_norm.weight"] = of["input_layernorm.weight"]
        theirs[f"{to}.ffn_norm.weight"] = of["post_attention_layernorm.weight"]
    found = Imported(Arrays(theirs), names.chosen_for(Arrays(theirs)), leaves)
    for name, value in ours.items():
        assert np.array_equal(read_whole(found, name), value), name
        for _ in range(20):
            at = random_slices(rng, value.shape)
            assert np.array_equal(found.read(name, at), value[at]), (name, at)


@pytest.mark.parametrize("name", FROZEN)
def test_slices_of_a_deepspeed_checkpoint_are_parts_of_the_whole(name):
    source = DeepSpeedSource(THEIRS / name / "global_step3", "")
    weights = {x for x in source.arrays if not x.startswith("optimizer.state.")}
    assert weights - {"lm_head.weight"} == {x for x in weights if x.startswith("model.")}
    for array, shape in source.arrays.items():
        whole = read_whole(source, array)
        assert whole.shape == shape.shape
        cut = tuple(slice(size // 3, size - size // 4) for size in shape.shape)
        assert np.array_equal(source.read(array, cut), whole[cut])


def test_weights_of_deepspeed_are_the_masters():
    """Without optimizer=True too, and without a key."""
    source, model = foreign_source(THEIRS / "zero2"), THEIRS / "zero2" / "global_step3" / "mp_rank_00_model_states.pt"
    for name, value in torch.load(model, weights_only=True)["module"].items():
        assert np.array_equal(read_whole(source, name), value.numpy()), name


def damaged(tmp_path, name, change):
    target = tmp_path / "changed"
    shutil.copytree(THEIRS / name, target)
    change(target / "global_step3")
    return target


def test_incomplete_and_other_checkpoints_of_deepspeed_are_refused(tmp_path):
    def case(number, name, change):
        path = damaged(tmp_path / str(number), name, change)
        return lambda: foreign_source(path)

    refuses(case(0, "zero1", lambda x: next(x.glob("*rank_1*")).unlink()), "1 *_optim_states.pt of 2 processes")
    refuses(case(1, "zero3", lambda x: next(x.glob("*rank_1*model*")).unlink()), "1 *_model_states.pt", "2 processes")
    refuses(case(2, "zero1", lambda x: x.rename(x.with_name("other"))), "latest", "global_step3")
    refuses(case(3, "zero1", lambda x: [y.unlink() for y in x.glob("*optim*")]), "_optim_states.pt of ZeRO", "module")
    split = "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    refuses(case(4, "zero1", lambda x: (x / split).touch()), split, "stages or tensors")

    def grow(path):
        file = path / "mp_rank_00_model_states.pt"
        contents = torch.load(file, weights_only=True)
        contents["param_shapes"][0]["lm_head.weight"] = torch.Size([1000, 12])
        torch.save(contents, file)

    refuses(case(5, "zero1", grow), "13,932 elements", "2,160")

    def shrink(path):
        file = path / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        contents = torch.load(file, weights_only=True)
        del contents["param_shapes"][0]["model.layers.0.self_attn.q_proj.weight"]  # shifts the weights after it
        torch.save(contents, file)

    refuses(case(6, "zero3", shrink), "parameters of 924 elements and states of 996")


def test_weights_of_deepspeed_need_no_states_and_no_class_of_other_contents(tmp_path):
    def change(path):
        for file in path.glob("*optim*"):
            contents = load_torch(file, any_class=True)
            contents["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}  # as of plain SGD
            save_torch(path / "new", contents).rename(file)  # the old file is mapped
        file = path / "mp_rank_00_model_states.pt"
        contents = torch.load(file, weights_only=True)
        torch.save(contents | {"best": np.float64(1.5), "rng": np.random.default_rng(0), "path": Path("x")}, file)

    changed = foreign_source(damaged(tmp_path, "zero1", change))
    assert_same_bits(arrays_of(changed), arrays_of(foreign_source(THEIRS / "zero1")))


def test_paths_next_to_a_run_are_refused_with_the_one_to_pass(tmp_path):
    files = THEIRS / "zero1" / "global_step3"
    refuses(lambda: foreign_source(THEIRS), "zero2, zero3", "torchtitan", "pass one")
    refuses(lambda: foreign_source(next(files.glob("*_optim_states.pt"))), "pass its directory", files)
    hf = tmp_path / "hf"
    write_safetensors(Arrays({"w": np.zeros(3, np.float32)}), hf)
    refuses(lambda: foreign_source(hf, training=True), "optimizer states", "leave out --init-optimizer")
    shutil.copytree(THEIRS / "zero1", tmp_path / "trainer")
    save_torch(tmp_path / "trainer" / "pytorch_model.bin", {"w": torch.zeros(3)})
    assert foreign_source(tmp_path / "trainer").arrays.keys() == {"w"}
    assert "lm_head.weight" in foreign_source(tmp_path / "trainer", training=True).arrays


def test_a_tied_run_does_not_continue_untied():
    job = fit_job(load_job("llama-tiny", None), THEIRS / "zero2", {}).with_config(tied=False)
    model = sharded(job, mesh={"fsdp": 2}, frozen=("norm",))
    load = lambda: load_pretrained(THEIRS / "zero2", model, adamw(), job.pretrained, optimizer=True)  # noqa: E731
    refuses(load, "exp_avg of lm_head.kernel", "frozen=")


def test_the_mapping_is_that_of_the_weights_also_if_moments_lack_its_names():
    source = foreign_source(THEIRS / "torchtitan", "")
    kept = [name for name in source.arrays if not ("state." in name and ".attention." in name)]
    names, leaves = as_name_map(titan_job().pretrained).chosen_for(source), as_model(titan_job().model).params
    trained = [name for name in leaves if ".attn." not in name]
    moments, step = open_adam(subset(source, kept), names, leaves, trained, where="run")
    assert step == 3 and moments.arrays.keys() == {f"{kind}.{name}" for kind in ("mu", "nu") for name in trained}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 2, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


NAMES = {
    "rules": [
        ("up.kernel", "0.weight", "transpose"),
        ("up.bias", "0.bias"),
        ("down.kernel", "2.weight", "transpose"),
    ]
}
ROWS = np.random.default_rng(0).normal(size=(5, 4, 8)).astype(np.float32)


def trained(make: Any = torch.optim.AdamW, **options):
    """Return a PyTorch model and its optimizer after two steps, and a function that takes a step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2, bias=False))
    optimizer = make(net.parameters(), lr=1e-2, **options)

    def step(number):
        rows = torch.tensor(ROWS[number])
        loss = (net(rows[:, :6]) - rows[:, 6:]).square().sum() / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    for number in range(2):
        step(number)
    return net, optimizer, step


ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def loss_fn(model, batch):
    return jfsdp.Loss((model(batch["x"]) - batch["y"]).__pow__(2).sum(), batch["x"].shape[0])


def load(path, tx=None, **more):
    model, tx = fully_shard(Net, mesh=mesh_of({"fsdp": 2}), min_size=4), tx or adamw()
    return model, tx, load_pretrained(path, model, tx, NAMES, optimizer=True, **more)


def save_torch(path, state):
    torch.save(state, path)
    return path


@pytest.mark.parametrize("outer", ["optimizer", "optim", "flat"])
@pytest.mark.parametrize("write", [save_torch, write_dcp])
def test_a_run_of_pytorch_continues_with_its_losses(write, outer, tmp_path):
    net, optimizer, step = trained(**ADAM)
    weights, states = get_state_dict(net, optimizer)
    if outer == "flat":  # as torchtitan: weights at the top, states under names that contain the parameter's
        of: Any = states["state"]
        flat = {f"state.{name}.{kind}": x for name in of for kind, x in of[name].items()}
        saved = {**weights, "optimizer": flat, "lr_scheduler": {"last_epoch": torch.tensor(2)}}
    else:
        saved = {"model": weights, outer: states, "step": 2}
    model, tx, state = load(write(tmp_path / "saved.pt", saved))
    assert int(state.step) == 2
    train = model.train_step(loss_fn, tx)
    for number in range(2, 5):
        expected = step(number)
        state, metrics = train(state, {"x": ROWS[number][:, :6], "y": ROWS[number][:, 6:]})
        assert float(metrics["loss"]) == pytest.approx(expected, abs=1e-6)


def test_states_that_are_not_of_one_adam_are_refused(tmp_path):
    def saved(name, optimizer_of, change=lambda states: states):
        net, optimizer, _ = optimizer_of
        weights, states = get_state_dict(net, optimizer)
        return save_torch(tmp_path / name, {"model": weights, "optimizer": change(dict(states))})

    def without(states):
        del states["state"]["0.bias"]["exp_avg_sq"]
        return states

    def later(states):
        states["state"]["0.bias"]["step"] = torch.tensor(7.0)
        return states

    amsgrad = saved("amsgrad.pt", trained(amsgrad=True))
    refuses(lambda: load(amsgrad), "amsgrad.pt", "optimizer.state.0.weight.max_exp_avg_sq")
    momentum = saved("sgd.pt", trained(torch.optim.SGD, momentum=0.9))
    refuses(lambda: load(momentum), "sgd.pt", "momentum_buffer", "get_optimizer_state_dict")
    plain = trained(**ADAM)
    numbered = save_torch(tmp_path / "ids.pt", {"model": plain[0].state_dict(), "optimizer": plain[1].state_dict()})
    refuses(lambda: load(numbered), "ids.pt", "exp_avg", "get_optimizer_state_dict")
    refuses(lambda: load(saved("part.pt", trained(**ADAM), without)), "exp_avg_sq of 0.bias")
    refuses(lambda: load(saved("later.pt", trained(**ADAM), later)), "later.pt", "0.bias: 7", ": 2")
    weights = save_torch(tmp_path / "weights.pt", plain[0].state_dict())
    refuses(lambda: load(weights), "weights.pt", "get_optimizer_state_dict")
    good = saved("good.pt", trained(**ADAM))
    refuses(lambda: load(good, optax.sgd(1e-2)), "mu.down.kernel (0)", "nu.down.kernel (0)", "optax.adamw")
    part = saved("frozen.pt", trained(**ADAM), lambda states: {"state": {"0.bias": states["state"]["0.bias"]}})
    refuses(lambda: load(part), "frozen.pt", "exp_avg of down.kernel (and 1 more)", "frozen=")
    refuses(lambda: load(good, optax.chain(adamw(), optax.adam(1.0))), "mu.down.kernel (2)")
    refuses(lambda: load(good, optax.adabelief(1e-2)), "mu.down.kernel (0)", "optax.adamw")
    nested = save_torch(tmp_path / "app.pt", {"app": torch.load(good, weights_only=True)})
    assert int(load(nested)[2].step) == 2
    _, _, state = load(good)
    jfsdp.checkpoint.save(tmp_path / "ours", state)
    refuses(lambda: load(tmp_path / "ours"), "ours", "restore", "--resume")
    model = fully_shard(Net, mesh=mesh_of({"fsdp": 2}), min_size=4, frozen=("down",))
    state = load_pretrained(good, model, adamw(), NAMES, optimizer=True)  # states of frozen parameters are ignored
    assert {role.leaf for role in state.roles.arrays} == {None, "up.kernel", "up.bias"}
    averaged = optax.chain(adamw(), jfsdp.optim.track_ema(0.9))
    with warning("good.pt", "ema.up.kernel"):
        load(good, averaged)
    with warning("good.pt", "opt_state.1.ema"):
        _, _, state = load(good, optax.chain(adamw(), optax.ema(0.9)))
    counts = {role.name: int(x) for role, x in zip(state.roles.arrays, jax.tree.leaves(state.opt_state)) if not x.ndim}
    assert counts == {"opt_state.0.0.count": 2, "opt_state.0.2.count": 2, "opt_state.1.count": 0}

    def broken(found):
        found["state"]["0.bias"]["exp_avg"] *= float("nan")
        return found

    refuses(lambda: load(saved("nan.pt", trained(**ADAM), broken)), "mu.up.bias: 8 of", "not finite")
