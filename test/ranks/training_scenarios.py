"""What test_ranks.py looks at: training by several ranks, beside one process with all the rows.

Everything is computed in float64, so that the order of a sum does not matter: AdamW divides by the
root of a gradient's square, which makes steps of full size of the rounding of a gradient near 0.
"""

import contextlib
import itertools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict, lazy_stack
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from objectives import (
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    KTOLoss,
    NonFiniteGate,
    Ranks,
    SFTLoss,
    TokenFilters,
)
from objectives.batching.gradient_norm import norm_over
from torchrl_agents import parallel
from torchrl_agents.settings.schema import TrainConfig
from torchrl_modules.scoring.scorer import PackedScorer
from torchrl_modules.tiny_model import tiny_qwen3

NUM_STEPS = 2
CASES = {
    "grpo": (GRPOLoss, {"kl_to_ref_coeff": 0.1, "entropy_bonus": True}, 11),
    "grpo, empty ranks": (GRPOLoss, {"aggregation": "sequence_mean"}, 1),
    "grpo, entropy of the window": (
        GRPOLoss,
        {"filters": TokenFilters(top_entropy_fraction=0.3)},
        7,
    ),
    "grpo, rows without a signal": (GRPOLoss, {"skip_rows_without_signal": True}, 6),
    "sft": (SFTLoss, {"allow_empty": True}, 5),
    "preferences": (DPOLoss, {"sft_coeff": 0.5, "allow_empty": True}, 6),
    "labels": (KTOLoss, {"allow_empty": True}, 5),
    "distillation": (DistillationLoss, {"allow_empty": True}, 3),
    "lora": (GRPOLoss, {}, 5),
    "activation checkpointing": (GRPOLoss, {}, 5),
    "bfloat16": (GRPOLoss, {}, 5),
}
FEW = ("grpo", "grpo, empty ranks")


def build(case):
    torch.manual_seed(0)
    model = tiny_qwen3(64, hidden_size=32, head_dim=16, initializer_range=0.2)
    model = model if case == "bfloat16" else model.double()
    if case == "activation checkpointing":
        model.gradient_checkpointing_enable()
        model.train()
    if case == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        model = model.double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def wrap(model, how, case):
    if how == "ddp":
        return DistributedDataParallel(model)
    if how in ("fsdp2", "hsdp"):
        sizes = {"shard": dist.get_world_size()}
        sizes = {"replicate": 2, "shard": 2} if how == "hsdp" else sizes
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        policy = MixedPrecisionPolicy()
        if case == "bfloat16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        layers = [x for x in model.modules() if type(x).__name__ == "Qwen3DecoderLayer"]
        for part in (*layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


class Actor(torch.nn.Module):
    """The scorer of a model, without a tokenizer and an engine."""

    def __init__(self, model, autocast_dtype):
        super().__init__()
        self.model = model
        self.scorer = PackedScorer(model, autocast_dtype=autocast_dtype)
        self.score_packed = self.scorer.score_packed

    @property
    def is_distributed(self):
        return self.scorer.is_distributed


def rows_of(step, count):
    generator = torch.Generator().manual_seed(step)

    def uniform(length):
        return torch.rand(length, generator=generator, dtype=torch.float64)

    rows = []
    for index in range(count):
        length = int(torch.randint(3, 20, (), generator=generator))
        mask = uniform(length) < 0.6
        mask[-1] = True
        advantage = uniform(1) - 0.5
        entries = {
            ("tokens", "full"): torch.randint(0, 64, (length,), generator=generator),
            ("masks", "all_assistant_mask"): mask,
            ("log_probs", "full"): -5 * uniform(length),
            ("next", "ref_log_probs", "full"): -5 * uniform(length),
            ("next", "teacher_log_probs", "full"): -5 * uniform(length),
            "advantage": advantage if index % 3 else torch.zeros_like(advantage),
            "pair_id": torch.tensor([index // 2]),
            "chosen": torch.tensor([index % 2 == 0]),
            "label": torch.tensor([index % 3 == 0]),
            "mismatched": torch.tensor([index % 2 == 1]),
        }
        rows.append(TensorDict(entries))
    return lazy_stack(rows)


def train(ranks, how, case):
    """Losses, norms and metrics of each step, parameters, rows of each micro-batch."""
    kind, options, num_rows = CASES[case]
    autocast = torch.bfloat16 if case == "bfloat16" and how != "fsdp2" else None
    actor = Actor(wrap(build(case), how, case), autocast)
    loss = kind(actor, **options)
    trained = [p for p in actor.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
    gate = NonFiniteGate(optimizer, max_grad_norm=0.5, ranks=ranks)
    output = kind.output_type
    steps, shares = [], []
    for step in range(NUM_STEPS):
        packed = loss.pack(rows_of(step, num_rows)) if ranks.rank == 0 else None
        parts = ranks.scatter(packed, max_tokens=40)
        window = loss.measure_window(parts, ranks=ranks)
        outputs = []
        for part in ranks.reduced_once(actor.model, parts) if case in FEW else parts:
            outputs.append(loss(part, window=window))
            gate.backward(outputs[-1], part)
        outcome = gate.step()
        found = output.combine(outputs, ranks=ranks)
        metrics = {name: float(value) for name, value in found.items() if value is not None}
        steps.append(metrics | {"total": float(found.total()), "norm": outcome.grad_norm})
        shares.append([part.num_rows for part in parts])
    return {"steps": steps, "parameters": parameters_of(actor), "shares": shares}


def parameters_of(actor):
    named = [(name.replace("module.", ""), p.detach()) for name, p in actor.named_parameters()]
    return {name: getattr(p, "full_tensor", lambda p=p: p)().clone() for name, p in named}


def one_nan(ranks, how):
    """One rank's loss is not finite, and one rank's gradients were not reduced."""
    actor = Actor(wrap(build("grpo"), how, "grpo"), None)
    before = parameters_of(actor)
    loss = GRPOLoss(actor, old_policy="recomputed")
    gate = NonFiniteGate(torch.optim.SGD(actor.parameters(), lr=0.1), ranks=ranks)
    packed = None
    if ranks.rank == 0:
        rows = rows_of(0, 6)
        for row in rows.unbind(0):
            row["old_log_probs", "full"] = row["log_probs", "full"]
        packed = loss.pack(rows)
    parts = ranks.scatter(packed, max_tokens=1000)
    window = loss.measure_window(parts, ranks=ranks)
    outcomes = []
    for spoilt in (True, False):
        output = loss(parts[0], window=window)
        if spoilt and ranks.rank == 1:
            output.loss_objective = output.loss_objective * float("nan")
        gate.backward(output)
        outcomes.append(gate.step())
        if spoilt:
            kept = parameters_of(actor)
    same = all(torch.equal(kept[name], before[name]) for name in before)
    return {"outcomes": [tuple(outcome) for outcome in outcomes], "kept": same}


def reduced(ranks, how):
    """Gradients and reductions of four micro-batches, reduced each time and once."""
    found = {}
    for name in ("each", "once"):
        actor = Actor(wrap(build("grpo"), how, "grpo"), None)
        loss = GRPOLoss(actor)
        packed = loss.pack(rows_of(0, 4 * ranks.size)) if ranks.rank == 0 else None
        parts = ranks.scatter(packed, max_tokens=1000)
        (part,) = parts
        lengths = [part.run(i, i + 1) for i in range(4)]
        count = counted(actor.model) if how == "ddp" else Collectives("reduce_scatter_single")
        with count as calls:
            given = lengths if name == "each" else ranks.reduced_once(actor.model, lengths)
            for each in given:
                loss(each).total().backward()
        grads = [p.grad.full_tensor() if how == "fsdp2" else p.grad for p in actor.parameters()]
        found[name] = {"num": len(calls), "grads": grads}
    return found


@contextlib.contextmanager
def counted(model):
    """The buckets that `DistributedDataParallel` reduces."""
    calls = []

    def reduce(_, bucket):
        calls.append(bucket.buffer())
        return default_hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(None, reduce)
    yield calls


class Collectives:
    """Tensors that are given to a collective of torch.distributed: what it receives into first."""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.calls, self.inside = [], getattr(dist, self.name)

        def call(*args, **kwargs):
            self.calls.append((args or tuple(kwargs.values()))[0])
            return self.inside(*args, **kwargs)

        setattr(dist, self.name, call)
        return self.calls

    def __exit__(self, *error):
        setattr(dist, self.name, self.inside)


def settings_of(**train):
    """What `parallel` asks of a run's settings."""
    return SimpleNamespace(train=TrainConfig(**{"parallel": "fsdp2", "autocast": False} | train))


def gathered(ranks, how):
    """Bytes and types of a forward and a backward pass, in float32 and under autocast."""
    del how
    parallel.transformers_policy = lambda _, model, *__, **___: model
    found = []
    for autocast in (False, True):
        model = parallel._wrapped(settings_of(autocast=autocast), ranks, build("bfloat16"), None)
        dtype = torch.bfloat16 if autocast else None
        loss = GRPOLoss(Actor(model, dtype))
        packed = loss.pack(rows_of(0, 4)) if ranks.rank == 0 else None
        (part,) = ranks.scatter(packed, max_tokens=1000)
        gathers, reductions = Collectives("all_gather_single"), "reduce_scatter_single"
        with gathers as came, Collectives(reductions) as went:
            loss(part).total().backward()
        found.append(
            {
                "bytes": sum(x.numel() * x.element_size() for x in came),
                "dtypes": {x.dtype for x in came},
                "reduced": {x.dtype for x in went},
            }
        )
    return found


def loaded(ranks, how):
    """Bytes of tensors of a rank while it takes its shards of a model that rank 0 has."""
    del how
    parallel.transformers_policy = lambda _, model, *__, **___: model

    def made():
        torch.manual_seed(ranks.rank)
        return tiny_qwen3(64, hidden_size=64, head_dim=16, num_layers=16, intermediate_size=256)

    if ranks.rank == 0:
        model = made()
        expected = {name: x.detach().clone() for name, x in model.named_parameters()}
    else:
        with torch.device("meta"):
            model = made()
        expected = {}
    is_meta = all(x.is_meta for x in model.parameters())
    num_bytes = sum(x.numel() * 4 for x in model.parameters())
    with torch.profiler.profile(profile_memory=True) as profile:
        model = parallel._wrapped(settings_of(), ranks, model, None)
    events = [x for x in profile.profiler.kineto_results.events() if x.name() == "[memory]"]
    changes = [x.nbytes() for x in sorted(events, key=lambda x: x.start_ns())]
    peak = max(itertools.accumulate(changes))
    same = []
    for name, value in model.named_parameters():
        whole = value.full_tensor()
        (first,) = ranks.broadcast([expected.get(name)])
        same.append(torch.equal(whole, first))
    return {"peak": peak, "model": num_bytes, "equal": all(same), "on meta before": is_meta}


def unreduced(ranks, how):
    """A model that is in no wrapper; parts of it that are sharded by themselves."""
    del how
    model = build("grpo")
    loss = GRPOLoss(Actor(model, None))
    gate = NonFiniteGate(torch.optim.SGD(loss.parameters(), lr=0.1), ranks=ranks)
    packed = loss.pack(rows_of(0, 6)) if ranks.rank == 0 else None
    gate.backward(loss(ranks.scatter(packed, max_tokens=1000)[0]))
    errors = [error_of(gate.step)]
    fully_shard(model.model.layers[0])
    errors.append(error_of(lambda: PackedScorer(model)))
    fully_shard(model)
    sharded = torch.optim.SGD(model.parameters(), lr=0.1)
    errors.append(error_of(lambda: NonFiniteGate(sharded)))
    return errors


def partly_sharded(ranks, how):
    """A gradient of which one tensor is sharded, of norm 12, and one is whole, of norm 5."""
    del how
    mesh = init_device_mesh("cpu", (ranks.size,))
    sharded = distribute_tensor(torch.full((4,), 6.0), mesh, [Shard(0)])
    return float(norm_over(ranks, [sharded, torch.tensor([3.0, 4.0])]))


def averaged(ranks, how):
    """Gradients of parameters of two types, of which rank 1 has not all, and one has none."""
    del how
    kinds = (torch.float32, torch.float32, torch.bfloat16, torch.float32)
    parameters = [torch.nn.Parameter(torch.zeros(2, 1, dtype=kind)) for kind in kinds]
    for place, parameter in enumerate(parameters[:3]):
        if ranks.rank == 0 or place != 1:
            value = 10.0 * (place + 1) * (1 - 3 * ranks.rank)
            parameter.grad = torch.full_like(parameter, value)
    ranks.average_gradients(parameters)
    grads = [None if each.grad is None else each.grad.flatten().tolist() for each in parameters]
    odd = parameters if ranks.rank else parameters[:1]
    return grads, error_of(lambda: ranks.average_gradients(odd))


def limited_passes(ranks, how):
    """Passes without a gradient, of which ranks would need different numbers."""
    scorer = PackedScorer(wrap(build("grpo"), how, "grpo"), micro_batch_tokens=8)
    num_rows = 1 + 3 * ranks.rank
    ids = torch.arange(6 * num_rows) % 64
    mask = torch.arange(6 * num_rows) % 6 > 0
    with torch.no_grad():
        found = scorer.score_packed(ids, torch.full((num_rows,), 6), mask).log_prob
    expected = PackedScorer(build("grpo")).score_packed(ids, torch.full((num_rows,), 6), mask)
    torch.testing.assert_close(found, expected.log_prob.detach())
    return len(found)


def failing(ranks, how):
    del how
    if ranks.rank == 1:
        raise ValueError("the disk of rank 1 is full")
    return ranks.gather(0)


def stuck(ranks, how):
    """Rank 1 sleeps on: the others do not wait for ever."""
    del how
    if ranks.rank == 1:
        import time

        time.sleep(8)
        return None
    return error_of(lambda: ranks.broadcast(ranks.gather(0)))


def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def scenarios():
    for case in CASES:
        yield f"one process, {case}", lambda case=case: train(Ranks.alone(), "none", case)
    for size, cases in ((2, CASES), (4, FEW)):
        for how in ("ddp", "fsdp2"):
            yield (
                f"{size} ranks, {how}",
                lambda size=size, how=how, cases=cases: run_ranks(
                    size, lambda ranks: {case: train(ranks, how, case) for case in cases}
                ),
            )
    for how in ("ddp", "fsdp2"):
        yield f"one nan, {how}", lambda how=how: run_ranks(2, lambda r: one_nan(r, how))
        yield f"reduced, {how}", lambda how=how: run_ranks(2, lambda r: reduced(r, how))
    yield (
        "4 ranks, hsdp",
        lambda: run_ranks(4, lambda r: {x: train(r, "hsdp", x) for x in ("grpo", "lora")}),
    )
    yield "gathered", lambda: run_ranks(2, lambda r: gathered(r, ""))
    for size in (2, 4):
        yield f"loaded, {size} ranks", lambda size=size: run_ranks(size, lambda r: loaded(r, ""))
    yield "limited", lambda: run_ranks(2, lambda r: limited_passes(r, "fsdp2"))
    yield "partly sharded", lambda: run_ranks(2, lambda r: partly_sharded(r, ""))
    yield "averaged", lambda: run_ranks(2, lambda r: averaged(r, ""))
    yield "unreduced", lambda: run_ranks(2, lambda r: unreduced(r, ""))
    yield "failing", lambda: error_of(lambda: run_ranks(2, lambda r: failing(r, "")))
    yield "stuck", lambda: run_ranks(2, lambda r: stuck(r, ""), wait_s=3.0)
