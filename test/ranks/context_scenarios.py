"""What test_context_parallel.py looks at: rows whose tokens ranks share out, beside one process.

As in training_scenarios.py everything is computed in float64. Ranks get the micro-batches that one
process has, so that the float32 norms of Qwen3 round alike.
"""

import torch
from context_cases import CASES, RUNS
from forked_ranks import run_ranks
from peft import LoraConfig, get_peft_model
from split_models import mixture
from tensordict import lazy_stack
from torch.nn.parallel import DistributedDataParallel
from training_scenarios import (
    Collectives,
    build,
    error_of,
    parameters_of,
    rows_of,
    wrap,
)
from transformers import Gemma2Config, Gemma2ForCausalLM

from objectives import NonFiniteGate, Ranks
from torchrl_data.sampling_masks import SamplingMasks
from torchrl_modules import SamplingParameters
from torchrl_modules.scoring.context_share import GATHER, SUM
from torchrl_modules.scoring.scorer import PackedScorer
from torchrl_modules.tiny_model import tiny_qwen3

PROMPT = torch.arange(20, 31)


def model_of(case):
    torch.manual_seed(0)
    if case == "mixture":
        return mixture(64, experts_implementation="eager").double()
    if case == "capped scores, windows":
        return gemma2().double()
    return build(case if case in ("lora", "activation checkpointing") else "grpo")


def gemma2():
    """Layers with windows of 7 tokens and without, scores capped at 3."""
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=7,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=None,
        initializer_range=0.2,
    )
    return Gemma2ForCausalLM(config).eval()


class Actor(torch.nn.Module):
    """The scorer of a model whose rows ranks share out."""

    def __init__(self, model, group):
        super().__init__()
        self.model = model
        self.scorer = PackedScorer(model, context_group=group)
        self.score_packed = self.scorer.score_packed
        self.is_distributed = self.scorer.is_distributed


def rows_for(case, step, count, *, alike):
    """Rows of which two of three begin with a prompt, or the shortest row."""
    if case == "two tokens":
        return lazy_stack([rows_of(step, 1)[0].apply(lambda x: x[-2:], batch_size=[])])
    rows = []
    for number, row in enumerate(rows_of(step, count).unbind(0)):
        if alike and number % 3:
            ids = row["tokens", "full"]
            shared = min(len(ids) - 1, len(PROMPT))
            row["tokens", "full"] = torch.cat([PROMPT[:shared], ids[shared:]])
        rows.append(row)
    return lazy_stack(rows)


def train(ranks, how, case, *, alike=True):
    """Losses, norms and metrics of two steps of AdamW with clipping, and the parameters."""
    kind, options, num_rows = CASES[case]
    actor = Actor(wrap_any(model_of(case), how, case), ranks.context_group)
    loss = kind(actor, **options)
    trained = [p for p in actor.parameters() if p.requires_grad]
    gate = NonFiniteGate(
        torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1), max_grad_norm=0.5, ranks=ranks
    )
    output = kind.output_type
    steps, read = [], []
    for step in range(2):
        rows = rows_for(case, step, num_rows, alike=alike)
        packed = loss.pack(rows) if ranks.rank == 0 else None
        parts = ranks.scatter(packed, max_tokens=60)
        window = loss.measure_window(parts, ranks=ranks)
        outputs = []
        for part in ranks.reduced_once(actor.model, parts):
            with tokens_read(actor.scorer.model, read):
                outputs.append(loss(part, window=window))
            gate.backward(outputs[-1], part)
        outcome = gate.step()
        found = output.combine(outputs, ranks=ranks)
        metrics = {name: float(value) for name, value in found.items() if value is not None}
        steps.append(metrics | {"total": float(found.total()), "norm": outcome.grad_norm})
    return {"steps": steps, "parameters": parameters_of(actor), "read": read}


def wrap_any(model, how, case):
    """As in training_scenarios.py; FSDP2 knows the layers of Qwen3 alone."""
    if how == "fsdp2" and case in ("mixture", "capped scores, windows"):
        return DistributedDataParallel(model)
    return wrap(model, how, case)


class tokens_read:
    """Notes how many tokens the model embeds."""

    def __init__(self, model, noted):
        self.table, self.noted = model.get_input_embeddings(), noted

    def __enter__(self):
        self.hook = self.table.register_forward_hook(
            lambda _, inputs, __: self.noted.append(inputs[0].numel())
        )

    def __exit__(self, *error):
        self.hook.remove()


def scores(ranks):
    """Scores of every kind, with a penalty, with sets, in small passes, with given experts."""
    torch.manual_seed(0)
    model = build("grpo")
    sparse = model_of("mixture")
    if ranks.size > 1:
        model, sparse = DistributedDataParallel(model), DistributedDataParallel(sparse)
    scorer = PackedScorer(model, context_group=ranks.context_group)
    of_sparse = PackedScorer(sparse, context_group=ranks.context_group)
    lengths = torch.tensor([13, 1, 9, 20])
    ids = torch.randint(0, 64, (43,))
    ids[23:34] = ids[:11]
    is_target = torch.arange(43) % 3 > 0
    is_target[torch.tensor([0, 13, 14, 23])] = False
    targets = ids[is_target]
    sets = [[int(x), (int(x) + 1) % 64, (int(x) + 7) % 64] for x in targets]
    whole = {"entropy": True, "untempered": True, "temperature": 0.7}
    penalty = {"truncation": SamplingParameters(repetition_penalty=1.3, top_k=9)}
    masks = {"sampling_masks": SamplingMasks.from_ids(sets, vocab_size=64)}
    experts = torch.stack([torch.randperm(4)[:2] for _ in range(86)]).view(43, 2, 2)
    found = {
        name: scorer.score_packed(ids, lengths, is_target, **options)
        for name, options in {"plain": whole, "penalty": penalty, "masks": masks}.items()
    }
    given = experts.to(torch.uint8)
    found["experts"] = of_sparse.score_packed(ids, lengths, is_target, routed_experts=given)
    found["others"] = scorer.score_packed(ids, lengths, is_target, targets=(targets + 5) % 64)
    with torch.no_grad():
        scorer.micro_batch_tokens = 15
        found["small passes"] = scorer.score_packed(ids, lengths, is_target)
        nothing = scorer.score_packed(ids, lengths, torch.zeros_like(is_target))
    found["nothing"] = [nothing.log_prob.double()]
    return {
        name: [None if x is None else x.detach() for x in scores] for name, scores in found.items()
    }


def messages(ranks):
    """Tensors that ranks send each other in a pass over one row, by what they do with them."""
    model = DistributedDataParallel(tiny_qwen3(64, num_layers=3, head_dim=16).double())
    scorer = PackedScorer(model, context_group=ranks.context_group)
    ids, mask = torch.arange(64), torch.arange(64) > 0
    with (
        Collectives(GATHER) as gathered,
        Collectives(SUM) as sums,
    ):
        log_prob = scorer.score_packed(ids, torch.tensor([64]), mask).log_prob
        forward = [tuple(x.shape) for x in gathered]
        log_prob.sum().backward()
    backward = [tuple(x.shape) for x in gathered[len(forward) :]]
    return forward, backward, [tuple(x.shape) for x in sums]


def refused(ranks):
    """What of a model, and of a call, is refused by every rank."""
    group = ranks.context_group
    plain = build("grpo")
    padded = DistributedDataParallel(tiny_qwen3(64))
    adapted = get_peft_model(build("grpo"), LoraConfig(r=2, target_modules=["q_proj"]))
    drops = tiny_qwen3(64)
    drops.config.attention_dropout = 0.5
    scorer = PackedScorer(DistributedDataParallel(drops), context_group=group)
    drops.train()
    row = (torch.arange(9), torch.tensor([9]), torch.arange(9) > 0)
    frozen = PackedScorer(tiny_qwen3(64).requires_grad_(False), context_group=group)
    return [
        error_of(lambda: PackedScorer(plain, context_group=group)),
        error_of(lambda: PackedScorer(padded, pack=False, context_group=group)),
        error_of(lambda: PackedScorer(adapted, context_group=group)),
        error_of(lambda: scorer.score_packed(*row)),
        error_of(lambda: frozen.score_packed(*row)),
    ]


def joined(**sizes):
    return error_of(lambda: Ranks.join(device="cpu", **sizes))


def scenarios():
    for alike in (True, False):
        cases = CASES if alike else ("grpo", "lora")
        for case in cases:
            yield (
                f"one process, context, {case}, {alike}",
                lambda case=case, alike=alike: train(Ranks.alone(), "none", case, alike=alike),
            )
    for name, (size, together, how) in RUNS.items():
        alike = size == together  # else other rows are read beside each other
        cases = CASES if alike else ("grpo", "lora")
        yield (
            f"context, {name}",
            lambda size=size, together=together, how=how, alike=alike, cases=cases: run_ranks(
                size,
                lambda ranks: {case: train(ranks, how, case, alike=alike) for case in cases},
                context_parallel_size=together,
            ),
        )
    yield "one process, context, scores", lambda: scores(Ranks.alone())
    for size in (2, 4):
        yield (
            f"context, scores, {size} ranks",
            lambda size=size: run_ranks(size, scores, context_parallel_size=size),
        )
    yield "context, messages", lambda: run_ranks(2, messages, context_parallel_size=2)
    yield "context, refused", lambda: run_ranks(2, refused, context_parallel_size=2)
