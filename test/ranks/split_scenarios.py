"""What test_split_models.py looks at: models that ranks compute together, beside one process.

As in training_scenarios.py everything is computed in float64.
"""

import torch
from forked_ranks import run_ranks
from split_models import SPLITS, build
from training_scenarios import Actor, parameters_of, rows_of

from objectives import GRPOLoss, GRPOLossOutput, NonFiniteGate, Ranks
from torchrl_agents.optimizers import build_optimizer
from torchrl_agents.settings.schema import OptimConfig
from torchrl_modules import SamplingParameters, split_model

NUM_STEPS = 2


def train(size, case):
    """Losses, norms and metrics of two steps, parameters, and bytes of the parameters here."""
    kind, matrices, experts = SPLITS[case]
    ranks = Ranks.alone()
    if size > 1:
        ranks = Ranks.join(device="cpu", tensor_parallel_size=matrices)
    with torch.device("meta" if ranks.rank else "cpu"):  # rank 0 gives the weights
        model = build(kind)
    if size > 1:
        split_model(
            model,
            tensor_parallel_size=matrices,
            expert_parallel_size=experts,
            prepare=ranks.copy_from_first,
        )
    actor = Actor(model, None)
    num_bytes = {name: bytes_of(value) for name, value in model.named_parameters()}
    loss = GRPOLoss(actor, kl_to_ref_coeff=0.1, entropy_bonus=True)
    settings = OptimConfig(learning_rate=1e-3, weight_decay=0.1)
    gate = NonFiniteGate(
        build_optimizer(settings, list(actor.parameters())), max_grad_norm=0.5, ranks=ranks
    )
    # Of logits that are changed one by one ranks need all.
    penalty = SamplingParameters(repetition_penalty=1.3)
    ids, lengths, is_target = torch.arange(9), torch.tensor([5, 4]), torch.arange(9) % 5 > 0
    with_penalty = actor.score_packed(ids, lengths, is_target, truncation=penalty).log_prob
    steps = []
    for step in range(NUM_STEPS):
        packed = loss.pack(rows_of(step, 7)) if ranks.rank == 0 else None
        parts = ranks.scatter(packed, max_tokens=40)
        window = loss.measure_window(parts, ranks=ranks)
        outputs = []
        for part in parts:
            outputs.append(loss(part, window=window))
            gate.backward(outputs[-1], part)
        outcome = gate.step()
        found = GRPOLossOutput.combine(outputs, ranks=ranks)
        metrics = {name: float(value) for name, value in found.items() if value is not None}
        steps.append(metrics | {"total": float(found.total()), "norm": outcome.grad_norm})
    return {
        "steps": steps,
        "rows": [part.ids.tolist() for part in parts],
        "parameters": parameters_of(actor),
        "with penalty": with_penalty.detach(),
        "head in tiles": actor.scorer.packed and actor.scorer.reading.has_plain_head,
        "bytes": num_bytes,
    }


def bytes_of(value):
    own = value.to_local() if hasattr(value, "to_local") else value
    return own.untyped_storage().nbytes()


def scenarios():
    for case in SPLITS:
        yield f"one process, split {case}", lambda case=case: train(1, case)
    for size in (2, 4):
        cases = [case for case, (_, *sizes) in SPLITS.items() if max(sizes) <= size]
        yield (
            f"{size} ranks, split",
            lambda size=size, cases=cases: run_ranks(
                size, lambda _: {case: train(size, case) for case in cases}
            ),
        )
