"""A loop behind a wire beside the same loop here: the curve, and the weights after the same rows.

    PYTHONPATH=. python benchmarks/training_service.py [--steps 3] [--mirrored 3] [--seed 0]
        [--engine transformers|vllm]

SmolLM2-135M-Instruct learns sums of two numbers up to 100, tinker-cookbook's task ``arithmetic``:
its prompts, in its order, its rewards, and its settings, 12 prompts x 8 rollouts of at most 5
tokens, LoRA of rank 32 on all linear layers and the head, importance sampling, AdamW at 3e-4 with
betas 0.9 and 0.95. The loop is ours. The rows of its first steps also go to a run of
``serve-training`` that began with the same adapter, by Tinker's client: after each step the weights
of both are compared, and after the last one what the service samples with what it computes.

The cookbook's own loop, unchanged, for its curve (docs/training-service.md):

    python -m tinker_cookbook.recipes.math_rl.train model_name=FOLDER renderer_name=qwen3_instruct
        env=arithmetic group_size=8 groups_per_batch=12 max_tokens=5 lora_rank=32
        learning_rate=3e-4 eval_every=0 save_every=0 max_steps=30
"""

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import Tensor
from torchrl.envs.transforms import Compose
from transformers import AutoModelForCausalLM, AutoTokenizer

from objectives.functional import Surrogate
from torchrl_agents import (
    ChatEnv,
    DataLoadingPrimer,
    GRPOLoss,
    LLMCollector,
    RewardFunctions,
    StepCounter,
    TransformersWrapper,
)
from torchrl_agents.training_service import serve_training
from torchrl_modules import local_model

PROMPTS: Final = 12
GROUP: Final = 8
RANK: Final = 32
LEARNING_RATE: Final = 3e-4
SHOWN: Final = [
    {"role": "user", "content": "What is 4 + 5?"},
    {"role": "assistant", "content": "9"},
]


def questions(steps: int) -> list[dict[str, Any]]:
    """The cookbook's questions, whose generator begins anew at each step."""
    rows = []
    for step in range(steps):
        generator = np.random.RandomState(step)
        for _ in range(PROMPTS):
            x, y = int(generator.randint(0, 101)), int(generator.randint(0, 101))
            asked = {"role": "user", "content": f"What is {x} + {y}?"}
            rows.append({"prompt": [*SHOWN, asked], "answer": x + y})
    return rows


def rewards(end: int) -> Any:
    """The cookbook's reward: 1 for the sum, less 0.1 for one that no end token follows."""

    def arithmetic(completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        told = []
        for said, ids, wanted in zip(completions, completion_ids, answer, strict=True):
            numbers = re.findall(r"-?\d+", said[-1]["content"].replace(",", ""))
            is_right = bool(numbers) and int(numbers[-1]) == wanted
            told.append(float(is_right) - 0.1 * (list(ids)[-1] != end))
        return told

    return arithmetic


def importance_sampling(log_ratio: Tensor, advantage: Tensor) -> Surrogate:
    ratio = log_ratio.exp()
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(-ratio * advantage, ratio, none, none)


@contextmanager
def service(folder: str, steps: int, options: dict[str, Any]) -> Iterator[Any]:
    """A training run at a service, the folder of what it saves, and the model's name."""
    import tinker

    if not steps:
        yield None
        return
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    with (
        tempfile.TemporaryDirectory() as saved,
        serve_training({folder: folder}, saved, **options) as url,
    ):
        client = tinker.ServiceClient(base_url=url, api_key="tml-local")
        run = client.create_lora_training_client(folder, rank=RANK, seed=0).result()
        yield run, Path(saved)
        client.close("success").result()


def weights_of(served: Any, name: str) -> dict[str, Tensor]:
    run, saved = served
    path = run.save_state(name).result().path.removeprefix("tinker://")
    return load_file(saved / path / "adapter_model.safetensors")


def train_there(served: Any, rows: Any, advantages: Tensor) -> Tensor:
    """A step of the service with the rows; gives the log-probs that it computed of their tokens."""
    from tinker import types

    data, masks = [], []
    for row, advantage in zip(rows, advantages.tolist(), strict=True):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"][1:]
        log_probs = torch.zeros(len(mask)).masked_scatter(
            mask, row["log_probs", "full"][row["masks", "all_assistant_mask"]]
        )
        inputs = {
            "target_tokens": ids[1:].masked_fill(~mask, 0).tolist(),
            "logprobs": log_probs.tolist(),
            "advantages": (mask * advantage).tolist(),
        }
        data.append(types.Datum(types.ModelInput.from_ints(ids[:-1].tolist()), inputs))
        masks.append(mask)
    run, _ = served
    passed = run.forward_backward(data, "importance_sampling")
    adam = types.AdamParams(learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.95, eps=1e-8)
    run.optim_step(adam).result()
    told = [each["logprobs"].to_torch() for each in passed.result().loss_fn_outputs]
    return torch.cat([each[mask] for each, mask in zip(told, masks, strict=True)])


def sampled_and_computed(served: Any, prompt: Sequence[int]) -> float:
    """The largest distance of the log-probs of 64 sampled tokens from those of ``forward``."""
    from tinker import types

    run, _ = served
    sampler = run.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, stop=[], seed=0)
    told = sampler.sample(types.ModelInput.from_ints(prompt), 8, params).result()
    gaps = []
    for one in told.sequences:
        ids = [*prompt, *one.tokens]
        datum = types.Datum(types.ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]})
        passed = run.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        now = passed.to_torch()[len(prompt) - 1 :]
        gaps.append((now - torch.tensor(one.logprobs)).abs().max())
    return float(torch.stack(gaps).max())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--mirrored", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    args = parser.parse_args()
    folder = local_model("smollm2")
    options = {"engine": args.engine}
    if args.engine == "vllm":
        options["max_model_len"] = 512
    with service(folder, args.mirrored, options) as served:
        compare(folder, args.steps, args.mirrored, served, args.seed)


def compare(folder: str, steps: int, mirrored: int, served: Any, seed: int) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layers = [n for n, layer in plain.named_modules() if isinstance(layer, torch.nn.Linear)]
    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=32, target_modules=layers, task_type="CAUSAL_LM")
    model: Any = get_peft_model(plain, config)
    if served is not None:
        first = weights_of(served, "first")
        set_peft_model_state_dict(model, first)
    policy = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        chat_template_name="chatml",
        generate_kwargs={"max_new_tokens": 5},
        max_model_len=512,
    )
    env = ChatEnv(batch_size=(PROMPTS * GROUP,)).append_transform(
        Compose(
            DataLoadingPrimer(questions(max(steps, mirrored)), group_size=GROUP, shuffle=False),
            RewardFunctions([rewards(tokenizer.eos_token_id)]),
            StepCounter(max_steps=1),
        )
    )
    collector = LLMCollector(env, policy)
    # The sum over all tokens, as Tinker's losses are.
    loss = GRPOLoss(policy, surrogate=importance_sampling, aggregation="fixed_length", max_tokens=1)
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    for step in range(max(steps, mirrored)):
        begun = time.monotonic()
        rollouts: Any = collector.collect()
        reward = rollouts["reward"].flatten()
        groups = reward.view(PROMPTS, GROUP)
        advantage = (groups - groups.mean(1, keepdim=True)).flatten()
        rollouts["advantage"] = advantage[:, None, None]
        packed = loss.pack(rollouts)
        window = loss.measure_window(packed)
        for part in packed.micro_batches(max_tokens=2048, count_shared_once=True):
            (loss(part, window=window).total() * len(rollouts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        told = f"step {step:2d}: reward {reward.mean():6.3f}, {time.monotonic() - begun:5.1f} s"
        if step < mirrored:
            rows = rollouts.unbind(0)
            now = train_there(served, rows, advantage)
            drawn = torch.cat(
                [r["log_probs", "full"][r["masks", "all_assistant_mask"]] for r in rows]
            )
            here = get_peft_model_state_dict(model, save_embedding_layers=False)
            there = weights_of(served, f"step-{step}")
            assert here.keys() == there.keys()
            gap = max(float((here[k].detach() - v).abs().max()) for k, v in there.items())
            moved = max(float((first[k] - v).abs().max()) for k, v in there.items())
            told += f"; weights moved by {moved:.1e}, apart by {gap:.1e}"
            told += f"; log-probs apart by {float((now - drawn).abs().max()):.1e} nats"
        print(told, flush=True)
    if served is not None:
        prompt = rollouts.unbind(0)[0]["tokens", "prompt"].tolist()
        gap = sampled_and_computed(served, prompt)
        print(f"sampled by the service, and computed by forward: apart by {gap:.1e} nats")
    collector.shutdown()


if __name__ == "__main__":
    main()
