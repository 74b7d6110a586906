"""Drawing on a CPU where rows share their prompts: kept and read once, or a copy for each row.

    python benchmarks/shared_prompts.py [--repeats 5] [--tokens 12] [--dtype float32]

The step of a model of SmolLM2-135M's shape with random weights, over rows in groups that share a
prompt. ``a copy each`` is the reader that keeps every row whole. Both draw the same tokens, which
in float32 is checked first, and the gap of their logits is told. Bytes of keys and values, and CPU
milliseconds of a token of all rows, interleaved, medians.
"""

import argparse
import statistics
import time
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_modules.engines.readers import PrefixSlotReader
from torchrl_modules.engines.slot_reader import SlotReader
from torchrl_modules.scoring.packed_attention import use_packed_attention

CASES: Final = ((64, 8, 400), (64, 16, 200), (32, 4, 128), (32, 1, 1024), (16, 8, 60))
"""Rows, prompts among them, and tokens of a prompt."""
WAYS: Final[dict[str, type[SlotReader]]] = {"a copy each": SlotReader, "once": PrefixSlotReader}


class Drawn(NamedTuple):
    """A few tokens of all rows."""

    seconds: float
    """Of a token."""
    num_bytes: int
    """Of keys and values."""
    tokens: Tensor
    logits: Tensor


def make_model(dtype: torch.dtype) -> Any:
    """SmolLM2-135M without its weights."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=49_152, tie_word_embeddings=True, **sizes, **heads)
    model = LlamaForCausalLM(config).eval().to(dtype)
    use_packed_attention(model)
    return model


def make_prompts(num_rows: int, num_prompts: int, size: int) -> list[list[int]]:
    """Groups of rows with one prompt, of about this size."""
    draw = torch.Generator().manual_seed(1)
    sizes = [size + (3 * number) % 7 for number in range(num_prompts)]
    prompts = [torch.randint(0, 49_152, (n,), generator=draw).tolist() for n in sizes]
    return [prompt for prompt in prompts for _ in range(num_rows // num_prompts)]


@torch.no_grad()
def draw(model: Any, cls: type[SlotReader], prompts: list[list[int]], num_tokens: int) -> Drawn:
    """Read the prompts, which is not counted, and draw the likeliest tokens."""
    reader = cls(model)
    logits = reader.advance(reader.read(prompts).argmax(-1))
    drawn, begin = [], time.process_time()
    for _ in range(num_tokens):
        drawn.append(logits.argmax(-1))
        logits = reader.advance(drawn[-1])
    seconds = (time.process_time() - begin) / num_tokens
    return Drawn(seconds, reader.nbytes, torch.stack(drawn), logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    model = make_model(getattr(torch, options.dtype))
    print(f"SmolLM2-135M's shape, {options.dtype}, {torch.get_num_threads()} threads")
    for num_rows, num_prompts, size in CASES:
        prompts = make_prompts(num_rows, num_prompts, size)
        runs: dict[str, list[Drawn]] = {name: [] for name in WAYS}
        for _ in range(options.repeats):
            for name, cls in WAYS.items():
                runs[name].append(draw(model, cls, prompts, options.tokens))
        one, other = (runs[name][0] for name in WAYS)
        is_same = torch.equal(one.tokens, other.tokens)
        assert is_same or options.dtype != "float32"
        gap = (one.logits - other.logits).abs().max().item()
        seconds = {name: statistics.median(x.seconds for x in some) for name, some in runs.items()}
        before, after = seconds.values()
        print(
            f"{num_rows} rows, {num_prompts} prompts of {size}: keys and values "
            f"{one.num_bytes / 1e6:,.0f} -> {other.num_bytes / 1e6:,.0f} MB, a token "
            f"{1e3 * before:.0f} -> {1e3 * after:.0f} CPU ms, {before / after:.2f} times as fast; "
            f"logits apart by {gap:.0e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
