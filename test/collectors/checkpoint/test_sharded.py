"""State dicts of which every rank holds a part: two ranks save, one and four load, and no pickle.

Ranks are forked, so that they need not import anything again.
"""

import multiprocessing
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from collectors import CheckpointError, CheckpointStore, RunState, ShardedOptimizer


def _rank(rank, size, action, folder, errors):
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet-{action.__name__}-{size}",
            rank=rank,
            world_size=size,
        )
        action(folder)
        dist.destroy_process_group()
    except BaseException:
        errors.put(f"rank {rank} of {size}: {traceback.format_exc()}")
        raise


def run_ranks(size, action, folder):
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, size, action, folder, errors), daemon=True)
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        if rank.is_alive():
            rank.kill()
    assert errors.empty(), errors.get()
    assert [rank.exitcode for rank in ranks] == [0] * size


def trained(steps):
    """A model over all ranks with its optimizer; every rank sees the same data."""
    torch.manual_seed(0)
    # 5 and 3 rows: some ranks have fewer than others, of four one has none.
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full(state):
    return {key: value.full_tensor() for key, value in state.items()}


def save_trained(folder):
    model, optimizer = trained(3)
    with CheckpointStore(folder / "store", process_group=dist.group.WORLD) as store:
        for step, wait in ((1, True), (2, False)):
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            path = store.save(step, {"rank": dist.get_rank()}, sharded=parts, wait=wait)
            for parameter in model.parameters() if step == 2 else ():
                parameter.data.fill_(7.0)
            store.wait()
            assert path.is_dir()
    dist.barrier()


def load_trained(folder):
    reference, reference_optimizer = trained(3)
    model, optimizer = trained(1)
    checkpoint = CheckpointStore(folder / "store", process_group=dist.group.WORLD).load()
    assert checkpoint.step == 2
    assert checkpoint.state == {"rank": 0}
    weights, moments = get_state_dict(model, optimizer)
    moments["param_groups"][0].update(lr=9.0, betas=(0.0, 0.0))
    checkpoint.load_sharded("model", weights)
    checkpoint.load_sharded("optimizer", moments)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    expected, expected_moments = get_state_dict(reference, reference_optimizer)
    assert moments["param_groups"] == expected_moments["param_groups"]
    for key, value in full(expected).items():
        assert torch.equal(full(weights)[key], value) or dist.get_world_size() != 2, key
        torch.testing.assert_close(full(weights)[key], value)
        for name in ("exp_avg", "exp_avg_sq"):
            found = moments["state"][key][name].full_tensor()
            torch.testing.assert_close(found, expected_moments["state"][key][name].full_tensor())
        assert moments["state"][key]["step"] == 3


def tensors(mesh, fill):
    """By name, what is laid out over a mesh in several ways."""
    grid = torch.arange(35.0).view(7, 5) if fill else torch.zeros(7, 5)
    half = torch.arange(3).to(torch.bfloat16) if fill else torch.zeros(3, dtype=torch.bfloat16)
    return {
        "rows": distribute_tensor(grid, mesh, [Shard(0)]),
        "columns": distribute_tensor(grid, mesh, [Shard(1)]),
        "everywhere": distribute_tensor(grid, mesh, [Replicate()]),
        "nested": [{"half": distribute_tensor(half, mesh, [Shard(0)])}],
        "plain": grid[0].clone(),
        "scalar": torch.tensor(3.5 if fill else 0.0),
        "words": ["a", (1, None)] if fill else ["", ()],
    }


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def save_layouts(folder):
    with CheckpointStore(folder / "store", process_group=dist.group.WORLD) as store:
        store.save(5, {}, sharded={"all": tensors(mesh(), True)})
        bad = {"x": distribute_tensor(torch.zeros(4, dtype=torch.complex128), mesh(), [Shard(0)])}
        with pytest.raises(CheckpointError, match=r"sharded\['bad'\]: cannot store 'x' of dtype"):
            store.save(6, {}, sharded={"bad": bad})
        # What fails on one rank fails on all, and none waits for ever.
        state = {"a": object() if dist.get_rank() == 0 else 1}
        with pytest.raises(CheckpointError, match="cannot store object"):
            store.save(6, state)
        with pytest.raises(CheckpointError, match=r"state\['d'\]: .*DTensor; give the sharded"):
            store.save(6, {"d": bad["x"]}) if dist.get_rank() == 0 else store.save(6, {})
        assert store.steps() == [5]


def load_layouts(folder):
    checkpoint = CheckpointStore(folder / "store", process_group=dist.group.WORLD).load()
    found, saved = tensors(mesh(), False), tensors(mesh(), True)
    checkpoint.load_sharded("all", found)
    for key in ("rows", "columns", "everywhere"):
        assert torch.equal(found[key].full_tensor(), saved[key].full_tensor())
    half = found["nested"][0]["half"].full_tensor()
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [0, 1, 2]
    assert torch.equal(found["plain"], saved["plain"])
    assert (found["scalar"], found["words"]) == (3.5, ["a", (1, None)])
    with pytest.raises(CheckpointError, match=r"'plain' is not in the target"):
        checkpoint.load_sharded("all", {key: found[key] for key in found if key != "plain"})
    with pytest.raises(CheckpointError, match=r"'plain' has the shape \(4,\), and \(5,\) in"):
        checkpoint.load_sharded("all", found | {"plain": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=r"has no sharded state 'none'; it has \['all'\]"):
        checkpoint.load_sharded("none", {})


@pytest.mark.parametrize(
    ("save", "load"), [(save_trained, load_trained), (save_layouts, load_layouts)]
)
def test_two_ranks_save_and_one_two_and_four_load(tmp_path, save, load):
    run_ranks(2, save, tmp_path)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert any(path.name.startswith("shard-00002-of-00002") for path in files)
    assert {path.suffix for path in files if path.name != ".lock"} == {".json", ".safetensors"}
    for size in (1, 2, 4):
        run_ranks(size, load, tmp_path)
    # One process by itself, without any group.
    checkpoint = CheckpointStore(tmp_path / "store").load()
    if checkpoint.step == 5:
        found = {"rows": torch.zeros(7, 5), "columns": torch.zeros(7, 5)}
        found |= {"everywhere": torch.zeros(7, 5), "nested": [{"half": torch.zeros(3)}]}
        found |= {"plain": torch.zeros(5), "scalar": torch.tensor(0.0), "words": ["", ()]}
        checkpoint.load_sharded("all", found)
        for key in ("rows", "columns", "everywhere"):
            assert torch.equal(found[key], torch.arange(35.0).view(7, 5))


def test_an_optimizer_keeps_the_kernels_of_its_own_run(tmp_path):
    """Those of whole parameters take no shards, over which the run may go on."""

    def run_of(foreach):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer, RunState(optimizer=ShardedOptimizer(model, optimizer))

    with CheckpointStore(tmp_path) as store:
        run_of(True)[2].save(store, 1)
        _, optimizer, state = run_of(False)
        optimizer.param_groups[0]["lr"] = 0.5
        assert state.restore(store) == 1
    (group,) = optimizer.param_groups
    assert group["foreach"] is False
    assert group["lr"] == 0.1, "what the other run had set is taken"


def test_a_parameter_without_a_gradient_so_far_makes_its_first_step_after_the_run_goes_on(tmp_path):
    """Such as of an agent that had no turn before the save."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Parameter(torch.tensor([1.0]))
            self.late = torch.nn.Parameter(torch.tensor([1.0]))

    def run_of():
        model = Two()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.0)
        return model, optimizer, RunState(optimizer=ShardedOptimizer(model, optimizer))

    def step(model, optimizer, *values):
        sum(value.sum() for value in values).backward()
        optimizer.step()
        optimizer.zero_grad()

    with CheckpointStore(tmp_path) as store:
        model, optimizer, state = run_of()
        step(model, optimizer, 2 * model.first)
        state.save(store, 1)
        model, optimizer, state = run_of()
        assert state.restore(store) == 1
        assert [*optimizer.state] == [model.first]
        step(model, optimizer, 2 * model.first, 3 * model.late)
        # A first step of Adam is as long as the learning rate, whatever the gradient is.
        assert model.late.item() == pytest.approx(0.75, abs=1e-6)
        assert int(optimizer.state[model.first]["step"]) == 2

        model, optimizer, _ = run_of()
        step(model, optimizer, model.first, model.late)
        optimizer.state[model.late].pop("exp_avg_sq")
        RunState(optimizer=ShardedOptimizer(model, optimizer)).save(store, 2)
        with pytest.raises(CheckpointError, match=r"'state.late.exp_avg_sq' is not in the checkp"):
            run_of()[2].restore(store)
