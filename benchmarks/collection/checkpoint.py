"""How long a save holds up training, beside a training step, and what it costs next to it.

    python benchmarks/collection/checkpoint.py [--repeats 5] [--every 10] [--rows 256]

A model of 100 million parameters with AdamW (1.2 GB of state) and a replay buffer of finished rows.
Steps alone, saves and steps beside a save that is being written run interleaved in one process; the
table gives medians in seconds: of the wall, and of the CPU of the thread that trains. What counts
is ``held up``: ``save(wait=False)`` as a share of ``--every`` steps.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tensordict import LazyStackedTensorDict, lazy_stack

from collectors import CheckpointStore
from torchrl_data import Conversations, Turn, row_tensordicts, write_conversations
from torchrl_modules.tiny_model import tiny_qwen3


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = tiny_qwen3(
        32_768, hidden_size=640, num_layers=12, num_heads=10, num_key_value_heads=5, head_dim=64,
        intermediate_size=2_560, initializer_range=0.02,
    )  # fmt: skip
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def build_rows(count: int, tokens: int) -> LazyStackedTensorDict:
    """Rows of a buffer: one turn of ``tokens`` tokens each."""
    rows = []
    for number in range(count):
        question = [{"role": "user", "content": f"question {number}"}]
        talk = Conversations.from_tokens([range(20)], [question], awaits_response=True)
        answer = {"role": "assistant", "content": "word " * tokens}
        talk = talk.append_turns([Turn(range(tokens), [-1.0] * tokens, answer, versions=3)])
        (row,) = row_tensordicts(talk)
        write_conversations(row, "full", talk)
        row["reward"] = torch.tensor([[1.0]])
        row.set_non_tensor("row", {"question": f"question {number}", "answer": number})
        rows.append(row)
    return lazy_stack(rows)


class Times(NamedTuple):
    wall: float
    cpu: float


def measured(action: Callable[[], object]) -> Times:
    wall, cpu = time.perf_counter(), time.thread_time()
    action()
    return Times(time.perf_counter() - wall, time.thread_time() - cpu)


def medians(times: list[Times]) -> Times:
    return Times(*map(statistics.median, zip(*times, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument("--rows", type=int, default=256, help="of 400 tokens in the buffer")
    parser.add_argument("--tokens", type=int, default=256, help="of a step, in each of 4 rows")
    parser.add_argument("--folder", type=Path, help="on the disk that is asked about")
    settings = parser.parse_args()
    model, optimizer = build()
    ids = torch.randint(32_768, (4, settings.tokens))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rows": rows}

    rows = build_rows(settings.rows, 400)
    step()
    folder = Path(tempfile.mkdtemp(dir=settings.folder))
    found: dict[str, list[Times]] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        found.setdefault(name, []).append(measured(action))

    try:
        with CheckpointStore(folder, on_error="raise") as store:
            # The first save gets its memory from the system; a run does so once.
            timed("held up, the first time", lambda: store.save(0, state(), wait=False))
            store.wait()
            for number in range(settings.repeats):
                timed("a step", step)
                timed("held up", lambda at=number: store.save(2 * at + 1, state(), wait=False))
                timed("a step beside the writing", step)
                timed("the rest of the writing", store.wait)
                timed("held up by wait=True", lambda at=number: store.save(2 * at + 2, state()))
                timed("torch.save", lambda: torch.save(state(), folder / "whole.pt"))
                timed("load", store.load)
            files = [path for path in store.load().path.rglob("*") if path.is_file()]
            num_bytes = sum(path.stat().st_size for path in files)
            theirs = (folder / "whole.pt").stat().st_size
    finally:
        shutil.rmtree(folder)
    parameters = sum(value.numel() for value in model.parameters())
    print(
        f"{parameters / 1e6:.0f} million parameters, {num_bytes / 1e6:.1f} MB in {len(files)} files"
    )
    print(f"(torch.save: {theirs / 1e6:.1f} MB)")
    print(f"{'':28}{'wall':>10}{'CPU':>10}")
    table = {name: medians(times) for name, times in found.items()}
    for name, times in table.items():
        print(f"{name:28}{times.wall:8.3f} s{times.cpu:8.3f} s")
    held, step_times = table["held up"], table["a step"]
    shares = [one / settings.every / other for one, other in zip(held, step_times, strict=True)]
    print(
        f"held up, saving every {settings.every} steps: {shares[0]:.2%} wall, {shares[1]:.2%} CPU"
    )


if __name__ == "__main__":
    main()
