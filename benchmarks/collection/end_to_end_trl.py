"""The steps of ``end_to_end.py`` by TRL's trainers.

The asynchronous one asks for a GPU and a server. It gets the engine that `StreamingCollector` has,
in this process, without HTTP between, and attention over its trie by PyTorch in the place of the
kernel.
"""

import asyncio
import queue
import tempfile
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from end_to_end_task import (
    LR,
    QUESTIONS,
    ROWS,
    Clock,
    N,
    Work,
    completion_rewards,
    make_model,
    make_tool,
    model_folder,
    tokenizer_of,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import TrainerCallback


class _Laps(TrainerCallback):
    """Tells the clock; ``self.tokens`` of each step come from its owner."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.tokens = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.lap(self.tokens)
        self.tokens = 0


def _rows() -> Dataset:
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return Dataset.from_list([{"prompt": prompt} for prompt in prompts])


def _rewards(completions: list, **_: Any) -> list[float]:
    return completion_rewards(completions)


def _settings(num_steps: int, work: Work) -> dict[str, Any]:
    """Of both trainers."""
    return {
        "per_device_train_batch_size": ROWS,
        "num_generations": N,
        "max_steps": num_steps,
        "learning_rate": LR,
        "temperature": work.temperature,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


# TRL ----------------------------------------------------------------------------------------------


def trl(clock: Clock, num_steps: int, work: Work) -> None:
    """``GRPOTrainer``."""
    from trl import GRPOConfig, GRPOTrainer

    laps = _Laps(clock)

    class Trainer(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            mask = inputs["completion_mask"]
            drawn = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
            laps.tokens += int(drawn.sum())
            return super()._compute_loss(model, inputs)

    is_single = work.turns == 1
    if is_single:
        options: dict[str, Any] = {
            "max_completion_length": work.max_new_tokens,
            "generation_kwargs": {"min_new_tokens": work.max_new_tokens},
        }
    else:
        options = {
            "max_completion_length": work.max_new_tokens * 2 * work.turns,
            "max_tool_calling_iterations": work.turns - 1,
        }
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            beta=0.0,
            **_settings(num_steps, work),
            **options,
        )
        trainer = Trainer(
            model=make_model(work),
            args=config,
            reward_funcs=_rewards,
            train_dataset=_rows(),
            processing_class=tokenizer_of(work),
            callbacks=[laps],
            tools=None if is_single else [make_tool(work)],
        )
        trainer.train()


# TRL, asynchronous --------------------------------------------------------------------------------


def _varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None,
    **_: Any,
) -> Tensor:
    """FlashAttention's: causal from the lower right corner, one segment after the other."""
    del max_seqlen_q, max_seqlen_k
    out: list[Tensor] = []
    for i in range(len(cu_seqlens_q) - 1):
        q = query[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].transpose(0, 1)[None]
        above = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
        k, v = (x[above].transpose(0, 1)[None] for x in (key, value))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        mask = seen.tril(k.shape[2] - q.shape[2])
        each = scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True)
        out.append(each[0].transpose(0, 1))
    return torch.cat(out)


class _Worker:
    """TRL's loop of rollouts in a thread, over an engine of this process."""

    def __init__(self, engine: Any, tokenizer: Any, work: Work) -> None:
        from trl.experimental.async_grpo import async_rollout_worker

        from torchrl_modules.sampling.parameters import SamplingParameters

        least = work.max_new_tokens if work.turns == 1 else 0
        params = SamplingParameters(
            max_new_tokens=work.max_new_tokens,
            min_tokens=least,
            temperature=work.temperature,
            stop_token_ids=(tokenizer.eos_token_id,),
        )

        class Loop(async_rollout_worker._AsyncRolloutLoop):
            async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[Any, Any]:
                # A rollout is a task: what was read of it is kept, as by a server's prefix cache.
                session = id(asyncio.current_task())
                said = await engine.respond(prompt_ids, params, session=session)
                return said.ids, said.log_probs

        self.rollout_buffer: queue.Queue[Any] = queue.Queue(1024)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._version = SimpleNamespace(value=0)
        self._failed = threading.Event()
        self._errors: queue.Queue[Any] = queue.Queue()
        self._loop = Loop(
            model_name="policy",
            dataset=_rows(),
            reward_funcs=[_rewards],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            rollout_buffer=self.rollout_buffer,
            model_version_value=self._version,
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=self._failed,
            exception_info_queue=self._errors,
            metrics_queue=self.metrics_queue,
            tools=[make_tool(work)] if work.turns > 1 else None,
            num_generations=N,
            max_inflight_tasks=(work.staleness + 1) * ROWS,
            max_tokens=work.max_new_tokens,
            max_tool_calling_iterations=work.turns - 1,
        )
        self._thread = threading.Thread(target=self._loop.run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop._loop.call_soon_threadsafe(self._loop._stop_event.set)
        self._thread.join(60.0)

    def update_model_version(self, model_version: int) -> None:
        self._version.value = model_version

    def check_health(self, stale_after_s: float) -> None:
        del stale_after_s
        if self._failed.is_set():
            raise RuntimeError(f"TRL's loop failed: {self._errors.get()}")


class _Transfer:
    """Weights to the engine of this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        asyncio.run(self._engine.update_weights(dict(iterator)))


def trl_async(clock: Clock, num_steps: int, work: Work) -> None:
    """``AsyncGRPOTrainer``."""
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )

    from torchrl_modules import TransformersWrapper, open_async

    vars(async_grpo_trainer)["get_peak_flops_per_device"] = lambda *_: None  # asks the GPU
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_varlen_attention)
    laps = _Laps(clock)

    class Trainer(AsyncGRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            laps.tokens += len(inputs["token_index"].flatten())
            return super().compute_loss(model, inputs, *args, **kwargs)

    tokenizer = tokenizer_of(work)
    actor = TransformersWrapper(make_model(work), tokenizer=tokenizer)
    engine = open_async(actor.engine, copy_model=False)
    worker: Any = _Worker(engine, tokenizer, work)
    with tempfile.TemporaryDirectory() as folder:
        config = AsyncGRPOConfig(
            output_dir=folder,
            gradient_accumulation_steps=1,
            token_budget=0,
            max_staleness=work.staleness,
            dtype="float32",
            **_settings(num_steps, work),
        )
        trainer = Trainer(
            model=model_folder(work),
            args=config,
            reward_funcs=_rewards,
            train_dataset=_rows(),
            processing_class=tokenizer,
            callbacks=[laps],
            rollout_worker=worker,
            weight_transfer=_Transfer(engine),
        )
        try:
            trainer.train()
        finally:
            engine.close()
