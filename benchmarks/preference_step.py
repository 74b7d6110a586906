"""A step of DPO: pairs whose prompt is read once, beside both rows of each pair, padded.

    python benchmarks/preference_step.py [--repeats 3] [--pairs 4] [--layers 6]

Loss and gradient of ``DPOLoss`` with a model of SmolLM2-135M's width and random weights, and of a
loop by hand that pads all rows to one length and computes all logits, as trainers of preferences
do. Both have the same loss and gradient, which is checked. Tokens that the layers read, and CPU
seconds of a step, interleaved, medians. The reference's log-probs are there already.
"""

import argparse
import statistics
import time
from typing import Any, Final, NamedTuple

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from objectives import DPOLoss
from objectives import functional as F
from torchrl_data import keys, preference_rows
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import train_tokenizer

CASES: Final = ((400, 60, 100), (200, 150, 100), (40, 200, 150))
"""Tokens of a prompt, about, and of the two answers."""
VOCABULARY: Final = 49_152


class Step(NamedTuple):
    """What a step gave and took."""

    loss: float
    gradient: Tensor
    num_read: int
    seconds: float


def make_policy(num_layers: int) -> TransformersWrapper:
    """SmolLM2-135M with fewer layers and without its weights."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes, **heads)
    tokenizer = train_tokenizer(["preferences"])
    return TransformersWrapper(LlamaForCausalLM(config), tokenizer=tokenizer, generate=False)


def make_rows(policy: TransformersWrapper, num_pairs: int, sizes: tuple[int, int, int]) -> Any:
    """Pairs of random texts, with log-probs of a reference that says -10 of every token."""
    draw = torch.Generator().manual_seed(1)

    def text(size: int) -> str:
        size = size + int(torch.randint(size // 4, (), generator=draw))
        return "".join(chr(97 + int(x)) for x in torch.randint(26, (size,), generator=draw))

    columns = ("prompt", "chosen", "rejected")
    pairs = [dict(zip(columns, map(text, sizes), strict=True)) for _ in range(num_pairs)]
    rows = preference_rows(policy.encoder, pairs)
    for row in rows:
        row[keys.REF_LOG_PROBS_FULL] = torch.full((len(row["tokens", "full"]),), -10.0)
    return lazy_stack(rows)


def ours(policy: TransformersWrapper, rows: TensorDictBase) -> Tensor:
    """The loss of the library."""
    return DPOLoss(policy, beta=0.1)(rows).total()


def padded(policy: TransformersWrapper, rows: TensorDictBase) -> Tensor:
    """The loss by hand."""
    ids = torch.nn.utils.rnn.pad_sequence([r["tokens", "full"] for r in rows.unbind(0)], True)
    mask = torch.nn.utils.rnn.pad_sequence([r[keys.ASSISTANT_MASK] for r in rows.unbind(0)], True)
    lengths = torch.tensor([len(row["tokens", "full"]) for row in rows.unbind(0)])
    is_real = torch.arange(ids.shape[1]) < lengths[:, None]
    logits = policy.model(input_ids=ids, attention_mask=is_real.long()).logits[:, :-1]
    log_prob = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    score = ((log_prob + 10.0) * mask[:, 1:]).sum(-1)
    return F.preference_loss(score[::2], score[1::2], beta=0.1).mean()


WAYS: Final = {"padded": padded, "once": ours}


def step(policy: TransformersWrapper, rows: TensorDictBase, way: str) -> Step:
    """Loss and gradient, and what they took."""
    read: list[int] = []
    layer = policy.model.get_submodule("model.layers.0")
    hook = layer.register_forward_hook(lambda _, x, __: read.append(x[0].shape[:2].numel()))
    policy.model.zero_grad()
    begin = time.process_time()
    loss = WAYS[way](policy, rows)
    loss.backward()
    seconds = time.process_time() - begin
    hook.remove()
    gradient = layer.self_attn.q_proj.weight.grad.clone()
    return Step(loss.item(), gradient, sum(read), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    policy = make_policy(options.layers)
    print(f"{options.layers} layers, float32, {torch.get_num_threads()} threads")
    for sizes in CASES:
        rows = make_rows(policy, options.pairs, sizes)
        runs: dict[str, list[Step]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):
            for way, some in runs.items():
                some.append(step(policy, rows, way))
        by_hand, own = (some[0] for some in runs.values())
        torch.testing.assert_close(own.loss, by_hand.loss, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own.gradient, by_hand.gradient, rtol=1e-3, atol=1e-6)
        before, after = (statistics.median(x.seconds for x in some) for some in runs.values())
        print(
            f"{options.pairs} pairs, prompt of {sizes[0]}, answers of {sizes[1]} and {sizes[2]}: "
            f"{by_hand.num_read:,} -> {own.num_read:,} tokens read, {before:.1f} -> {after:.1f} "
            f"CPU s, {before / after:.2f} times as fast",
            flush=True,
        )


if __name__ == "__main__":
    main()
