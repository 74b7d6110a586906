"""P1's loss part: what ``GRPOLoss`` costs beside the model that scores its tokens.

    python benchmarks/loss_arithmetic.py [--rows 16] [--vocabulary 32000]

On a ragged batch of log-normal lengths, forward and backward, in turn in one process, after a
check that all give the same loss and gradient: ``GRPOLoss`` from a lazy stack of rows, the same by
hand on tensors that are packed already (the limit), and padded with all positions scored (what a
naive loop does). All share one scorer, an embedding and a head. Prints medians and ratios of CPU
time, and of the arithmetic alone.
"""

import argparse
import statistics
import time

import torch
from tensordict import TensorDict, lazy_stack

import objectives.functional as F
from objectives import GRPOLoss
from torchrl_data.token_scorer import TokenScores

REPEATS, WIDTH = 9, 64


class Scorer(torch.nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(vocabulary, WIDTH)
        self.head = torch.nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, before, ids):
        log_p = self.head(self.embed(before)).log_softmax(-1)
        return log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    def score_packed(self, ids, lengths, target_mask, *, temperature=1.0, entropy=False):  # noqa: ARG002
        return TokenScores(self(ids.roll(1)[target_mask], ids[target_mask]))


def make_batch(num_rows, vocabulary):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(num_rows).log_normal_(5.2, 0.6, generator=generator).int().clamp(20, 600)
    rows = []
    for length in lengths.tolist():
        mask = torch.arange(length) >= length // 3
        rows.append(
            TensorDict(
                {
                    "tokens": {"full": torch.randint(vocabulary, (length,), generator=generator)},
                    "masks": {
                        "all_assistant_mask": mask,
                        "all_attention_mask": torch.ones(length, dtype=torch.bool),
                    },
                    "log_probs": {"full": -10 - torch.rand(length, generator=generator)},
                    "advantage": torch.randn(1, 1, generator=generator),
                },
                batch_size=[],
            )
        )
    return lazy_stack(rows)


def by_hand(scorer, ids, mask, old, advantage):
    """The arithmetic in as few operations as there are."""
    log_prob = scorer(ids.roll(1)[mask], ids[mask])
    ratio = (log_prob - old[mask]).exp()
    advantage = advantage[mask]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def padded(scorer, ids, mask, old, advantage):
    """All positions of the padded batch, masked afterwards."""
    log_prob = scorer(ids[:, :-1], ids[:, 1:])
    mask = mask[:, 1:]
    ratio = F.log_ratio(log_prob, old[:, 1:], mask)
    return F.token_mean(F.clipped_surrogate(ratio, advantage[:, 1:], mask).loss, mask)


def measure(scorer, function):
    scorer.zero_grad()
    start = time.process_time()
    loss = function()
    loss.backward()
    return time.process_time() - start, loss.detach(), scorer.head.weight.grad.clone()


def compare(scorer, functions):
    times = {name: [] for name in functions}
    for _ in range(REPEATS):
        results = {}
        for name, function in functions.items():
            seconds, *results[name] = measure(scorer, function)
            times[name].append(seconds)
        want = next(iter(results.values()))
        for got in results.values():
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    base = statistics.median(times["by hand (limit)"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:32s} {median * 1e3:9.2f} ms CPU {median / base:6.2f}x of the limit")


class Recall(torch.nn.Module):
    """A scorer that costs next to nothing, so that what is left is the loss."""

    def __init__(self, num_tokens):
        super().__init__()
        self.head = torch.nn.Linear(num_tokens, 1, bias=False)

    def forward(self, before, ids):  # noqa: ARG002
        return self.head.weight[0][: len(ids)] - 10.5

    score_packed = Scorer.score_packed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    args = parser.parse_args()
    batch = make_batch(args.rows, args.vocabulary)
    rows = batch.unbind(0)
    columns = [
        [row["tokens", "full"] for row in rows],
        [row["masks", "all_assistant_mask"] for row in rows],
        [row["log_probs", "full"] for row in rows],
        [row["advantage"].view(1).expand(len(row["tokens", "full"])) for row in rows],
    ]
    packed = [torch.cat(column) for column in columns]
    dense = [torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in columns]
    print(f"{len(packed[0])} tokens, {int(packed[1].sum())} trained, {dense[0].numel()} padded")
    scorer = Scorer(args.vocabulary)
    loss = GRPOLoss(scorer)
    compare(
        scorer,
        {
            "by hand (limit)": lambda: by_hand(scorer, *packed),
            "GRPOLoss": lambda: loss(batch).total(),
            "padded, all positions": lambda: padded(scorer, *dense),
        },
    )
    print("with a scorer that costs nothing:")
    free = Recall(len(packed[0]))
    cheap = GRPOLoss(free)
    compare(
        free,
        {
            "by hand (limit)": lambda: by_hand(free, *packed),
            "GRPOLoss": lambda: cheap(batch).total(),
        },
    )


if __name__ == "__main__":
    main()
