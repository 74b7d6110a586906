"""Models that two processes train together are scored like one model, in value and in gradient."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

RANKS = """
import os, sys, warnings
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

from torchrl_modules.scoring.scorer import PackedScorer

meeting, *modes = sys.argv[1:]
other = os.fork()  # once all is imported
rank = int(not other)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)


def build():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
        tie_word_embeddings=mode.endswith("tied"),
    ))


def rows_of(rank):
    ids = torch.randint(0, 64, (23,), generator=torch.Generator().manual_seed(rank))
    ids[9:13] = ids[:4]  # rows begin alike
    lengths = torch.tensor([9, 14])
    mask = torch.ones(23, dtype=torch.bool)
    mask[[0, 9]] = False
    return ids, lengths, mask


def scores_of(scorer, rank):
    return scorer.score_packed(*rows_of(rank), temperature=0.8, entropy=True)


def loss_of(scores):
    return (scores.log_prob * torch.linspace(-1, 2, 21)).sum() + 0.3 * scores.entropy.sum()


def check():
    alone = build()
    plain = PackedScorer(alone)
    expected = scores_of(plain, rank)
    (sum(loss_of(scores_of(plain, r)) for r in range(2)) / 2).backward()

    given = model = build()
    if mode.startswith("fully_shard late"):
        scorer = PackedScorer(given)
    if mode.startswith("ddp"):
        given = DistributedDataParallel(model)
    elif mode.startswith("replicate"):
        replicate(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    if not mode.startswith("fully_shard late"):
        scorer = PackedScorer(given)
    assert scorer.packed and scorer.reading.has_plain_head, scorer.reading
    with torch.no_grad():
        torch.testing.assert_close(scores_of(scorer, rank).log_prob, expected.log_prob.detach())
    for _ in range(2):  # the second time as the first
        model.zero_grad()
        found = scores_of(scorer, rank)
        torch.testing.assert_close(found.log_prob, expected.log_prob)
        loss_of(found).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        for name, p in alone.named_parameters():
            grad = grads[name]
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-4, msg=f"{mode} {name}")

for mode in modes:
    print(rank, mode, file=sys.stderr)
    check()
    os.write(1, f"{rank} {mode}\\n".encode())  # in one piece, beside the other rank
dist.barrier()
dist.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""

MODES = ["ddp", "ddp, tied", "replicate", "fully_shard", "fully_shard, tied", "fully_shard late"]


def test_two_ranks_have_the_gradient_of_all_rows(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", RANKS, str(tmp_path / "meet"), *MODES]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=400)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    told = sorted(out.splitlines())
    assert told == sorted(f"{rank} {mode}" for rank in range(2) for mode in MODES), err[-3000:]
    assert process.returncode == 0
