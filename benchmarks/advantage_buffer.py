"""P4: rows into a replay buffer with group advantages, and out of it in packed micro-batches.

    python benchmarks/advantage_buffer.py [--torchrl]

Ours, TorchRL's ``MCAdvantage`` (with ``--torchrl``; it imports 5,000 modules) and plain Python (the
limit) run in turn in one process, on 128 trajectories of one turn, after a check that all give the
same advantages. Prints medians and ratios of CPU time.
"""

import argparse
import statistics
import time
import warnings

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from objectives import MCAdvantage
from objectives.batching.loss_keys import GRPOLossKeys
from objectives.batching.packed_batch import Entries, pack_batch

NUM_ROWS, GROUP_SIZE, REPEATS = 128, 8, 15


def make_rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(NUM_ROWS):
        length = int(torch.randint(20, 200, (), generator=generator))
        mask = torch.arange(length) >= length // 3
        rows.append(
            TensorDict(
                {
                    "tokens": {"full": torch.randint(1000, (length,), generator=generator)},
                    "masks": {
                        "all_assistant_mask": mask,
                        "all_attention_mask": torch.ones(length, dtype=torch.bool),
                    },
                    "log_probs": {"full": -torch.rand(length, generator=generator)},
                    "reward": torch.rand(1, 1, generator=generator),
                    "group_id": torch.tensor(i // GROUP_SIZE),
                    "query": f"prompt {i // GROUP_SIZE}",
                },
                batch_size=[],
            )
        )
    return rows


def ours(rows):
    rb = ReplayBuffer(
        storage=LazyStackStorage(NUM_ROWS),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(GROUP_SIZE),
    )
    stack = lazy_stack(rows)
    start = time.process_time()
    rb.extend(stack)
    return time.process_time() - start, rb


def transform_alone(rows):
    """Our transform without the copies that TorchRL's ``Compose.inv`` makes of the rows."""
    transform, stack = MCAdvantage(GROUP_SIZE), lazy_stack([row.copy() for row in rows])
    start = time.process_time()
    transform._inv_call(stack)
    return time.process_time() - start, None


def limit(rows):
    """Plain Python: dicts and floats, the advantage as a tensor beside the row."""
    start = time.process_time()
    groups, buffer = {}, []
    for row in rows:
        group = groups.setdefault(int(row["group_id"]), [])
        group.append((row, float(row["reward"])))
        if len(group) == GROUP_SIZE:
            values = [value for _, value in group]
            mean, std = statistics.fmean(values), statistics.stdev(values) + 1e-4
            advantages = torch.tensor([(value - mean) / std for value in values]).unbind()
            buffer += [(r, a) for (r, _), a in zip(group, advantages, strict=True)]
    return time.process_time() - start, buffer


def torchrl(rows):
    from torchrl.objectives.llm import MCAdvantage as Theirs

    rb = ReplayBuffer(
        storage=LazyStackStorage(NUM_ROWS),
        transform=Theirs(GROUP_SIZE, prompt_key="query", rewards_key=("next", "reward")),
    )
    steps = []
    for row in rows:
        step = row.exclude("reward", "group_id")
        step["next"] = TensorDict(
            {"reward": row["reward"], "done": torch.ones(1, 1, dtype=torch.bool)}, batch_size=[]
        )
        steps.append(lazy_stack([step]))
    start = time.process_time()
    for step in steps:
        rb.extend(step)
    return time.process_time() - start, rb


def packed(rows):
    return pack_batch(
        rows,
        GRPOLossKeys(),
        "assistant",
        Entries({"log_probs": GRPOLossKeys().log_probs}, {"advantage": GRPOLossKeys().advantage}),
        who="benchmark",
    )


def sample_packed(rb):
    """An epoch in micro-batches of 4: packed once, as ``loss.pack`` does, shuffled and split."""
    start = time.process_time()
    batch = packed(rb[:])
    shuffled = batch.take_rows(torch.randperm(batch.num_rows))
    tokens = sum(len(part.ids) for part in shuffled.micro_batches(num_rows=4))
    return time.process_time() - start, tokens


def sample_each(rb):
    """The same with TorchRL's ``rb.sample``, each micro-batch packed by itself."""
    start = time.process_time()
    tokens = sum(len(packed(rb.sample(4)).ids) for _ in range(NUM_ROWS // 4))
    return time.process_time() - start, tokens


def sample_limit(buffer):
    """The same from a list: index, concatenate, select."""
    start, tokens = time.process_time(), 0
    order = torch.randperm(len(buffer)).tolist()
    for i in range(0, len(order), 4):
        part = [buffer[j] for j in order[i : i + 4]]
        ids = torch.cat([row["tokens", "full"] for row, _ in part])
        mask = torch.cat([row["masks", "all_assistant_mask"] for row, _ in part])
        torch.cat([row["log_probs", "full"] for row, _ in part])[mask]
        lengths = torch.tensor([len(row["tokens", "full"]) for row, _ in part])
        torch.repeat_interleave(torch.stack([a for _, a in part]), lengths)[mask]
        tokens += len(ids)
    return time.process_time() - start, tokens


def main():
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--torchrl", action="store_true")
    functions = [ours, transform_alone, limit] + ([torchrl] if parser.parse_args().torchrl else [])
    rows = make_rows()
    times = {f.__name__: [] for f in (*functions, sample_packed, sample_each, sample_limit)}
    for _ in range(REPEATS):
        found = {}
        for function in functions:
            seconds, found[function.__name__] = function([row.clone(False) for row in rows])
            times[function.__name__].append(seconds)
        want = torch.stack([advantage for _, advantage in found["limit"]])
        got = torch.cat([row["advantage"].view(-1) for row in found["ours"][:].unbind(0)])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        samplers = ((sample_packed, "ours"), (sample_each, "ours"), (sample_limit, "limit"))
        for function, source in samplers:
            seconds, found[function.__name__] = function(found[source])
            times[function.__name__].append(seconds)
        assert found["sample_packed"] == found["sample_each"] == found["sample_limit"]
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        base = medians["sample_limit" if name.startswith("sample") else "limit"]
        print(
            f"{name:16s} {median * 1e3:8.2f} ms CPU  {median * 1e3 / NUM_ROWS:.4f} ms/row  "
            f"{median / base:6.1f}x of the limit"
        )


if __name__ == "__main__":
    main()
