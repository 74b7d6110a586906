"""Packed sequences score as one row at a time does, in value and in gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
)

from torchrl_data.ragged.packed import pack
from torchrl_modules import TransformersEngine, chunked_log_prob
from torchrl_modules.scoring import chunked_log_prob as chunked_head
from torchrl_modules.scoring.model_reader import Layout
from torchrl_modules.scoring.packed_attention import packed_sdpa_forward
from torchrl_modules.scoring.scorer import PackedScorer

VOCABULARY = 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}


def mistral(**changes):
    return MistralForCausalLM(MistralConfig(**SMALL | {"sliding_window": None} | changes))


def refuse_padding(_, args, inputs):
    mask = inputs.get("attention_mask")
    if mask is not None and not mask.all():
        raise ValueError("no padding")


def unpadded():
    """Takes rows of one length only, as code that comes with a checkpoint may."""
    model = NemotronForCausalLM(NemotronConfig(**SMALL))
    model.model.register_forward_pre_hook(refuse_padding, with_kwargs=True)
    return model


MODELS = {
    "tied head": lambda: mistral(tie_word_embeddings=True),
    "own head": lambda: mistral(tie_word_embeddings=False),
    "sliding window": lambda: mistral(sliding_window=4),
    "logits changed after the head": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SMALL
            | {
                "sliding_window": 4,
                "final_logit_softcapping": 2.0,
                "attn_logit_softcapping": None,
                "query_pre_attn_scalar": 8,
            }
        )
    ),
    "attention scores capped": lambda: Gemma2ForCausalLM._from_config(
        Gemma2Config(**SMALL | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}),
        attn_implementation="eager",
    ),
    "convolutions": lambda: Lfm2ForCausalLM(
        Lfm2Config(**SMALL | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3})
    ),
    "learnt positions": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
    ),
    "values smaller than keys": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{name: value for name, value in SMALL.items() if name != "head_dim"}
            | {"num_key_value_heads": 4, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1},
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=6,
        )
    ),
    "a layer before the head": lambda: BertLMHeadModel(BertConfig(**BERT, is_decoder=True)),
    "attention is not told": lambda: NemotronForCausalLM(NemotronConfig(**SMALL)),
    "padding is refused": unpadded,
}


def build(name):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return MODELS[name]().eval()


def make_rows(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
    masks = [torch.rand(n, generator=generator) < 0.6 for n in lengths]
    for mask in masks:
        mask[0] = False
    return rows, masks


def reference(model, rows, masks, temperature=1.0):
    """One row at a time, eager attention, all logits: log-probs and entropies of the targets."""
    log_probs, entropies = [], []
    for ids, mask in zip(rows, masks, strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
        log_p = logits.log_softmax(-1)
        log_probs.append(log_p.gather(1, ids[1:, None]).squeeze(1)[mask[1:]])
        entropies.append(-(log_p.exp() * log_p).sum(-1)[mask[1:]])
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_one_row_at_a_time(name):
    rows, masks = make_rows([7, 1, 12, 2, 9])
    weights = torch.linspace(-1, 2, int(sum(mask.sum() for mask in masks)))

    alone = build(name)
    alone.set_attn_implementation("eager")
    log_prob, entropy = reference(alone, rows, masks, temperature=0.7)
    (log_prob @ weights + 0.3 * entropy.sum()).backward()

    together = build(name)
    ids, lengths = pack(rows)
    scores = PackedScorer(together).score_packed(
        ids, lengths, torch.cat(masks), temperature=0.7, entropy=True
    )
    torch.testing.assert_close(scores.log_prob, log_prob, rtol=1e-4, atol=1e-5)  # other kernels
    torch.testing.assert_close(scores.entropy, entropy, rtol=1e-4, atol=1e-5)
    (scores.log_prob @ weights + 0.3 * scores.entropy.sum()).backward()
    expected = dict(alone.named_parameters())
    for parameter_name, parameter in together.named_parameters():
        scale = expected[parameter_name].grad.abs().max().item()
        torch.testing.assert_close(
            parameter.grad, expected[parameter_name].grad, rtol=1e-3, atol=1e-4 * max(scale, 1)
        )  # sums over rows and heads in another order
        assert scale > 0, f"{parameter_name} has no gradient, so nothing was compared"


def test_a_model_is_packed_unless_more_than_plain_attention_joins_its_tokens(scorers):
    padded = {name for name, scorer in scorers.items() if not scorer.packed}
    assert padded == {"convolutions", "attention is not told", "padding is refused"}
    assert scorers["padding is refused"].reading.layout is Layout.BY_LENGTH


@pytest.mark.parametrize(
    "build_model",
    [
        pytest.param(
            lambda: Gemma3ForCausalLM(
                Gemma3TextConfig(**SMALL, use_bidirectional_attention=True, query_pre_attn_scalar=8)
            ),
            id="Gemma3ForCausalLM",
        ),
        pytest.param(lambda: BertLMHeadModel(BertConfig(**BERT)), id="BertLMHeadModel"),
    ],
)
def test_a_model_that_sees_what_comes_after_is_refused_by_name(build_model, request):
    name = request.node.callspec.id
    for build_on in (PackedScorer, TransformersEngine):
        with pytest.raises(ValueError, match=rf"{name} is no policy.*the tokens after it, by \d"):
            build_on(build_model())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 14), min_size=2, max_size=6), st.data())
@pytest.mark.parametrize("name", ["tied head", "sliding window", "learnt positions"])
def test_a_changed_token_changes_nothing_before_it_and_no_other_row(scorers, name, lengths, data):
    rows, _ = make_rows(lengths)
    masks = [torch.arange(n) > 0 for n in lengths]
    row = data.draw(st.integers(0, len(rows) - 1))
    at = data.draw(st.integers(0, lengths[row] - 1))

    def score(rows):
        ids, packed_lengths = pack(rows)
        with torch.no_grad():
            scored = scorers[name].score_packed(ids, packed_lengths, torch.cat(masks)).log_prob
        return scored.split([n - 1 for n in lengths])

    before = score(rows)
    rows[row] = rows[row].clone()
    rows[row][at] = (rows[row][at] + 1) % VOCABULARY
    after = score(rows)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        same = lengths[i] - 1 if i != row else max(at - 1, 0)
        # Not to the bit: another token may begin like another row, and be computed beside it.
        torch.testing.assert_close(old[:same], new[:same], rtol=1e-4, atol=1e-5)
    if at > 0 and int(rows[row][at - 1]):  # after padding all tokens are equally likely
        assert not torch.equal(before[row][at - 1 :], after[row][at - 1 :])


@pytest.fixture(scope="module")
def scorers():
    return {name: PackedScorer(build(name)) for name in MODELS}


def test_a_sliding_window_hides_what_is_outside_it(scorers):
    rows = [torch.arange(1, 13)]
    mask = torch.arange(12) == 11
    # Two layers of window 4: the prediction of token 11 sees 5 to 10, and nothing earlier.
    scores = []
    for at in (None, 3, 4, 5):
        ids = rows[0].clone()
        if at is not None:
            ids[at] = 50
        lengths = torch.tensor([12])
        scores.append(scorers["sliding window"].score_packed(ids, lengths, mask).log_prob.item())
    assert scores[0] == scores[1]
    assert scores[0] != scores[3]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("length", [4, 5, 6])
def test_a_window_hides_from_the_first_token_that_is_outside_it(length, share):
    # The window is 4: of 5 tokens the last one does not see the first. Those that share differ in
    # it, the last that is read.
    begin = torch.arange(1, length)
    ends = torch.tensor([[length + own, 40] for own in range(8 if share else 1)])
    rows = [torch.cat([begin, end]) for end in ends]
    mask = torch.arange(length + 1) > 0
    model = build("sliding window")
    scorer = PackedScorer(model)
    ids, lengths = pack(rows)
    found = scorer.score_packed(ids, lengths, mask.repeat(len(rows))).log_prob
    model.set_attn_implementation("eager")
    expected, _ = reference(model, rows, [mask] * len(rows))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_small_passes_without_a_gradient_give_the_same():
    rows, masks = make_rows([7, 3, 12, 2, 9])
    for mask in masks:
        mask[-1] = True
    ids, lengths = pack(rows)
    mask = torch.cat(masks)
    model = build("tied head")
    whole = PackedScorer(model).score_packed(ids, lengths, mask, entropy=True)
    seen = []

    def count(*inputs):
        seen.append(inputs[2]["input_ids"].numel())

    hook = model.model.register_forward_pre_hook(count, with_kwargs=True)
    with torch.no_grad():
        parts = PackedScorer(model, micro_batch_tokens=11).score_packed(
            ids, lengths, mask, entropy=True
        )
    hook.remove()
    # 7+3, then a row longer than the budget alone, then 2+9; last tokens predict nothing.
    assert seen == [8, 11, 9]
    torch.testing.assert_close(parts.log_prob, whole.log_prob.detach())
    torch.testing.assert_close(parts.entropy, whole.entropy.detach())


@pytest.mark.parametrize("own_head", [False, True], ids=["chunked head", "the model's own head"])
def test_shared_hidden_states_add_their_gradients_up_in_one_order(make_tiny_model, own_head):
    """Rows that share a prompt read the same positions. The backward of plain indexing adds
    repeated ones up atomically, so that two runs of one seed differ with two threads."""
    scorer = PackedScorer(make_tiny_model())
    if own_head:
        scorer._head = None
    prompt = torch.arange(1, 50)
    ids, lengths = pack([torch.cat([prompt, torch.tensor([50 + i, 3])]) for i in range(8)])
    mask = torch.cat([torch.arange(51) >= 49] * 8)
    seen, queue = set(), [scorer.score_packed(ids, lengths, mask).log_prob.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [parent for parent, _ in node.next_functions]
    names = {node.name() for node in seen}
    assert "IndexSelectBackward0" in names
    if not own_head:  # that of transformers indexes by itself, each position once
        assert "IndexBackward0" not in names


def test_a_model_generates_as_before_once_it_scores(chatml_tokenizer, make_tiny_model):
    plain, scored = make_tiny_model(), make_tiny_model()
    PackedScorer(scored)
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    logits = [m(input_ids=ids, attention_mask=mask).logits[:, -1] for m in (plain, scored)]
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(
    ("ids", "lengths", "mask", "words"),
    [
        pytest.param([1, 2, 3], [2, 2], [0, 1, 1], "lengths that sum to 4", id="wrong lengths"),
        pytest.param([1, 2, 3], [3], [0, 1], r"mask \(2,\)", id="mask of another shape"),
        pytest.param([1, 2, 3], [3, 0], [0, 1, 1], r"\[3, 0\]", id="empty sequence"),
        pytest.param([1, 2, 3], [2, 1], [0, 1, 1], "first token", id="first token is a target"),
        pytest.param(
            [1, 2, 3, 4, VOCABULARY],
            [2, 3],
            [0, 1, 0, 1, 1],
            rf"token 2 of sequence 1 has the id {VOCABULARY}.*ends at {VOCABULARY - 1}",
            id="id beyond the vocabulary",
        ),
        pytest.param([1, -1], [2], [0, 1], "token 1 of sequence 0 has the id -1", id="id below 0"),
    ],
)
def test_what_can_not_be_scored_is_refused(scorers, ids, lengths, mask, words):
    with pytest.raises(ValueError, match=words):
        scorers["tied head"].score_packed(
            torch.tensor(ids), torch.tensor(lengths), torch.tensor(mask).bool()
        )


def test_no_target_gives_no_scores(scorers):
    scores = scorers["tied head"].score_packed(
        torch.tensor([1, 2]), torch.tensor([2]), torch.tensor([False, False]), entropy=True
    )
    assert scores.log_prob.shape == scores.entropy.shape == (0,)


# The chunked head ---------------------------------------------------------------------------------


def full_log_prob(hidden, weight, targets, bias, temperature):
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("tile", [(1, 7), (3, 64), (1000, 1000)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [True, False])
def test_tiles_give_the_value_and_gradient_of_all_logits(monkeypatch, tile, temperature, with_bias):
    monkeypatch.setattr(chunked_head, "_CPU_TILE", tile)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 16, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) if with_bias else None
    targets = torch.randint(0, VOCABULARY, (8,), generator=generator)
    grad_log_prob = torch.tensor([1.0, -2.0, 0.0, 0.5, 0.0, 3.0, 1.0, -1.0])
    grad_entropy = torch.tensor([0.0, 1.0, 2.0, 0.0, 0.0, -1.0, 1.0, 0.5])

    def run(function, dtype):
        leaves = [
            None if x is None else x.detach().to(dtype).requires_grad_()
            for x in (hidden, weight, bias)
        ]
        outputs = function(*leaves)
        loss = (outputs[0] * grad_log_prob).sum() + (outputs[1] * grad_entropy).sum()
        loss.backward()
        grads = [None if leaf is None else leaf.grad for leaf in leaves]
        return [*(x.detach() for x in outputs), *(g for g in grads if g is not None)]

    expected = run(lambda h, w, b: full_log_prob(h, w, targets, b, temperature), torch.float64)
    found = run(
        lambda h, w, b: chunked_log_prob(
            h, w, targets, bias=b, temperature=temperature, entropy=True
        ),
        torch.float32,
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-4)  # float32 against float64
        assert x.dtype == torch.float32


@pytest.mark.parametrize("width", [1, 2, 3])
def test_each_tile_counts_in_the_entropy_by_what_it_holds(monkeypatch, width):
    monkeypatch.setattr(chunked_head, "_CPU_TILE", (1, width))
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    bias = probabilities.log() + 7.0  # a constant changes nothing
    _, entropy = chunked_log_prob(
        torch.ones(1, 1), torch.zeros(4, 1), torch.tensor([2]), bias=bias, entropy=True
    )
    # -(0.1 ln 0.1 + 0.2 ln 0.2 + 0.3 ln 0.3 + 0.4 ln 0.4)
    torch.testing.assert_close(entropy, torch.tensor([1.279854]))


@pytest.mark.parametrize("width", [1, 3])
def test_a_forbidden_token_has_a_finite_gradient(monkeypatch, width):
    monkeypatch.setattr(chunked_head, "_CPU_TILE", (1, width))
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.zeros(3, 1)
    bias = torch.tensor([-math.inf, 0.0, 0.0])
    log_prob, entropy = chunked_log_prob(hidden, weight, torch.tensor([1]), bias=bias, entropy=True)
    torch.testing.assert_close(log_prob, torch.tensor([-math.log(2)]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]))
    (log_prob + entropy).sum().backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_divides_by_nothing_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be a finite number in"):
        chunked_log_prob(
            torch.ones(1, 1), torch.ones(2, 1), torch.tensor([0]), temperature=temperature
        )


@pytest.mark.parametrize("masked", [True, False])
def test_heads_that_share_keys_attend_to_them_without_copies(masked):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64)
        for heads, length in ((6, 1), (2, 5), (2, 5))
    )
    mask = (
        torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]]).bool()[:, None, None] if masked else None
    )
    module = torch.nn.Module()
    attended, _ = packed_sdpa_forward(module, query, key, value, mask)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(3, 1)) / 8**0.5
    if masked:
        scores = scores.masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(3, 1)
    torch.testing.assert_close(attended, expected.transpose(1, 2))


class WithoutKernel(MistralForCausalLM):
    """A model on a host where the kernel of packed rows can't be made."""

    def __init__(self, config):
        super().__init__(config)

        def fails(_, __, inputs):
            if "trie" in inputs:
                raise RuntimeError("Failed to find C compiler")

        self.model.register_forward_pre_hook(fails, with_kwargs=True)


def test_a_kernel_that_fails_is_told_once_with_the_reason():
    model = WithoutKernel(MistralConfig(**SMALL, sliding_window=None)).eval()
    with pytest.warns(UserWarning, match="WithoutKernel is read padded.*Failed to find C compiler"):
        scorer = PackedScorer(model)
    assert scorer.reading.layout is Layout.PADDED
    rows, masks = make_rows([7, 1, 12])
    ids, lengths = pack(rows)
    want = reference(model, rows, masks, temperature=1.0)[0]
    got = PackedScorer(model).score_packed(ids, lengths, torch.cat(masks)).log_prob  # no warning
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
