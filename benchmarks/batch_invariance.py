"""Which operators give a row other bits in another batch, on a CPU in float32, and at what cost.

    python benchmarks/batch_invariance.py
    python benchmarks/batch_invariance.py --model smollm2 --threads 2

Each operator computes the same rows one at a time, 64 beside each other, and all of a packed pass,
by PyTorch as it is and under ``BatchInvariance``. The table says in what share of the numbers a row
alone differs from the row in the batch, and how many times as long the batch takes in tiles. A
model is timed; ``token_bits.py`` counts the bits of what it draws and scores.
"""

import argparse
import time
from contextlib import nullcontext

import torch
from torch.nn import functional as F

from torchrl_modules import TransformersWrapper
from torchrl_modules.batch_invariance import BatchInvariance

WIDTH, INNER, VOCAB, HEADS, SIZE = 576, 1536, 49152, 9, 64  # of SmolLM2-135M
BATCHES = {"1": 1, "64": 64, "packed": 1000}


def operators():
    draw = torch.Generator().manual_seed(0)

    def weight(out, width):
        return torch.randn(out, width, generator=draw) / width**0.5

    projections = {f"linear {a} to {b}": weight(b, a) for a, b in ((WIDTH, INNER), (INNER, WIDTH))}
    head = weight(VOCAB, WIDTH)
    for name, own in projections.items():
        yield name, own.shape[1], lambda x, own=own: F.linear(x, own)
    yield f"head, {WIDTH} to {VOCAB}", WIDTH, lambda x: F.linear(x, head)
    yield "RMSNorm", WIDTH, lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    yield "LayerNorm", WIDTH, lambda x: F.layer_norm(x, (WIDTH,))
    yield "softmax", WIDTH, lambda x: x.softmax(-1)
    yield "log-softmax over the vocabulary", VOCAB, lambda x: x.log_softmax(-1)
    yield "SiLU", INNER, F.silu
    yield "SiLU of an odd width", 33, F.silu
    yield "GELU of an odd width", 33, F.gelu
    yield "exp", INNER, torch.exp


def share_of_other_bits(one, other):
    return float((one.view(torch.int32) != other.view(torch.int32)).float().mean())


def seconds(run):
    run()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def attention_of_a_row(query, key, value):
    """Its last query alone, as it is drawn; and all of it at once."""
    last = F.scaled_dot_product_attention(query[:, :, -1:], key, value)
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return last, whole[:, :, -1:]


@torch.no_grad()
def of_operators():
    print(f"{'operator':<34} {'64':>8} {'packed':>8}   {'tiles: 64':>9} {'packed':>8} {'time':>6}")
    for name, width, run in operators():
        rows = torch.randn(BATCHES["packed"], width, generator=torch.Generator().manual_seed(1))
        cells, times = [], []
        for context in (nullcontext(), BatchInvariance()):
            with context:
                alone = torch.cat([run(row[None]) for row in rows[:64]])
                cells += [
                    share_of_other_bits(alone, run(rows[: BATCHES[batch]])[:64])
                    for batch in ("64", "packed")
                ]
                times.append(seconds(lambda run=run, rows=rows: run(rows)))
        told = [f"{cell:8.1%}" for cell in cells]
        print(f"{name:<34} {told[0]} {told[1]}   {told[2]:>9} {told[3]} {times[1] / times[0]:6.1f}")
    draw = torch.Generator().manual_seed(2)
    for length in (40, 300):
        parts = [torch.randn(1, HEADS, length, SIZE, generator=draw) for _ in range(3)]
        plain = share_of_other_bits(*attention_of_a_row(*parts))
        with BatchInvariance():
            tiles = share_of_other_bits(*attention_of_a_row(*parts))
        print(f"{f'attention, the last of {length}':<34} {plain:8.1%} {'':>8}   {tiles:9.1%}")


@torch.no_grad()
def of_a_model(name):
    model = TransformersWrapper(name, device="cpu", batch_invariant=True).model.eval()
    rows = torch.arange(1280).view(32, 40)
    for words, context in (("PyTorch", nullcontext()), ("tiles", BatchInvariance())):
        with context:
            whole = seconds(lambda: model(input_ids=rows))
            one = seconds(lambda: model(input_ids=rows[:1, :1]))
        print(f"  {words:<8} {whole:.2f} s a pass of {rows.numel()} tokens, {one:.3f} s of one")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    of_operators()
    if given.model:
        of_a_model(given.model)


if __name__ == "__main__":
    main()
