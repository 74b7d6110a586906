"""P3: what a policy costs over its bare engine, and scoring over its optimum.

    python benchmarks/policy_overhead.py [--engines transformers,vllm] [--repeats 7]

Generation: 64 chats of one turn, 64 tokens each, greedy, log-probs on. ``bare engine`` gives the
engine the same token ids and makes tensors of what comes back: for vLLM ``LLM.generate`` itself,
for Transformers the decode loop of this library. ``policy`` goes from messages to a batch with
history, tokens, masks and log-probs. ``torchrl`` is TorchRL's wrapper of the same engine, in its
tokens mode on the same ids. For vLLM also the longest gap between its log-probs and those of the
Transformers model, of the same float32 weights, on tokens drawn at temperature 1.

Scoring: the ragged groups of ``training_step.py``; ``by hand`` is the model on packed tokens with
shared prompts, and the head on the trained ones, in tiles.

CPU seconds, interleaved, medians, after a check that all give the same ids and log-probs.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from training_step import CASES, Batch, grouped_inputs, make_batch, make_model, padded

from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import read_conversations, write_conversations
from torchrl_data.ragged.packed import pack
from torchrl_modules import TransformersWrapper, vLLMWrapper
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.scoring.scorer import PackedScorer
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

ROWS, NEW_TOKENS = 64, 64
GENERATE = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "stop_token_ids": ()}


def compare(title: str, runs: dict[str, Callable[[], Any]], repeats: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            gc.collect()
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = next(iter(medians.values()))
    print(title)
    for name, value in medians.items():
        print(f"  {name:28s} {value:7.3f} CPU s {value / base:6.2f}x", flush=True)


def chats() -> TensorDict:
    batch = TensorDict(batch_size=[ROWS])
    rows = [[{"role": "user", "content": f"{i} plus {i * i}?"}] for i in range(ROWS)]
    write_conversations(batch, "prompt", Conversations.from_messages(rows))
    return batch


def prompt_ids(policy: Any) -> list[list[int]]:
    prompts = policy.encoder.encode_waiting(read_conversations(chats(), "prompt", who="benchmark"))
    return [prompts.ids(i) for i in range(ROWS)]


def own_engine(policy: Any, ids: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = policy.engine.generate(ids, policy.sampling)
    return [(torch.tensor(g.ids), torch.tensor(g.log_probs)) for g in drawn]


def vllm_itself(policy: Any, ids: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=NEW_TOKENS,
        temperature=0.0,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
    )
    prompts = [{"prompt_token_ids": row} for row in ids]
    drawn = [o.outputs[0] for o in policy.engine._llm.generate(prompts, params, use_tqdm=False)]
    return [(torch.tensor(o.token_ids), torch.tensor(o.logprobs.logprobs)) for o in drawn]


def generation(
    policy: Any, title: str, repeats: int, *, engine: Callable[..., Any], peers: dict[str, Any]
) -> None:
    ids = prompt_ids(policy)

    def bare() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return engine(policy, ids)

    expected, batch = bare(), policy(chats())
    for (tokens, log_probs), row in zip(expected, batch.unbind(0), strict=True):
        assert torch.equal(row["tokens", "response"], tokens)
        torch.testing.assert_close(row["log_probs", "response"], log_probs, rtol=0, atol=1e-4)
    runs = {"bare engine": bare, "policy": lambda: policy(chats())}
    runs |= {name: build(policy, ids) for name, build in peers.items()}
    compare(title, runs, repeats)


def engine_gap(policy: Any, model: Any, title: str) -> None:
    """Print how far vLLM's log-probs are from the Transformers model's."""
    ids = prompt_ids(policy)
    params = SamplingParameters(max_new_tokens=NEW_TOKENS, stop_token_ids=())
    drawn = policy.engine.generate(ids, params)
    tokens, lengths = pack([torch.tensor(row + g.ids) for row, g in zip(ids, drawn, strict=True)])
    mask, _ = pack(
        [torch.arange(len(row) + len(g.ids)) >= len(row) for row, g in zip(ids, drawn, strict=True)]
    )
    with torch.no_grad():
        scores = PackedScorer(model).score_packed(tokens, lengths, mask).log_prob
    gap = (scores - torch.cat([torch.tensor(g.log_probs) for g in drawn])).abs()
    print(
        f"{title}: log-probs of {len(gap)} tokens, longest gap to Transformers {gap.max():.1e} "
        f"nats, mean {gap.mean():.1e}",
        flush=True,
    )


def hugging_face(policy: Any, ids: list[list[int]]) -> Callable[[], Any]:
    """Transformers' own generate, with the log-probs computed from its scores."""
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.tensor(row) for row in ids]
    mask = pad_sequence([torch.ones_like(r) for r in rows], True, padding_side="left")
    inputs = {"input_ids": pad_sequence(rows, True, padding_side="left"), "attention_mask": mask}

    def run() -> Any:
        out = policy.model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            eos_token_id=None,
        )
        log_p = torch.stack(out.scores, 1).log_softmax(-1)
        return log_p.gather(-1, out.sequences[:, -NEW_TOKENS:, None])

    return run


def torchrl_tokens(policy: Any, ids: list[list[int]]) -> Callable[[], Any]:
    from torchrl.modules.llm import TransformersWrapper as TorchRLWrapper

    peer = TorchRLWrapper(
        policy.model,
        tokenizer=policy.tokenizer,
        input_mode="tokens",
        generate=True,
        return_log_probs=True,
        pad_output=True,
        generate_kwargs={"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None},
    )
    return lambda: peer(padded_prompts(ids))


def torchrl_vllm(policy: Any, ids: list[list[int]]) -> Callable[[], Any]:
    """TorchRL's vLLMWrapper over the same `vllm.LLM`."""
    from torchrl.modules.llm import vLLMWrapper as TorchRLWrapper

    peer = TorchRLWrapper(
        policy.engine._llm,
        tokenizer=policy.tokenizer,
        input_mode="tokens",
        generate=True,
        return_log_probs=True,
        pad_output=True,
        generate_kwargs={"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True},
    )
    return lambda: peer(padded_prompts(ids))


def padded_prompts(ids: list[list[int]]) -> TensorDict:
    """Prompts as TorchRL's tokens mode takes them."""
    width = max(map(len, ids))
    rows = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in ids])
    entries = {"tokens": {"prompt": rows}, "masks": {"all_attention_mask": mask}}
    return TensorDict(entries, batch_size=[ROWS])


def scoring(repeats: int) -> None:
    case = CASES["32k"]
    model, batch = make_model(case).eval(), make_batch(case)
    tokenizer = train_tokenizer(["a b c"], vocab_size=270)
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, chat_template_name="chatml", generate=False
    )
    rows = batch.rows.select("tokens", "masks")
    given = padded(batch)

    def by_hand() -> torch.Tensor:
        model.set_attn_implementation("limit")
        inputs, predictors, targets = grouped_inputs(batch)
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[0, predictors]
        parts = [
            (some @ model.lm_head.weight.T).log_softmax(-1).gather(1, at[:, None]).squeeze(1)
            for some, at in zip(hidden.split(256), targets.split(256), strict=True)
        ]
        return torch.cat(parts)

    def ours() -> torch.Tensor:
        model.set_attn_implementation("packed_rows")
        scored = policy(rows.copy())
        return torch.cat([row["log_probs", "full"] for row in scored.unbind(0)])

    def all_positions() -> torch.Tensor:
        model.set_attn_implementation("sdpa")
        logits = model(input_ids=given.ids, attention_mask=given.attention, use_cache=False).logits
        log_p = logits[:, :-1].log_softmax(-1).gather(-1, given.ids[:, 1:, None])
        return log_p.squeeze(-1)[given.trained[:, 1:]]

    with torch.no_grad():
        expected = by_hand()
        found = ours()
        torch.testing.assert_close(found[found != 0], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(all_positions(), expected, rtol=1e-5, atol=1e-5)
        runs = {"by hand": by_hand, "policy": ours, "padded, all positions": all_positions}
        compare(f"scoring {_size(batch)}", runs, repeats)


def _size(batch: Batch) -> str:
    tokens = sum(len(row["tokens", "full"]) for row in batch.rows.unbind(0))
    return f"{tokens} tokens, {batch.num_trained} of them scored, 32M model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="transformers,vllm")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    tokenizer = train_tokenizer(["what is the sum of the numbers"] * 4, vocab_size=360)
    torch.manual_seed(0)
    size = len(tokenizer)
    models = {
        "tiny": tiny_qwen3(size, stop_token_ids=()).eval(),
        "2M": tiny_qwen3(
            size, hidden_size=256, num_layers=4, num_heads=8, intermediate_size=512
        ).eval(),
    }
    for name, model in models.items():
        if "transformers" in options.engines:
            policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=GENERATE)
            peers = {"generate of Transformers": hugging_face, "torchrl": torchrl_tokens}
            with torch.no_grad():
                generation(
                    policy,
                    f"Transformers, {name} model",
                    options.repeats,
                    engine=own_engine,
                    peers=peers,
                )
        if "vllm" in options.engines:
            directory = tempfile.mkdtemp()
            model.save_pretrained(directory)
            settings = {"kv_cache_memory_bytes": 256 << 20, "block_size": 32}
            policy = vLLMWrapper(
                directory, tokenizer=tokenizer, generate_kwargs=GENERATE, engine_kwargs=settings
            )
            title = f"vLLM, {name} model"
            generation(
                policy, title, options.repeats, engine=vllm_itself, peers={"torchrl": torchrl_vllm}
            )
            engine_gap(policy, model, title)
            policy.engine.close()
    scoring(options.repeats)


if __name__ == "__main__":
    main()
