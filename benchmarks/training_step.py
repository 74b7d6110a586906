"""P1: one training step (forward, backward, GRPO loss) on a ragged batch of groups.

    python benchmarks/training_step.py [--cases 32k,152k,long] [--repeats 5] [--without-peers]

A Qwen3-shaped model; every variant computes the same clipped loss (token mean) and the gradient of
all parameters, which is checked first. ``limit`` is written by hand: shared prompts, packed
responses, and a head that knows the loss, whose gradient takes one pass. ``trl`` is the loss of
TRL's GRPOTrainer, ``torchrl`` TorchRL's masked distribution over all padded positions. CPU seconds,
interleaved in one process, medians; peak memory above the model's, each in its own process.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor
from torch.nn.functional import pad as pad_tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM

from objectives import GRPOLoss
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import train_tokenizer

LOW, HIGH = 0.8, 1.2


class Case(NamedTuple):
    vocabulary: int
    num_groups: int
    group_size: int
    prompt_tokens: int
    log_mean: float


CASES = {
    "32k": Case(32_000, 2, 8, 65, 5.25),
    "152k": Case(151_936, 1, 8, 65, 5.25),
    "long": Case(32_000, 2, 8, 512, 5.1),
}


class Batch(NamedTuple):
    """The same rows in every layout."""

    prompts: list[Tensor]
    responses: list[list[Tensor]]
    old: list[list[Tensor]]
    advantages: Tensor
    rows: Any

    @property
    def num_trained(self) -> int:
        return sum(len(r) for group in self.responses for r in group)


def make_model(case: Case) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocabulary,
        hidden_size=512,
        intermediate_size=832,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).float()


def make_batch(case: Case) -> Batch:
    draw = torch.Generator().manual_seed(1)
    prompts, responses, old, rows = [], [], [], []
    advantages = torch.randn(case.num_groups * case.group_size, generator=draw)
    for group in range(case.num_groups):
        prompt = torch.randint(case.vocabulary, (case.prompt_tokens,), generator=draw)
        lengths = torch.empty(case.group_size).log_normal_(case.log_mean, 0.5, generator=draw)
        sizes = lengths.int().clamp(16, 800).tolist()
        answers = [torch.randint(case.vocabulary, (n,), generator=draw) for n in sizes]
        behaviour = [-10.4 - 0.4 * torch.rand(n, generator=draw) for n in sizes]
        if case.vocabulary > 100_000:
            behaviour = [values - 1.55 for values in behaviour]
        prompts.append(prompt)
        responses.append(answers)
        old.append(behaviour)
        for member, (answer, values) in enumerate(zip(answers, behaviour, strict=True)):
            ids = torch.cat([prompt, answer])
            rows.append(
                TensorDict(
                    {
                        "tokens": {"full": ids},
                        "masks": {
                            "all_assistant_mask": torch.arange(len(ids)) >= len(prompt),
                            "all_attention_mask": torch.ones(len(ids), dtype=torch.bool),
                        },
                        "log_probs": {"full": pad_tensor(values, (len(prompt), 0))},
                        "advantage": advantages[group * case.group_size + member].view(1, 1),
                    },
                    batch_size=[],
                )
            )
    return Batch(prompts, responses, old, advantages, lazy_stack(rows))


def surrogate(log_prob: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (log_prob - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(LOW, HIGH) * advantage)


# The limit ----------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Per group: tokens of the prompt, and of each response."""

    groups: list[tuple[int, list[int]]]


def grouped_attention(module, query, key, value, attention_mask, shape=None, **kwargs):  # noqa: ARG001
    out, at = [], 0
    for prompt, sizes in shape.groups:
        above = slice(at, at + prompt)
        q, k, v = (x[:, :, above] for x in (query, key, value))
        out.append(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        at += prompt
        for size in sizes:
            own = slice(at, at + size)
            keys = torch.cat([k, key[:, :, own]], 2)
            values = torch.cat([v, value[:, :, own]], 2)
            sees = torch.ones(size, prompt + size, dtype=torch.bool).tril(prompt)
            out.append(
                scaled_dot_product_attention(
                    query[:, :, own], keys, values, attn_mask=sees, enable_gqa=True
                )
            )
            at += size
    return torch.cat(out, 2).transpose(1, 2), None


AttentionInterface.register("limit", grouped_attention)
AttentionMaskInterface.register("limit", lambda *_, **__: None)


class OnePassHead(torch.autograd.Function):
    """Loss and gradient together: three products of the size K x V x D instead of four."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, old, advantage):
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total, count = hidden.new_zeros(()), len(hidden)
        rows = max(64, (32 << 20) // (4 * len(weight)))
        for start in range(0, count, rows):
            some = slice(start, start + rows)
            p = torch.log_softmax(hidden[some] @ weight.T, -1)
            log_prob = p.gather(1, targets[some, None]).squeeze(1)
            with torch.enable_grad():
                leaf = log_prob.detach().requires_grad_()
                loss = surrogate(leaf, old[some], advantage[some]).sum() / count
                (g,) = torch.autograd.grad(loss, leaf)
            total += loss.detach()
            p.exp_().mul_(-g[:, None]).scatter_add_(1, targets[some, None], g[:, None])
            torch.mm(p, weight, out=grad_hidden[some])
            grad_weight.addmm_(p.T, hidden[some])
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        if float(grad) != 1.0:
            grad_hidden, grad_weight = grad_hidden * grad, grad_weight * grad
        return grad_hidden, grad_weight, None, None, None


def grouped_inputs(batch: Batch) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What the model reads, which of its outputs predict a trained token, and those tokens."""
    ids, positions, at, predictors, targets, shape = [], [], 0, [], [], []
    for prompt, answers in zip(batch.prompts, batch.responses, strict=True):
        # The last token of a response predicts nothing.
        ids += [prompt, *(a[:-1] for a in answers)]
        positions += [torch.arange(len(prompt))]
        last, at = at + len(prompt) - 1, at + len(prompt)
        for answer in answers:
            n = len(answer)
            positions.append(torch.arange(len(prompt), len(prompt) + n - 1))
            predictors += [torch.tensor([last]), torch.arange(at, at + n - 1)]
            at += n - 1
        targets += answers
        shape.append((len(prompt), [len(a) - 1 for a in answers]))
    inputs = {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat(positions)[None],
        "shape": Shape(shape),
    }
    return inputs, torch.cat(predictors), torch.cat(targets)


def limit(model: Qwen3ForCausalLM, batch: Batch) -> Callable[[], Tensor]:
    answers = [answer for group in batch.responses for answer in group]

    def run() -> Tensor:
        model.set_attn_implementation("limit")
        inputs, predictors, targets = grouped_inputs(batch)
        old = torch.cat([values for group in batch.old for values in group])
        advantage = torch.cat(
            [a.expand(len(r)) for a, r in zip(batch.advantages, answers, strict=True)]
        )
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[0, predictors]
        return OnePassHead.apply(hidden, model.lm_head.weight, targets, old, advantage)

    return run


# Ours and the others ------------------------------------------------------------------------------


def ours(model: Qwen3ForCausalLM, batch: Batch, **options: Any) -> Callable[[], Tensor]:
    model.set_attn_implementation("sdpa")
    tokenizer = train_tokenizer(["a b c"], vocab_size=270)
    policy = TransformersWrapper(model, tokenizer=tokenizer, chat_template_name="chatml")
    for name, value in options.items():
        setattr(policy.scorer, name, value)
    loss = GRPOLoss(policy, clip_epsilon=(1 - LOW, HIGH - 1))

    def run() -> Tensor:
        model.set_attn_implementation("packed_rows")
        return loss(batch.rows).total()

    return run


class Padded(NamedTuple):
    ids: Tensor
    attention: Tensor
    trained: Tensor
    old: Tensor
    advantage: Tensor


def padded(batch: Batch) -> Padded:
    rows = batch.rows.unbind(0)

    def column(*key):
        return pad_sequence([row[key] for row in rows], batch_first=True)

    return Padded(
        column("tokens", "full"),
        column("masks", "all_attention_mask").long(),
        column("masks", "all_assistant_mask"),
        column("log_probs", "full"),
        batch.advantages[:, None],
    )


def padded_all(model: Qwen3ForCausalLM, batch: Batch) -> Callable[[], Tensor]:
    given = padded(batch)

    def run() -> Tensor:
        model.set_attn_implementation("sdpa")
        logits = model(input_ids=given.ids, attention_mask=given.attention, use_cache=False).logits
        log_p = logits[:, :-1].log_softmax(-1)
        log_prob = log_p.gather(-1, given.ids[:, 1:, None]).squeeze(-1)
        mask = given.trained[:, 1:]
        loss = surrogate(log_prob, given.old[:, 1:], given.advantage)
        return (loss * mask).sum() / mask.sum()

    return run


def torchrl_parts(model: Qwen3ForCausalLM, batch: Batch) -> Callable[[], Tensor]:
    from torchrl.modules.distributions import LLMMaskedCategorical

    given = padded(batch)

    def run() -> Tensor:
        model.set_attn_implementation("sdpa")
        logits = model(input_ids=given.ids, attention_mask=given.attention, use_cache=False).logits
        logits = pad_tensor(logits.log_softmax(-1)[:, :-1], (0, 0, 1, 0))
        dist = LLMMaskedCategorical(logits=logits, mask=given.trained)
        log_prob = dist.log_prob(given.ids)
        ratio = torch.where(given.trained, log_prob - given.old, 0.0).exp()
        gain = torch.stack([ratio, ratio.clamp(LOW, HIGH)], -1) * given.advantage[..., None]
        loss = -gain.min(-1).values
        return loss[given.trained].sum() / given.trained.sum()

    return run


def trl_loss(model: Qwen3ForCausalLM, batch: Batch) -> Callable[[], Tensor]:
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = train_tokenizer(["a b c"], vocab_size=270)
    size = len(batch.advantages)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=size,
        num_generations=len(batch.responses[0]),
        loss_type="bnpo",
        beta=0.0,
        epsilon=1 - LOW,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_dropout=False,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * size}),
        processing_class=tokenizer,
    )
    prompts, answers, old = [], [], []
    for prompt, group, behaviour in zip(batch.prompts, batch.responses, batch.old, strict=True):
        prompts += [prompt] * len(group)
        answers += group
        old += behaviour
    inputs = {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence(
            [torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left"
        ),
        "completion_ids": pad_sequence(answers, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(a) for a in answers], batch_first=True),
        "old_per_token_logps": pad_sequence(old, batch_first=True),
        "advantages": batch.advantages,
        "num_items_in_batch": torch.tensor(batch.num_trained),
    }
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    def run() -> Tensor:
        model.set_attn_implementation("sdpa")
        return trainer._compute_loss(trainer.model, inputs)

    return run


VARIANTS: dict[str, Callable[[Qwen3ForCausalLM, Batch], Callable[[], Tensor]]] = {
    "limit": limit,
    "ours": ours,
    "ours, prompts not shared": lambda m, b: ours(m, b, share_prefixes=False),
    "padded, all positions": padded_all,
    "trl": trl_loss,
    "torchrl": torchrl_parts,
}
PEERS = ("trl", "torchrl")
QUICK = ("limit", "ours", "ours, prompts not shared")


def step(model: Qwen3ForCausalLM, run: Callable[[], Tensor]) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss = run()
    loss.backward()
    return loss.detach()


def timed(model: Qwen3ForCausalLM, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    gc.collect()
    start = time.process_time()
    loss = step(model, run)
    return time.process_time() - start, loss


def measure(case: Case, names: list[str], repeats: int) -> dict[str, float]:
    model, batch = make_model(case), make_batch(case)
    tokens = sum(len(row["tokens", "full"]) for row in batch.rows.unbind(0))
    print(f"{tokens} tokens, {batch.num_trained} trained, vocabulary {case.vocabulary}")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    runs, expected_loss, expected = {}, None, None
    for name in names:
        runs[name] = VARIANTS[name](model, batch)
        took, loss = timed(model, runs[name])
        # The first steps of the quick ones pay for what is made once.
        seconds[name] += [took] if name not in QUICK else []
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        if expected_loss is None or expected is None:
            expected_loss, expected = loss, gradient
        gap = float((gradient - expected).norm() / expected.norm())
        print(f"  {name:26s} loss {loss.item():+.7f}   gradient off by {gap:.1e}", flush=True)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
        assert gap < 1e-5, f"{name} computes another gradient"
    for repeat in range(repeats):
        for name, run in runs.items():
            if name in QUICK or repeat < repeats // 3:
                seconds[name].append(timed(model, run)[0])
    return {name: statistics.median(values) for name, values in seconds.items()}


def status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak_memory(case: str, name: str) -> None:
    """Print how far one step goes above what the process held before it, in MiB."""
    model, batch = make_model(CASES[case]), make_batch(CASES[case])
    run = VARIANTS[name](model, batch)
    gc.collect()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    step(model, run)
    print((status("VmHWM") - before) // 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="32k,152k,long")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--without-memory", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        peak_memory(options.cases, options.memory_of)
        return
    names = [name for name in VARIANTS if not (options.without_peers and name in PEERS)]
    for case in options.cases.split(","):
        seconds = measure(CASES[case], names, options.repeats)
        peaks = {}
        for name in names if not options.without_memory else []:
            command = [sys.executable, __file__, "--cases", case, "--memory-of", name]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            peaks[name] = int(out.split()[-1])
        print(f"{case:28s} CPU s  of limit   peak MiB  of limit")
        for name in names:
            line = f"  {name:24s} {seconds[name]:7.2f} {seconds[name] / seconds['limit']:8.2f}x"
            if peaks:
                line += f" {peaks[name]:10d} {peaks[name] / peaks['limit']:8.2f}x"
            print(line, flush=True)


if __name__ == "__main__":
    main()
