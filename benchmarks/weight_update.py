"""Weights into a live engine: an update beside a copy of the bytes, and how long it stalls.

    python benchmarks/weight_update.py [--repeats 9] [--without-vllm] [--servers 1 2 4]

A model of 124 MB in 46 tensors. All ways run interleaved in one process, after a check that the
receiver then has the new weights, to the bit (vLLM: to 1e-4 nats). CPU seconds where not said; the
table gives medians and their ratios to the limit of each row.

- ``Transformers``: limit, one ``copy_`` of all bytes.
- ``vLLM``: limit, that copy and vLLM's own reload of tensors that it is handed unchecked.
- ``one bucket``, ``tensor by tensor``: a broadcast over gloo between two threads, wall seconds;
  limit, the copy.
- ``stall``: the longest pause between two tokens of a response with an update in its midst, wall
  seconds; limit, an update while nothing runs and the longest pause without one.

``--servers 1 2 4`` pushes to so many vLLM servers of this machine at once instead, as a fleet does,
by a file in memory and by a broadcast over gloo to each: the bytes that the trainer writes and
sends, wall seconds of a push, and by how much it prolongs a response that the first server draws.
"""

import argparse
import asyncio
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import psutil
import torch
from transformers import Qwen3ForCausalLM

from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.tiny_model import tiny_qwen3
from torchrl_modules.weight_transfer.broadcast_group import stateless_init_process_group
from torchrl_modules.weight_transfer.layout import WeightLayout

Row = tuple[str, float, float]


def build(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return tiny_qwen3(
        16_384, hidden_size=512, num_layers=4, num_heads=8, num_key_value_heads=4, head_dim=64,
        intermediate_size=3_072, max_position_embeddings=512, initializer_range=0.05,
    ).eval()  # fmt: skip


def medians(
    ways: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            begin = clock()
            way()
            seconds[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def flat_copy(weights: dict[str, torch.Tensor]) -> Callable[[], object]:
    source = torch.cat([value.reshape(-1) for value in weights.values()])
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def transformers_row(weights: dict[str, torch.Tensor], repeats: int) -> Row:
    engine = TransformersEngine(build(0))
    engine.update_weights(weights)
    assert all(torch.equal(engine.model.state_dict()[k], v) for k, v in weights.items())
    ways = {"limit": flat_copy(weights), "ours": lambda: engine.update_weights(weights)}
    taken = medians(ways, repeats, time.process_time)
    return "Transformers", taken["limit"], taken["ours"]


def broadcast_rows(weights: dict[str, torch.Tensor], repeats: int) -> list[Row]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port, groups = held.getsockname()[1], {}

    def join(rank: int) -> None:
        groups[rank] = stateless_init_process_group("127.0.0.1", port, rank, 2)

    in_threads(lambda: join(0), lambda: join(1))
    buffer = torch.empty(1 << 28, dtype=torch.uint8)

    def transfer(bucket_bytes: int) -> dict[str, torch.Tensor]:
        layout = WeightLayout.of(weights, bucket_bytes)
        flats = []

        def send() -> None:
            for bucket in layout.buckets():
                groups[0].broadcast(layout.fill(buffer, bucket, weights))

        def receive() -> None:
            for bucket in layout.buckets():
                flats.append((torch.empty(layout.size_of(bucket), dtype=torch.uint8), bucket))
                groups[1].broadcast(flats[-1][0])

        in_threads(send, receive)
        return {name: value for flat in flats for name, value in layout.views(*flat)}

    for bucket_bytes in (1 << 28, 1):
        assert all(torch.equal(v, weights[k]) for k, v in transfer(bucket_bytes).items())
    taken = medians(
        {
            "limit": flat_copy(weights),
            "one bucket": lambda: transfer(1 << 28),
            "tensor by tensor": lambda: transfer(1),
        },
        repeats,
        time.perf_counter,
    )
    return [(name, taken["limit"], taken[name]) for name in ("one bucket", "tensor by tensor")]


def in_threads(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def vllm_rows(weights: dict[str, torch.Tensor], repeats: int) -> list[Row]:
    from torchrl_modules.vllm.engine import VLLMEngine
    from torchrl_modules.vllm.weights import load_weights

    with tempfile.TemporaryDirectory() as folder:
        build(0).save_pretrained(folder)
        engine = VLLMEngine(folder, max_model_len=256, kv_cache_memory_bytes=64 << 20)
    engine.update_weights(weights)
    check_log_probs(engine)
    given = engine._expected.check(weights, who="VLLMEngine.update_weights")
    copy = flat_copy(weights)

    def reload() -> None:
        copy()
        engine._llm.collective_rpc(load_weights, args=(engine._names, given.items()))

    taken = medians(
        {"limit": reload, "ours": lambda: engine.update_weights(weights)},
        repeats,
        time.process_time,
    )
    wall = medians({"update": lambda: engine.update_weights(weights)}, repeats, time.perf_counter)
    usual, stalled = asyncio.run(pauses_in_process(engine, weights, repeats))
    engine.close()
    return [
        ("vLLM", taken["limit"], taken["ours"]),
        ("stall", wall["update"] + usual, stalled),
    ]


def check_log_probs(engine: Any) -> None:
    model = build(1)
    (row,) = engine.generate([[5, 6, 7]], SamplingParameters(max_new_tokens=32, stop_token_ids=()))
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7, *row.ids]])).logits[0, 2:-1].log_softmax(-1)
    expected = expected[torch.arange(32), torch.tensor(row.ids)]
    assert (torch.tensor(row.log_probs) - expected).abs().max() < 1e-4


async def pauses_in_process(
    engine: Any, weights: dict[str, torch.Tensor], repeats: int
) -> tuple[float, float]:
    """The longest pause between two tokens without an update, and with one; medians."""
    from torchrl_modules.vllm.async_engine import AsyncVLLMEngine

    longest: dict[bool, list[float]] = {False: [], True: []}
    async with AsyncVLLMEngine(engine) as served:
        for _ in range(repeats):
            for updated in (False, True):
                update = partial(served.update_weights, weights) if updated else None
                longest[updated].append(await longest_pause(served, update))
    return statistics.median(longest[False]), statistics.median(longest[True])


async def longest_pause(served: Any, update: Callable[[], Any] | None) -> float:
    """Between two tokens of a response, in whose midst there may be an update."""
    params = SamplingParameters(max_new_tokens=48, stop_token_ids=())
    begun, gaps, last = None, [], None
    async for _ in (stream := served.submit([5, 6, 7], params)):
        now = time.perf_counter()
        gaps += [] if last is None else [now - last]
        last = now
        if update is not None and begun is None and len(gaps) == 16:
            begun = asyncio.create_task(update())
    await stream.result()
    if begun is not None:
        await begun
    return max(gaps)


async def server_table(weights: dict[str, torch.Tensor], counts: list[int], repeats: int) -> None:
    from torchrl_modules.vllm.bridges import OwnServerEngine
    from torchrl_modules.vllm.server import start_server

    print(f"{'servers':8}{'way':12}{'MB':>8}{'push ms':>10}{'longer ms':>10}{'of ms':>10}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        build(0).save_pretrained(folder)
        options = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
        start = partial(start_server, folder, skip_tokenizer_init=True, **options)
        urls = [stack.enter_context(start()) for _ in range(max(counts))]
        for count in counts:
            found: dict[str, list[tuple[float, float, float, float]]] = {}
            engines = {
                way: [OwnServerEngine(url, weight_transfer=way) for url in urls[:count]]
                for way in ("file", "c10d")
            }
            for repeat in range(repeats + 1):
                for way, members in engines.items():
                    push = partial(push_to, members, weights)
                    moved, begin = bytes_moved(), time.perf_counter()
                    await push()
                    taken, moved = time.perf_counter() - begin, bytes_moved() - moved
                    usual = await response_s(members[0])
                    stalled = await response_s(members[0], push, usual / 3) - usual
                    if repeat:  # the first one also meets
                        found.setdefault(way, []).append((moved / 1e6, taken, stalled, usual))
            for way, rows in found.items():
                moved, *seconds = map(statistics.median, zip(*rows, strict=True))
                cells = "".join(f"{1e3 * each:10.1f}" for each in seconds)
                print(f"{count:<8}{way:12}{moved:8.0f}{cells}", flush=True)
            for member in (each for members in engines.values() for each in members):
                member.close()


async def response_s(
    served: Any, update: Callable[[], Any] | None = None, begin_s: float = 0.0
) -> float:
    """How long a response takes, in whose midst there may be an update."""
    begin = time.perf_counter()
    params = SamplingParameters(max_new_tokens=192, stop_token_ids=())
    response = asyncio.create_task(served.respond([5, 6, 7], params))
    if update is not None:
        await asyncio.sleep(begin_s)
        await update()
    await response
    return time.perf_counter() - begin


async def push_to(members: list[Any], weights: dict[str, torch.Tensor]) -> None:
    await asyncio.gather(*(each.update_weights(weights) for each in members))


def bytes_moved() -> int:
    """What this process has written, to files and to sockets."""
    return psutil.Process().io_counters().write_chars


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--servers", type=int, nargs="+", default=[])
    args = parser.parse_args()
    weights = {name: value.detach() for name, value in build(1).named_parameters()}
    num_bytes = sum(value.numel() * value.element_size() for value in weights.values())
    print(f"{num_bytes / 1e6:.0f} MB in {len(weights)} tensors")
    if args.servers:
        asyncio.run(server_table(weights, args.servers, args.repeats))
        return
    rows = [transformers_row(weights, args.repeats), *broadcast_rows(weights, args.repeats)]
    if not args.without_vllm:
        rows += vllm_rows(weights, args.repeats)
    print(f"{'':20}{'limit ms':>10}{'ours ms':>10}{'ratio':>8}")
    for name, limit, ours in rows:
        print(f"{name:20}{limit * 1e3:10.1f}{ours * 1e3:10.1f}{ours / limit:8.2f}")


if __name__ == "__main__":
    main()
