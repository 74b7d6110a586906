"""Each engine, input mode and mask: from the rollout through the buffer to the loss, ratio 1."""

import copy

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from objectives import GRPOLoss, MCAdvantage
from torchrl_data.conversation_io import active_rows, read_conversations, write_conversations
from torchrl_data.keys import INPUT_MODES
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EpisodeTransform,
    RewardFunctions,
    StepCounter,
)
from torchrl_modules import TransformersWrapper, vLLMWrapper

ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
GAP = {"transformers": 1e-5, "vllm": 1e-4}
"""Largest difference of a log-prob, in nats: the sums of another engine are in another order."""
PROMPTS = ["hi", "a longer question 🙂"]


class Nudge(EpisodeTransform):
    """A user who answers every turn, also one that was cut."""

    answers_cut_turns = True

    def _step(self, tensordict, next_tensordict):
        prompt = read_conversations(next_tensordict, "prompt", who="Nudge")
        answers = [
            [{"role": "user", "content": "go on"}] if active else []
            for active in active_rows(tensordict).tolist()
        ]
        write_conversations(next_tensordict, "prompt", prompt.append_messages(answers))
        return next_tensordict


def by_row(completions):
    return [float(i % 2) for i in range(len(completions))]


@pytest.fixture
def make_policy(request, model, chatml_tokenizer):
    def make(engine, mode, **settings):
        kwargs = {
            "tokenizer": chatml_tokenizer,
            "input_mode": mode,
            "generate_kwargs": {"max_new_tokens": 6} | settings,
        }
        if engine == "vllm":
            return vLLMWrapper(request.getfixturevalue("vllm_engine"), **kwargs)
        torch.manual_seed(0)
        return TransformersWrapper(model, **kwargs)

    return make


@pytest.fixture
def collect(chatml_tokenizer):
    def run(policy, buffer=None):
        env = ChatEnv(
            batch_size=4,
            input_mode=policy.input_mode,
            tokenizer=chatml_tokenizer,
            system_prompt="sys",
        ).append_transform(
            Compose(
                DataLoadingPrimer([{"prompt": prompt} for prompt in PROMPTS], group_size=2),
                RewardFunctions([by_row]),
                StepCounter(max_steps=2),
                Nudge(),
            )
        )
        collector = LLMCollector(env, policy, replay_buffer=buffer)
        batch = collector.collect()
        collector.shutdown()
        return batch

    return run


def sampled(batch, key):
    return torch.cat([row[key][row["masks", "all_assistant_mask"]] for row in batch.unbind(0)])


@pytest.mark.parametrize("masking", ["assistant", "response", "all"])
@pytest.mark.parametrize("mode", INPUT_MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_from_rollout_to_loss_the_ratio_is_one(
    engine, mode, masking, make_policy, collect, model, chatml_tokenizer
):
    buffer = ReplayBuffer(storage=LazyStackStorage(4), transform=MCAdvantage(2), batch_size=4)
    collect(make_policy(engine, mode), buffer)
    batch = buffer[:]
    assert batch["num_turns"].tolist() == [2] * 4
    actor = TransformersWrapper(model, tokenizer=chatml_tokenizer, generate=False, input_mode=mode)
    with torch.no_grad():
        scored = sampled(actor(batch.clone(False)), ("log_probs", "full"))
    ratio = (scored - sampled(batch, ("log_probs", "full"))).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=GAP[engine])

    # A clip range as narrow as the gap holds every trained token.
    loss = GRPOLoss(actor, clip_epsilon=GAP[engine], masking_strategy=masking)
    out = loss(batch)
    assert out.clip_fraction == 0
    assert out.kl_approx.abs() < GAP[engine]
    model.zero_grad()
    out.total().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("mode", INPUT_MODES)
def test_a_policy_that_pads_collects_the_same_rows(mode, collect, model, chatml_tokenizer):
    rows = []
    for pad_output in (False, True):
        torch.manual_seed(0)
        policy = TransformersWrapper(
            model,
            tokenizer=chatml_tokenizer,
            input_mode=mode,
            pad_output=pad_output,
            generate_kwargs={"max_new_tokens": 6},
        )
        batch = collect(policy)
        assert batch["num_turns"].tolist() == [2] * 4
        names = [("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full")]
        rows.append([[row[name].tolist() for name in names] for row in batch.unbind(0)])
    assert rows[0] == rows[1]
    assert len({len(tokens) for tokens, *_ in rows[0]}) > 1  # so that there was padding


@pytest.mark.parametrize("mode", INPUT_MODES)
def test_ids_beyond_the_tokenizer_go_from_rollout_to_loss(
    mode, collect, build_model, chatml_tokenizer
):
    model = build_model(0)
    model.resize_token_embeddings(600)  # padded, as those of Qwen are
    settings = {"tokenizer": chatml_tokenizer, "input_mode": mode}
    torch.manual_seed(0)
    batch = collect(
        TransformersWrapper(
            model, generate_kwargs={"max_new_tokens": 6, "temperature": 3.0}, **settings
        )
    )
    assert batch["num_turns"].tolist() == [2] * 4
    first = torch.cat([row["tokens", "full"][:-12] for row in batch.unbind(0)])
    assert (first >= len(chatml_tokenizer)).any(), "drawn in the first turn"
    actor = TransformersWrapper(
        model, generate=False, generate_kwargs={"temperature": 3.0}, **settings
    )
    stored = sampled(batch, ("log_probs", "full"))
    with torch.no_grad():
        scored = sampled(actor(batch.clone(False)), ("log_probs", "full"))
    torch.testing.assert_close(scored, stored, rtol=0, atol=1e-5)


ROUNDING = 1e-5
"""Sums of probabilities that float32 can't tell from ``top_p``."""


def truncated_log_prob(logits, token, *, temperature, top_k, top_p):
    """Log-prob of one token after temperature, top-k and top-p, one after the other, by sorting.

    The second number is how near ``top_p`` is to letting in, or out, one token more: within the
    rounding of the engine's sums either is right.
    """
    logits = logits / temperature
    order = logits.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    probabilities = logits[kept].softmax(0)
    before = probabilities.cumsum(0) - probabilities
    kept = kept[before < top_p]
    margin = float((before - top_p).abs().min()) if top_p < 1 else 1.0
    assert token in kept or margin < ROUNDING, "a token that could not be drawn"
    return logits[token] - logits[kept].logsumexp(0), margin


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("mode", INPUT_MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_sampled_log_prob_is_the_teacher_forced_one(
    engine, mode, temperature, make_policy, collect, model
):
    exact = copy.deepcopy(model).double()
    for top_k, top_p in ((0, 1.0), (8, 1.0), (0, 0.6)):
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        batch = collect(make_policy(engine, mode, **settings))
        expected, margins = [], []
        for row in batch.unbind(0):
            ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
            with torch.no_grad():
                logits = exact(ids[None]).logits[0]
            positions = mask.nonzero().view(-1).tolist()
            assert len(positions) >= 2, "two turns"
            for t in positions:
                log_prob, margin = truncated_log_prob(logits[t - 1], int(ids[t]), **settings)
                expected.append(log_prob)
                margins.append(margin)
        stored = sampled(batch, ("log_probs", "full")).double()
        clear = torch.tensor(margins) > ROUNDING
        assert clear.sum() >= len(clear) - 2
        far = (stored - torch.stack(expected)).abs().masked_fill(~clear, 0.0)
        at = int(far.argmax())
        assert far[at] <= GAP[engine], (settings, at, stored[at], expected[at], margins[at])


@pytest.mark.parametrize("write_tokens", [True, False])
@pytest.mark.parametrize("mode", INPUT_MODES)
def test_what_a_policy_wrote_is_scored_in_its_mode(mode, write_tokens, model, chatml_tokenizer):
    kwargs = {"tokenizer": chatml_tokenizer, "input_mode": mode}
    env = ChatEnv(batch_size=2, input_mode=mode, tokenizer=chatml_tokenizer)
    torch.manual_seed(0)
    policy = TransformersWrapper(
        model, write_tokens=write_tokens, generate_kwargs={"max_new_tokens": 5}, **kwargs
    )
    query = torch.tensor([[5, 6, 7], [8, 9, 10]]) if mode == "tokens" else PROMPTS
    batch = policy(env.reset(env.full_done_spec.zero().set("query", query)))
    record = read_conversations(batch, "full", who="test")
    scored = TransformersWrapper(model, generate=False, **kwargs)(batch)
    for i, row in enumerate(scored.unbind(0)):
        torch.testing.assert_close(
            row["log_probs", "full"].detach(), record.log_probs(i), rtol=0, atol=1e-5
        )
        assert row["tokens", "full"].tolist() == record.ids(i)
