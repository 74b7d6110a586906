"""How far a drawn token's log-prob is from the one that is scored, and in how many bits.

    python benchmarks/token_bits.py --model smollm2

For batches of 1 and of many rows, in float32, in float32 with ``batch_invariant``, and in bfloat16
by autocast: rows are drawn by the Transformers engine, and scored again packed (all rows beside
each other), each row alone, and by the model's own forward of a row, without anything of ours.
"""

import argparse
import struct

import torch

from torchrl_data.conversation import Conversations
from torchrl_modules import TransformersWrapper

QUESTION = "Write down what you know about the number {}."


def bits_of(value):
    """A float32 as a whole number that grows with it, so that neighbours differ by 1."""
    [number] = struct.unpack("<i", struct.pack("<f", value))
    return number if number >= 0 else -(number & 0x7FFFFFFF)


def drawn_rows(policy, count):
    messages = [[{"role": "user", "content": QUESTION.format(i)}] for i in range(count)]
    _, rows, _ = policy.respond(Conversations.from_messages(messages))
    return [(rows.token_ids(i), rows.assistant_mask(i), rows.log_probs(i)) for i in range(count)]


@torch.no_grad()
def scored(policy, rows):
    ids, masks = torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
    lengths = torch.tensor([len(row[0]) for row in rows])
    return policy.scorer.score_packed(ids, lengths, masks).log_prob


@torch.no_grad()
def by_the_model(policy, ids, mask):
    with policy.engine.precision():
        logits = policy.model(input_ids=ids[None]).logits[0].float()
    log_p = logits[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    return log_p[mask[1:]]


def told(name, drawn, again):
    gaps = (drawn - again).abs()
    steps = torch.tensor(
        [abs(bits_of(a) - bits_of(b)) for a, b in zip(drawn.tolist(), again.tolist(), strict=True)]
    )
    print(
        f"  {name:<12} equal to the bit {float((steps == 0).float().mean()):6.1%}  "
        f"median {int(steps.median()):>7} steps of float32  "
        f"gap: median {float(gaps.median()):.1e}, largest {float(gaps.max()):.1e}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    for dtype, is_invariant in ((None, False), (None, True), (torch.bfloat16, False)):
        policy = TransformersWrapper(
            given.model,
            device="cpu",
            autocast_dtype=dtype,
            batch_invariant=is_invariant,
            generate_kwargs={"max_new_tokens": given.tokens, "seed": 0},
        )
        for count in (1, given.rows):
            rows = drawn_rows(policy, count)
            drawn = torch.cat([log_probs[mask] for _, mask, log_probs in rows])
            numbers = f"{dtype or torch.float32}{', batch invariant' if is_invariant else ''}"
            print(f"{numbers}, {count} rows, {len(drawn)} tokens:")
            told("packed", drawn, scored(policy, rows))
            told("alone", drawn, torch.cat([scored(policy, [row]) for row in rows]))
            own = [by_the_model(policy, ids, mask) for ids, mask, _ in rows]
            told("bare forward", drawn, torch.cat(own))


if __name__ == "__main__":
    main()
