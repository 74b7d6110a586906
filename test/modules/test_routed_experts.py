"""Tokens of a mixture of experts are trained with the experts that they were drawn with."""

import asyncio

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from objectives import GRPOLoss
from torchrl_data import row_from_state, row_state
from torchrl_data.conversation_io import read_conversations, row_tensordicts
from torchrl_envs import ChatEnv
from torchrl_modules import (
    AsyncTransformersEngine,
    SamplingParameters,
    TransformersEngine,
    TransformersWrapper,
)
from torchrl_modules.engines.readers import PaddedReader, WholeRowReader
from torchrl_modules.scoring.expert_routes import (
    ExpertRoutes,
    packed_experts,
    replayed_layers,
)
from torchrl_modules.scoring.model_reader import Layout
from torchrl_modules.scoring.scorer import PackedScorer

PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3], [20, 21, 22], [20, 21, 22], [40] * 12]
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "initializer_range": 0.4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def build(family, vocab_size, seed=0):
    torch.manual_seed(seed)
    if family == "qwen3_moe":
        sizes = {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True}
        config = Qwen3MoeConfig(vocab_size=vocab_size, intermediate_size=32, **sizes, **SHAPE)
        return Qwen3MoeForCausalLM(config).float().eval()
    sizes = {"num_local_experts": 6, "intermediate_size": 32}
    config = MixtralConfig(vocab_size=vocab_size, **sizes, **SHAPE)
    return MixtralForCausalLM(config).float().eval()


@pytest.fixture(params=["qwen3_moe", "mixtral"])
def model(request, chatml_tokenizer):
    return build(request.param, len(chatml_tokenizer))


def own_routes(model, ids):
    with ExpertRoutes(model) as routes, torch.no_grad():
        model(torch.tensor([ids]))
    return torch.stack(routes.layers, 1)


@pytest.mark.parametrize("reader", [None, PaddedReader, WholeRowReader])
def test_the_engine_writes_down_the_experts_of_all_tokens_that_it_read(model, reader):
    params = SamplingParameters(max_new_tokens=9, stop_token_ids=(2,), seed=3, routed_experts=True)
    engine = TransformersEngine(model)
    if reader is not None:
        engine.__dict__["reader"] = reader
    given = []
    for _ in range(2):  # what an earlier call has kept is read again
        given = engine.generate(PROMPTS, params)
        for prompt, row in zip(PROMPTS, given, strict=True):
            ids = [*prompt, *row.ids]
            assert row.routed_experts is not None
            assert row.routed_experts.dtype == torch.uint8
            # One token of the row was not read: the last.
            assert row.routed_experts.shape == (len(ids) - 1, 2, 2)
            assert torch.equal(row.routed_experts.long(), own_routes(model, ids)[:-1])
        engine.generate(PROMPTS, SamplingParameters(max_new_tokens=2, stop_token_ids=(2,)))
    # Rows that end leave the others where they are.
    left = engine.generate(PROMPTS, params, max_new_tokens=[1, 9, 2, 1, 9])
    for prompt, row in zip(PROMPTS, left, strict=True):
        own = own_routes(model, [*prompt, *row.ids])[:-1]
        assert row.routed_experts is not None
        assert torch.equal(row.routed_experts.long(), own)
    same = engine.generate(
        PROMPTS, SamplingParameters(max_new_tokens=9, stop_token_ids=(2,), seed=3)
    )
    assert [row.ids for row in same] == [row.ids for row in given]
    assert same[0].routed_experts is None


class GivenExperts(torch.nn.Module):
    """A router, written out, that sends tokens where it is told and weighs them by its scores."""

    def __init__(self, weight, experts):
        super().__init__()
        self.weight, self.experts = weight, experts

    def forward(self, hidden):
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        chosen = logits.gather(1, self.experts)  # softmax over the chosen ones alone
        return logits, chosen.softmax(-1), self.experts


def told(model, experts):
    """Replace the routers; experts: int64 [T, L, S]."""
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate = GivenExperts(layer.mlp.gate.weight, experts[:, number])
    return model


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_values_and_gradients_are_those_of_routers_that_send_tokens_there(family, layout):
    model, reference = build(family, 50), build(family, 50)
    scorer = PackedScorer(model, pack=layout is Layout.PACKED)
    scorer._reader.layout = layout
    torch.manual_seed(1)
    rows = [torch.tensor([7, 8, 9, 10, 11]), torch.tensor([7, 8, 9, 12]), torch.tensor([7, 8])]
    # Two different experts of each token; rows that begin alike went elsewhere.
    experts = [
        torch.stack([torch.randperm(6)[:2] for _ in range(2 * len(row))]).unflatten(0, (-1, 2))
        for row in rows
    ]
    mask = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    scores = scorer.score_packed(
        torch.cat(rows),
        torch.tensor([5, 4, 2]),
        mask,
        routed_experts=torch.cat(experts).to(torch.uint8),
    ).log_prob
    expected = []
    for row, own in zip(rows, experts, strict=True):
        logits = told(reference, own)(row[None]).logits[0, :-1]
        expected.append(logits.log_softmax(-1).gather(1, row[1:, None])[:, 0])
    torch.testing.assert_close(scores, torch.cat(expected), atol=1e-5, rtol=1e-5)
    weights = torch.arange(1.0, len(scores) + 1)
    (scores * weights).sum().backward()
    (torch.cat(expected) * weights).sum().backward()
    for (name, one), two in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert (one.grad - two.grad).abs().max() < 1e-5 * two.grad.abs().max() + 1e-7, name
    # Without them the routers choose, and say something else.
    plain = scorer.score_packed(torch.cat(rows), torch.tensor([5, 4, 2]), mask).log_prob
    assert (plain - scores).abs().max() > 0.05


@pytest.fixture
def policy(model, chatml_tokenizer):
    sampling = {"max_new_tokens": 12, "routed_experts": True, "seed": 0}
    return TransformersWrapper(model, tokenizer=chatml_tokenizer, generate_kwargs=sampling)


def drawn(policy):
    queries = TensorDict({"query": ["hello", "What is 2 + 2?", "bye"]}, batch_size=[3])
    batch = policy(ChatEnv(batch_size=(3,)).reset(queries))
    return read_conversations(batch, "full", who="test"), batch


def test_a_loss_replays_the_experts_when_the_routers_have_moved(policy, through_files):
    full, _ = drawn(policy)
    rows = [row_from_state(through_files(row_state(row))) for row in row_tensordicts(full)]
    for row in rows:
        row["advantage"] = torch.ones(1, 1)
        assert row["routed_experts", "full"].shape == (row["tokens", "full"].shape[0], 2, 2)
        assert (row["routed_experts", "full"][-1] == 255).all()
    loss = GRPOLoss(policy)
    packed = loss.pack(lazy_stack(rows))
    ratio = (loss._score(packed).log_prob - packed.entries["log_probs"]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-5, rtol=0)
    with torch.no_grad():
        for layer in policy.model.model.layers:  # the two best experts of each token fall behind
            layer.mlp.gate.weight.neg_()
    now = loss._score(packed).log_prob
    expected = []
    for row in rows:
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        replay = replayed_layers(row["routed_experts", "full"])
        with ExpertRoutes(policy.model, replay), torch.no_grad():
            log_p = policy.model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected.append(log_p.gather(1, ids[1:, None])[:, 0][mask[1:]])
    torch.testing.assert_close(now, torch.cat(expected), atol=1e-5, rtol=1e-5)
    without = loss._score(loss.pack(lazy_stack(rows).exclude("routed_experts"))).log_prob
    assert (without - now).abs().max() > 0.05
    parts = torch.cat([loss._score(part).log_prob for part in packed.micro_batches(num_rows=1)])
    torch.testing.assert_close(parts, now, atol=1e-5, rtol=1e-5)
    policy.scorer.micro_batch_tokens = 40
    with torch.no_grad():
        torch.testing.assert_close(loss._score(packed).log_prob, now, atol=1e-5, rtol=1e-5)
    # A row without the entry is left to the routers.
    mixed = lazy_stack([rows[0], rows[1].exclude("routed_experts")])
    some = loss._score(loss.pack(mixed)).log_prob
    count = int(rows[0]["masks", "all_assistant_mask"].sum())
    other = int(rows[1]["masks", "all_assistant_mask"].sum())
    torch.testing.assert_close(some[:count], now[:count], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(some[count:], without[count : count + other], atol=1e-5, rtol=1e-5)
    scored = policy.log_prob(lazy_stack(rows))
    mask = torch.nn.utils.rnn.pad_sequence(
        [row["masks", "all_assistant_mask"] for row in rows], batch_first=True
    )
    torch.testing.assert_close(scored[mask], now, atol=1e-5, rtol=1e-5)


def test_padded_rows_carry_them_too(policy):
    policy.pad_output = True
    full, batch = drawn(policy)
    with torch.no_grad():
        for layer in policy.model.model.layers:
            layer.mlp.gate.weight.neg_()
    rows = lazy_stack(row_tensordicts(full))
    mask = batch["masks", "all_assistant_mask"]
    padded = policy.log_prob(batch)[mask]
    whole = policy.log_prob(rows)
    ragged = torch.nn.utils.rnn.pad_sequence(
        [row["masks", "all_assistant_mask"] for row in rows.unbind(0)], batch_first=True
    )
    torch.testing.assert_close(padded, whole[ragged], atol=1e-5, rtol=1e-5)


def test_a_later_turn_adds_the_experts_of_what_is_new(policy):
    full, _ = drawn(policy)
    before = full.routed_experts(0)
    assert before is not None
    asked = full.append_messages([[{"role": "user", "content": "and 3 + 3?"}]] * 3)
    second = policy.respond(asked)[1]
    after = second.routed_experts(0)
    assert after is not None
    assert len(after) == second.num_tokens(0) > len(before)
    assert torch.equal(after[: len(before) - 1], before[:-1])
    # The token that was the last, and had not been read, has experts now.
    assert torch.equal(after[:-1].long(), own_routes(policy.model, second.ids(0))[:-1])


@pytest.mark.parametrize(("num_experts", "dtype"), [(254, torch.uint8), (300, torch.int16)])
def test_experts_take_a_byte_each_or_two_where_there_are_many(num_experts, dtype):
    layers = [torch.tensor([[0, num_experts - 1], [-1, 3]]), torch.tensor([[5, 6], [7, -1]])]
    experts = packed_experts(layers, num_experts)
    assert (experts.dtype, experts.shape) == (dtype, (2, 2, 2))
    assert all(map(torch.equal, replayed_layers(experts), layers))


def test_what_can_not_be_recorded_or_replayed_is_refused(
    model, policy, make_tiny_model, chatml_tokenizer
):
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is none"):
        TransformersWrapper(
            make_tiny_model(),
            tokenizer=chatml_tokenizer,
            generate_kwargs={"routed_experts": True},
        )

    async def respond():
        async with AsyncTransformersEngine(TransformersEngine(model)) as engine:
            return await engine.respond([5], policy.sampling)

    with (
        pytest.warns(UserWarning, match="rows of .* can't be put together"),
        pytest.raises(ValueError, match="have no record of their experts"),
    ):
        asyncio.run(respond())
    ids, mask = torch.tensor([5, 6]), torch.tensor([False, True])
    dense = PackedScorer(make_tiny_model())
    for scorer, experts, message in (
        (dense, torch.zeros(2, 2, 2), "has no experts"),
        (policy.scorer, torch.zeros(2, 2, 3), "has 2 of"),
        (policy.scorer, torch.zeros(3, 2, 2), "are of 3 tokens"),
        (policy.scorer, torch.full((2, 2, 2), 9), "up to number 9"),
        (policy.scorer, torch.zeros(2, 3, 2), "are of 3 layers, and .* has 2 with experts"),
    ):
        with pytest.raises(ValueError, match=message):
            scorer.score_packed(
                ids, torch.tensor([2]), mask, routed_experts=experts.to(torch.uint8)
            )
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        policy.scorer.score_packed(
            ids, torch.tensor([2]), mask, routed_experts=torch.zeros(2, 2, 2).to(torch.uint8)
        )
