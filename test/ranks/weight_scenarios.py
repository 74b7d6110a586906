"""What test_sharded_weights.py looks at: weights of several ranks on their way to an engine."""

from functools import partial

import torch
from forked_ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from training_scenarios import build, error_of, wrap

from collectors import InProcessUpdater, contribute_weights
from collectors.streaming.snapshot_updater import SnapshotUpdater
from collectors.weight_update import sharded_weights as sharded
from torchrl_modules import SamplingParameters
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.tiny_model import tiny_qwen3
from torchrl_modules.weight_transfer.broadcast_group import stateless_init_process_group
from torchrl_modules.weight_transfer.c10d import C10dWeightTransfer
from torchrl_modules.weight_transfer.layout import WeightLayout
from torchrl_modules.weights.expected_weights import ExpectedWeights
from torchrl_modules.weights.lazy_weights import RenamedWeights


class Policy:
    """The part of a policy that is updated."""

    def __init__(self, engine):
        self.engine = engine
        self.is_failing = False

    @property
    def policy_version(self):
        return self.engine.version

    def update_weights(self, state_dict, *, version=None):
        if self.is_failing:
            state_dict = Failing(state_dict, {name: name for name in state_dict})
        self.engine.update_weights(state_dict, version=version)
        return self.engine.version


class Failing(RenamedWeights):
    """Can be read five times."""

    num_read = 0

    def __getitem__(self, name):
        self.num_read += 1
        if self.num_read > 5:
            raise RuntimeError("out of memory")
        return super().__getitem__(name)


def engine_of(seed=1):
    torch.manual_seed(seed)
    model = tiny_qwen3(64, hidden_size=32, head_dim=16, initializer_range=0.2).double()
    return TransformersEngine(model, check=False)


def push(ranks, source, updater):
    """Rank 0 pushes, the others contribute; what each of them raised."""
    if ranks.rank == 0:
        return error_of(lambda: updater.push(source))
    return error_of(lambda: contribute_weights(source))


def pushes(ranks, case):
    """A push in small buckets, then one that is refused, then one that breaks off."""
    sharded.BUCKET_BYTES = 1 << 14
    expected = {
        name: value.clone()
        for name, value in merged(build(case)).items()
        if name != "lm_head.weight"
    }
    model = wrap(build(case), "fsdp2", case)
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    engine = engine_of()
    updater = InProcessUpdater(Policy(engine))
    largest = watch_buckets()
    errors = [push(ranks, model, updater)]
    arrived = difference(engine.model, expected)
    with torch.no_grad():  # one value of the last rank's shard
        for name, p in model.named_parameters():
            if name.endswith("layers.1.mlp.up_proj.weight") and ranks.rank == ranks.size - 1:
                p.to_local().view(-1)[-1] = torch.nan
    errors.append(push(ranks, model, updater))
    kept = difference(engine.model, expected)
    same = [
        torch.equal(p.full_tensor().nan_to_num(7), before[n])
        for n, p in model.named_parameters()
        if not n.endswith("up_proj.weight")
    ]
    return {
        "errors": errors,
        "arrived": arrived,
        "kept": kept,
        "version": engine.version,
        "largest": max(largest),
        "all": sum(x.numel() * 8 for x in expected.values()),
        "model is as before": all(same),
    }


def difference(model, expected):
    values = model.state_dict()
    return max(float((values[name] - value).abs().max()) for name, value in expected.items())


def merged(model):
    plain = model.merge_and_unload() if hasattr(model, "peft_config") else model
    return plain.state_dict()


def watch_buckets():
    """Bytes of the buckets that are made from now on."""
    sizes = []
    prepare = sharded.ShardedWeights.__init__

    def watched(make, dtype):
        made = make(dtype)
        sizes.append(sum(x.numel() * x.element_size() for x in made.values()))
        return made

    def prepared(self, *given):
        prepare(self, *given)
        self._makers = [partial(watched, make) for make in self._makers]

    sharded.ShardedWeights.__init__ = prepared
    return sizes


def snapshots(ranks):
    """What a streaming collector copies of float64 weights for an engine of bfloat16."""
    sharded.BUCKET_BYTES = 1 << 14
    expected = build("grpo").state_dict()
    model = wrap(build("grpo"), "fsdp2", "grpo")
    gathered = watch_buckets()
    if ranks.rank:
        contribute_weights(model)
        return {"gathered": sum(gathered)}
    taken = SnapshotUpdater(Policy(engine_of())).snapshot(model, torch.bfloat16)
    matrices = {name for name, value in expected.items() if value.dim() > 1}
    return {
        "gathered": sum(gathered),
        "largest": max(gathered),
        "held": sum(x.numel() * x.element_size() for x in taken.values()),
        "names": expected.keys() - taken.keys(),
        "equal": all(
            torch.equal(value, expected[name].bfloat16() if name in matrices else expected[name])
            for name, value in taken.items()
        ),
        "float64": sum(x.numel() * 8 for x in expected.values()),
        "tied": expected["lm_head.weight"].numel() * 8,
        "vectors": sum(x.numel() * 8 for name, x in expected.items() if name not in matrices),
        "devices": {str(value.device) for value in taken.values()},
    }


def broken(ranks):
    """Weights that stop coming: the engine refuses to serve until it has whole ones again."""
    model = wrap(build("grpo"), "fsdp2", "grpo")
    engine = engine_of()
    updater = InProcessUpdater(Policy(engine))
    sharded.BUCKET_BYTES = 1 << 14
    updater.policy.is_failing = True
    first = push(ranks, model, updater)
    serving = error_of(lambda: engine.generate([[1, 2]], SamplingParameters()))
    updater.policy.is_failing = False
    second = push(ranks, model, updater)
    return first, serving, second, error_of(lambda: engine.generate([[1]], SamplingParameters()))


def everyone_pushes(ranks):
    """Each rank has an engine of its own."""
    model = wrap(build("grpo"), "fsdp2", "grpo")
    engine = engine_of()
    version = InProcessUpdater(Policy(engine)).push(model, version=5)
    expected = build("grpo").state_dict()
    values = engine.model.state_dict()
    return version, all(torch.equal(values[name], x) for name, x in expected.items())


def nobody_pushes(ranks):
    model = wrap(build("grpo"), "fsdp2", "grpo")
    return error_of(lambda: contribute_weights(model)), contribute_weights(build("grpo"))


def by_broadcast(ranks):
    """Through the transfer to vLLM's workers, of which a thread here is one."""
    model = build("grpo").float()
    expected = model.state_dict()
    for part in (*model.model.layers, model):
        fully_shard(part)
    if ranks.rank:
        return contribute_weights(model)
    worker = Worker(model)
    transfer = C10dWeightTransfer(worker.rpc, bucket_bytes=1 << 13)
    with sharded.pushed_weights(model) as weights:
        outcome = transfer.send(transfer.expected.check(weights, who="transfer"))
    transfer.close()
    del expected["lm_head.weight"]  # tied to the embedding, and sent once
    same = all(
        torch.equal(worker.weights[name], value.bfloat16() if value.dim() > 1 else value)
        for name, value in expected.items()
    )
    return outcome, same, worker.weights.keys() == expected.keys()


class Worker:
    """Receives what a transfer sends."""

    def __init__(self, model):
        named = dict(model.named_parameters(remove_duplicate=False))
        self.message = ExpectedWeights.of(named).message

    def rpc(self, method, *arguments):
        if method == "torchrl_limits":
            return {"num_workers": 1, "dtype": "bfloat16"}
        if method == "torchrl_join":
            address, port, size, device, timeout_s = arguments
            self.group = stateless_init_process_group(
                address, port, 1, size, device, timeout_s=timeout_s
            )
            return self.message
        layout, self.weights = WeightLayout(**arguments[0]), {}
        for bucket in layout.buckets():
            flat = torch.empty(layout.size_of(bucket), dtype=torch.uint8)
            self.group.broadcast(flat)
            self.weights |= layout.views(flat, bucket)
        return {}


def scenarios():
    for size, case in ((2, "grpo"), (2, "lora"), (4, "grpo")):
        yield (
            f"push, {size} ranks, {case}",
            lambda size=size, case=case: run_ranks(size, lambda r: pushes(r, case)),
        )
    for size in (2, 4):
        yield f"snapshot, {size} ranks", lambda size=size: run_ranks(size, snapshots)
    for function in (broken, everyone_pushes, nobody_pushes, by_broadcast):
        yield function.__name__, lambda function=function: run_ranks(2, function)
