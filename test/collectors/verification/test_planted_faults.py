"""Faults that were planted in the drawing of tokens: each is named, and nothing else is.

Rows are drawn by the Transformers engine, from a dense model, one with a sliding window and a
mixture of experts, and something is done to it that an engine should not do.
"""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from transformers import MistralConfig, MistralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from collectors.verification import Cause, Recomputation, SampledRow, verify_rows
from collectors.verification.cause import UNEXPLAINED
from collectors.verification.conditions import Numbers
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import write_conversations
from torchrl_data.keys import KEPT_COUNTS
from torchrl_modules import TransformersWrapper
from torchrl_modules.scoring.expert_routes import ExpertRoutes

MODELS = ("dense", "window", "experts")
QUESTIONS = ["What is 2 + 2?", "hello world", "say it again please, What is 2 + 2? hello"]
SAMPLING = {"max_new_tokens": 24, "stop_token_ids": (), "seed": 3}


@pytest.fixture(scope="module")
def model_of(make_tiny_model, chatml_tokenizer):
    """Builds a model of a kind; a seed gives its weights."""
    sizes = {
        "vocab_size": len(chatml_tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    kinds = {
        "window": lambda: MistralForCausalLM(MistralConfig(**sizes, sliding_window=16)),
        "experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)),
    }

    def build(kind, seed=0):
        if kind == "dense":
            return make_tiny_model(seed=seed)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model = kinds[kind]().eval()
            for name, parameter in model.named_parameters():
                if name.endswith("gate.weight"):  # the router, which begins at zero
                    torch.nn.init.normal_(parameter, std=0.1)
            return model

    return build


@pytest.fixture
def policy_of(model_of, chatml_tokenizer):
    """Builds a policy over a model of a kind, of other weights by the number of its version."""

    def build(kind, version=1, *, model=None, sampling=None, **options):
        return TransformersWrapper(
            model if model is not None else moved(model_of(kind), version),
            tokenizer=chatml_tokenizer,
            generate_kwargs={**SAMPLING, **(sampling or {})},
            **options,
        )

    return build


@torch.no_grad()
def moved(model, version):
    """The weights of a version: those of version 1, and a step for each further one."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter += 0.02 * (version - 1) * torch.randn_like(parameter)
    return model


def drawn(policy, *, version=1, questions=QUESTIONS, answers=("again", "hello")):
    """Rows of two turns, drawn by a policy, as a record has them."""
    rows = Conversations.from_messages([[{"role": "user", "content": q}] for q in questions])
    _, rows, _ = policy.respond(rows)
    for answer in answers[:1]:
        rows = rows.append_messages([[{"role": "user", "content": answer}]] * len(rows))
        _, rows, _ = policy.respond(rows)
    return [row_of(rows, i, version) for i in range(len(rows))]


def row_of(rows, i, version):
    sampled = rows.assistant_mask(i).tolist()
    return SampledRow(
        name=f"row {i}",
        ids=rows.ids(i),
        sampled=sampled,
        log_probs=rows.log_probs(i).tolist(),
        versions=[version if here else None for here in sampled],
        messages=rows.messages(i),
        batch="the batch",
    )


@pytest.fixture
def verified(policy_of, model_of):
    """Verifies rows with the weights of versions 1 to 3 and the sampling that should have been."""

    def verify(kind, rows, *, sampling=None, numbers=None, keeps_cache=False, **options):
        policy = policy_of(kind, sampling=sampling, generate=False)
        weights = {v: moved(model_of(kind), v).state_dict() for v in (1, 2, 3)}
        load = {v: partial(load_into, weights[v]) for v in weights}
        computed = Recomputation(policy, load, numbers=numbers, keeps_cache=keeps_cache)
        return verify_rows(rows, computed, **options)

    return verify


def load_into(weights, model):
    model.load_state_dict(weights, strict=False)


def causes_of(certificate):
    return set(certificate.counts)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 20, "min_p": 0.02}])
def test_a_healthy_run_is_verified_whole(kind, sampling, policy_of, verified):
    rows = drawn(policy_of(kind, 2, sampling=sampling), version=2)
    certificate = verified(kind, rows, sampling=sampling)
    assert certificate.is_clean
    assert certificate.num_tokens == len(QUESTIONS) * 2 * 24
    assert certificate.verdict.startswith(f"all {certificate.num_tokens} tokens explained")


@pytest.mark.parametrize("kind", MODELS)
def test_another_temperature_is_named_with_its_value(kind, policy_of, verified):
    rows = drawn(policy_of(kind, sampling={"temperature": 0.7}))
    certificate = verified(kind, rows)
    assert causes_of(certificate) == {Cause.TEMPERATURE}
    words = certificate.rows[0].words[Cause.TEMPERATURE]
    assert words == "the log-probs are those of temperature 0.7; the settings say 1"


@pytest.mark.parametrize(
    ("kind", "drawn_with", "settings", "said"),
    [
        ("dense", {"top_k": 20}, {}, "drawn with top_k=20; the settings say no truncation"),
        ("dense", {"min_p": 0.1}, {}, "drawn with min_p=0.1; the settings say no truncation"),
        ("dense", {}, {"top_k": 20}, "the log-probs are those without truncation"),
        ("window", {"top_p": 0.8}, {}, "drawn with top_p=0.8; the settings say no truncation"),
        ("experts", {"top_k": 5}, {"top_p": 0.9}, "drawn with top_k=5; the settings say top_p=0.9"),
    ],
)
def test_another_truncation_is_named(kind, drawn_with, settings, said, policy_of, verified):
    rows = drawn(policy_of(kind, sampling=drawn_with))
    certificate = verified(kind, rows, sampling=settings)
    assert causes_of(certificate) == {Cause.TRUNCATION}
    assert said in certificate.rows[0].words[Cause.TRUNCATION]


def test_rows_with_recorded_sets_are_computed_in_them_whatever_the_settings(policy_of, verified):
    policy = policy_of("dense", sampling={"top_p": 0.9, "top_k": 12, "sampling_mask": True})
    conversations = Conversations.from_messages([[{"role": "user", "content": QUESTIONS[0]}]])
    _, conversations, _ = policy.respond(conversations)
    plain = row_of(conversations, 0, 1)
    row = replace(plain, sampling_masks=conversations.sampling_masks(0))
    certificate = verified("dense", [row])
    assert certificate.is_clean
    [told] = certificate.replayed
    untruncated = verified("dense", [plain])
    assert causes_of(untruncated) != set()
    beyond = [gap for gap in untruncated.rows[0].gaps if abs(gap) > certificate.tolerance]
    assert (told.cause, told.num_others) == ("truncation", len(beyond))
    assert told.largest == pytest.approx(max(map(abs, beyond)), abs=1e-6)
    # Sets of the token alone would give each the probability 1.
    alone = [
        b"\x02" + i.to_bytes(2, "little") if here else b""
        for i, here in zip(row.ids, row.sampled, strict=True)
    ]
    wrong = verified(
        "dense", [replace(row, sampling_masks=alone)], sampling={"top_p": 0.9, "top_k": 12}
    )
    assert causes_of(wrong) == {Cause.TRUNCATION}
    assert wrong.rows[0].words[Cause.TRUNCATION] == (
        "drawn from what the settings leave (top_k=12, top_p=0.9), not from the recorded sets"
    )
    policy = policy_of("experts", sampling={"routed_experts": True})
    conversations = Conversations.from_messages([[{"role": "user", "content": QUESTIONS[0]}]])
    _, conversations, _ = policy.respond(conversations)
    collected = TensorDict(batch_size=[])
    write_conversations(collected, "full", conversations)
    routed = SampledRow.of_collected(collected, name="row 0")
    assert routed.experts is not None
    assert [tuple(layer.shape) for layer in routed.experts] == [(len(routed.ids), 2)] * len(
        routed.experts
    )


def test_a_cut_that_no_one_setting_explains_is_told_by_the_recorded_counts(
    policy_of, verified, reference_log_probs
):
    # Top-p and top-k act together, so no one of them gives these log-probs.
    policy = policy_of("dense", sampling={"top_p": 0.9, "top_k": 12, "kept_counts": True})
    conversations = Conversations.from_messages([[{"role": "user", "content": QUESTIONS[0]}]])
    _, conversations, _ = policy.respond(conversations)
    row = row_of(conversations, 0, 1)
    counts = conversations.extra(0)[KEPT_COUNTS].int().tolist()
    row = replace(row, kept_counts=counts)
    own = reference_log_probs(policy.model, row.ids)
    with torch.no_grad():
        p = policy.model(torch.tensor([row.ids])).logits[0].softmax(-1)
    for t in row.targets:  # what is drawn among so many has this probability
        mass = float(p[t - 1].sort(descending=True).values[: counts[t]].sum())
        assert row.log_probs[t] == pytest.approx(float(own[t]) - math.log(mass), abs=1e-5)
    certificate = verified("dense", [row])
    assert causes_of(certificate) == {Cause.TRUNCATION}
    kept = [counts[t] for t in row.targets]
    said = f"of as many tokens as are recorded, {min(kept)} to {max(kept)}; the settings say no"
    assert said in certificate.rows[0].words[Cause.TRUNCATION]
    assert min(kept) < max(kept) <= 12
    without = verified("dense", [replace(row, kept_counts=None)])
    assert Cause.TRUNCATION not in without.counts


@pytest.mark.parametrize("kind", MODELS)
def test_weights_of_another_version_are_named(kind, policy_of, verified):
    rows = drawn(policy_of(kind, 3), version=2)
    certificate = verified(kind, rows)
    assert causes_of(certificate) == {Cause.VERSION}
    assert certificate.rows[0].words[Cause.VERSION] == "drawn by version 3; the row says 2"


def test_a_cache_that_an_engine_kept_over_an_update_is_named(policy_of, verified, model_of):
    policy = policy_of("dense", 1)
    engine = policy.engine
    rows = Conversations.from_messages([[{"role": "user", "content": q}] for q in QUESTIONS])
    _, rows, _ = policy.respond(rows)
    # An update after which the engine does not forget what the weights before it have read.
    engine._batches = partial(_batches_without_looking, engine)
    load_into(moved(model_of("dense"), 2).state_dict(), policy.model)
    rows = rows.append_messages([[{"role": "user", "content": "again"}]] * len(rows))
    _, rows, _ = policy.respond(rows)
    found = []
    for i in range(len(rows)):
        row = row_of(rows, i, 1)
        second = row.turns[1]
        versions = [2 if t in second else v for t, v in enumerate(row.versions)]
        found.append(replace(row, versions=versions))
    certificate = verified("dense", found)
    assert causes_of(certificate) == {Cause.CACHE}
    words = certificate.rows[0].words[Cause.CACHE]
    assert words == "after an update the engine went on with what the weights before it had read"
    # The first turn was drawn as it is recorded.
    assert all(
        cause is None or place in row.turns[1]
        for row, verdict in zip(found, certificate.rows, strict=True)
        for place, cause in zip(verdict.places, verdict.causes, strict=True)
    )


def _batches_without_looking(engine, prompts, good, *_):
    yield good, partial(engine.reader, kept=engine._kept)(engine.inside)


@torch.no_grad()
def continued(row, before, model, count):
    """A row drawn on by other weights, which go on with what those before them have read."""
    ids, log_probs = drawn_on(row.ids, before, model, count)
    columns = {"ids": ids, "log_probs": [*row.log_probs, *log_probs]}
    columns |= {"versions": [*row.versions, *[2] * count]}
    return replace(row, sampled=[*row.sampled, *[True] * count], **columns)


@torch.no_grad()
def drawn_on(ids, before, model, count):
    """Tokens with more behind them, and the log-probs of these, token by token."""
    ids, log_probs = list(ids), []
    cache = before(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
    torch.manual_seed(0)
    for _ in range(count):
        logits = model(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True).logits
        log_p = logits[0, -1].log_softmax(-1)
        ids.append(int(torch.multinomial(log_p.exp(), 1)))
        log_probs.append(float(log_p[ids[-1]]))
    return ids, log_probs


@pytest.mark.parametrize("kind", MODELS)
def test_keys_and_values_of_old_weights_are_named(kind, policy_of, verified, model_of):
    old, new = (moved(model_of(kind), version) for version in (1, 2))
    begun = drawn(policy_of(kind, 1, sampling={"max_new_tokens": 8}), answers=())
    rows = [continued(row, old, new, 16) for row in begun]
    certificate = verified(kind, rows)
    assert causes_of(certificate) == {Cause.CACHE}
    # What the old weights drew themselves is as it is recorded.
    assert all(not any(verdict.causes[:8]) for verdict in certificate.rows)
    # Where the settings let rows go on so, nothing is at fault.
    assert verified(kind, rows, keeps_cache=True).is_clean


@pytest.mark.parametrize("kind", MODELS)
def test_a_prompt_that_old_weights_have_read_is_named(kind, policy_of, verified, model_of):
    # A cache of prompts that outlived an update: every token is of version 2.
    old, new = (moved(model_of(kind), version) for version in (1, 2))
    found = []
    for row in drawn(policy_of(kind, 1, sampling={"max_new_tokens": 1}), answers=()):
        size = row.num_prompt_tokens
        names = ("ids", "sampled", "log_probs", "versions")
        prompt = SimpleNamespace(**{name: getattr(row, name)[:size] for name in names})
        ids, log_probs = drawn_on(prompt.ids, old, new, 16)
        columns = {"sampled": [*prompt.sampled, *[True] * 16], "ids": ids}
        columns |= {"log_probs": [*prompt.log_probs, *log_probs]}
        found.append(replace(row, versions=[*prompt.versions, *[2] * 16], **columns))
    certificate = verified(kind, found)
    assert causes_of(certificate) == {Cause.CACHE}
    size = found[0].num_prompt_tokens
    assert certificate.rows[0].words[Cause.CACHE] == (
        f"the keys and values of the first {size - 1} tokens were those of version 1"
    )


@pytest.mark.parametrize("kind", MODELS)
def test_padding_that_was_read_is_named(kind, policy_of, verified):
    policy = policy_of(kind)
    rows = drawn(policy, answers=())
    longest = max(row.num_prompt_tokens for row in rows)
    leaked = []
    for row in rows:  # as a batch padded on the left is computed without a mask
        padding = longest - row.num_prompt_tokens
        ids = torch.tensor([[policy.tokenizer.pad_token_id] * padding + list(row.ids)])
        with torch.no_grad():
            log_p = policy.model(input_ids=ids).logits[0].log_softmax(-1)
        log_probs = [
            float(log_p[padding + t - 1, row.ids[t]]) if row.sampled[t] else math.nan
            for t in range(len(row.ids))
        ]
        leaked.append(replace(row, log_probs=log_probs))
    certificate = verified(kind, leaked)
    assert causes_of(certificate) == {Cause.BATCH}
    assert not any(certificate.rows[2].causes)  # the longest one has no padding


class OtherExperts(ExpertRoutes):
    """Lets the closest choice among the first tokens fall the other way, and keeps all choices."""

    def __init__(self, model, among):
        super().__init__(model)
        self.among = among

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before = len(self.layers)
        result = super().__torch_function__(func, types, args, kwargs)
        if len(self.layers) > before == 0:
            chosen = result.indices.clone()
            token = int(self.margins[0][: self.among].argmin())
            chosen[token, -1] = self.runners_up[0][token]
            self.layers[0] = chosen
            return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
        return result


@pytest.mark.parametrize("recorded", ["right", "nothing", "wrong"])
def test_experts_that_another_router_chose_are_named(recorded, policy_of, verified):
    policy = policy_of("experts")
    rows, found = drawn(policy, answers=()), []
    for row in rows:
        with torch.no_grad(), OtherExperts(policy.model, row.num_prompt_tokens) as routes:
            log_p = policy.model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        log_probs = [
            float(log_p[t - 1, i]) if row.sampled[t] else math.nan for t, i in enumerate(row.ids)
        ]
        if recorded == "wrong":  # the routers' own choice drew it
            log_probs = row.log_probs
        experts = None if recorded == "nothing" else routes.layers
        found.append(replace(row, log_probs=log_probs, experts=experts))
    certificate = verified("experts", found)
    if recorded == "right":
        assert certificate.is_clean
        [told] = certificate.replayed
        own = verified("experts", [replace(row, experts=None) for row in found])
        beyond = [abs(g) for r in own.rows for g in r.gaps if abs(g) > own.tolerance]
        assert (told.cause, told.num_tokens, told.num_others) == (
            *("routing", certificate.num_tokens),
            len(beyond),
        )
        assert told.largest == pytest.approx(max(beyond), abs=1e-6)
        assert f"{len(beyond)} of them have another log-prob by the routers' own choice" in (
            "\n".join(certificate.lines())
        )
        return
    assert causes_of(certificate) == {Cause.ROUTING}
    said = {
        "wrong": "the experts of the routers, not to those that were recorded",
        "nothing": "1 choices of experts fell the other way",
    }[recorded]
    assert said in certificate.rows[0].words[Cause.ROUTING]


@pytest.mark.parametrize("kind", MODELS)
def test_other_numbers_are_named(kind, policy_of, verified):
    rows = drawn(policy_of(kind, autocast_dtype=torch.bfloat16))
    certificate = verified(kind, rows)
    assert causes_of(certificate) == {Cause.NUMBERS}
    # Where the settings say so, the rounding is expected.
    said = Numbers(torch.float32, torch.bfloat16)
    assert verified(kind, rows, numbers=said).is_clean


@pytest.mark.parametrize("kind", MODELS)
def test_another_template_is_named(kind, policy_of, verified):
    # The policy reads a system prompt that the row does not have.
    policy = policy_of(kind)
    system = {"role": "system", "content": "hello world"}
    rows = Conversations.from_messages(
        [[system, {"role": "user", "content": q}] for q in QUESTIONS]
    )
    _, rows, _ = policy.respond(rows)
    found = []
    for i in range(len(rows)):
        row, length = row_of(rows, i, 1), rows.ids(i).index(policy.tokenizer.eos_token_id) + 2
        columns = {n: getattr(row, n)[length:] for n in ("ids", "sampled", "log_probs", "versions")}
        found.append(replace(row, **columns))
    assert found[0].ids[:2] != rows.ids(0)[:2] or found[0].ids != rows.ids(0)
    certificate = verified(kind, found)
    assert causes_of(certificate) == {Cause.TOKENS}


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_that_nobody_sampled_are_named(kind, policy_of, verified):
    rows = drawn(policy_of(kind))
    row = rows[0]
    between = range(row.turns[0].stop, row.turns[1].start)  # what the user said, and the template
    columns = {n: list(getattr(row, n)) for n in ("sampled", "log_probs", "versions")}
    for t in between:
        columns["sampled"][t], columns["log_probs"][t], columns["versions"][t] = True, 0.0, 1
    certificate = verified(kind, [replace(row, **columns), *rows[1:]])
    assert causes_of(certificate) == {Cause.MASK}
    assert certificate.counts[Cause.MASK] >= len(between) - 2
    assert not any(cause for verdict in certificate.rows[1:] for cause in verdict.causes)


def test_a_loss_that_scores_what_was_not_sampled_is_named(policy_of, verified):
    rows = drawn(policy_of("dense"))
    trained = [t >= rows[0].num_prompt_tokens for t in range(len(rows[0].ids))]
    certificate = verified("dense", [replace(rows[0], trained=trained)])
    between = rows[0].turns[1].start - rows[0].turns[0].stop
    assert certificate.counts == Counter({Cause.MASK: between})
    assert verified("dense", [replace(rows[0], trained=trained)], check_trained=False).is_clean


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_that_did_not_act_are_named(kind, policy_of, model_of):
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model_of(kind), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    policy = policy_of(kind, model=adapted)
    certificates = []
    for context in (nullcontext, adapted.disable_adapter):
        with context():
            rows = drawn(policy)
        certificates.append(verify_rows(rows, Recomputation(policy)))
    healthy, faulty = certificates
    assert healthy.is_clean
    assert causes_of(faulty) == {Cause.ADAPTER}


def test_two_faults_at_once_are_both_told(policy_of, verified):
    hot = {"temperature": 0.7}
    right = drawn(policy_of("dense", 2, sampling=hot), version=2)
    wrong = drawn(policy_of("dense", 3, sampling=hot), version=2)
    certificate = verified("dense", [*wrong, *right])
    assert causes_of(certificate) == {Cause.TEMPERATURE, Cause.VERSION}
    words = certificate.rows[0].words[Cause.VERSION]
    assert "temperature 0.7" in words
    assert "drawn by version 3" in words


def test_log_probs_from_nowhere_stay_unexplained(policy_of, verified):
    rows = drawn(policy_of("dense"))
    torch.manual_seed(0)
    random = [-5 * float(torch.rand(())) for _ in rows[0].ids]
    certificate = verified("dense", [replace(rows[0], log_probs=random), *rows[1:]])
    assert causes_of(certificate) == {UNEXPLAINED}
    assert not any(cause for verdict in certificate.rows[1:] for cause in verdict.causes)


def test_a_version_without_weights_is_not_checked(policy_of, verified):
    rows = drawn(policy_of("dense"), version=7)
    certificate = verified("dense", rows)
    assert certificate.num_tokens == 0
    assert not certificate.is_clean
    assert certificate.rows[0].not_checked == (
        "there are no weights of version 7 (there are 1, 2, 3)"
    )
