"""KL to a reference: values by hand, over sampled tokens only, wherever the transform stands."""

import copy
import functools
import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

import objectives.functional as F
from collectors import LLMCollector
from objectives import GRPOLoss, MCAdvantage
from torchrl_data.layout import Masks, Tokens
from torchrl_data.missing_entry import MissingEntryError
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    KLComputation,
    KLRewardTransform,
    RetrieveKL,
    RetrieveLogProb,
    RewardFunctions,
    StepCounter,
)
from torchrl_modules import TransformersWrapper

KL = ("next", "kl_penalty")
REF = ("next", "ref_log_probs", "full")


@pytest.fixture(scope="module")
def models(chatml_tokenizer, make_tiny_model):
    """A policy's model and a reference, each as a scorer."""
    return [
        TransformersWrapper(make_tiny_model(seed), tokenizer=chatml_tokenizer, generate=False)
        for seed in (0, 1)
    ]


class Counted:
    """Counts how often a scorer is asked."""

    def __init__(self, scorer):
        self.scorer = scorer
        self.asked = []

    def score_packed(self, ids, lengths, target_mask, **kwargs):
        self.asked.append((len(ids), int(target_mask.sum())))
        return self.scorer.score_packed(ids, lengths, target_mask, **kwargs)


@pytest.fixture
def collect(scripted, models):
    """Two rollouts with the policy's log-probs; the reward of each is 1."""

    def run(*transforms, buffer=None, postproc=None):
        def one(completions):
            return [1.0] * len(completions)

        script = {"<a>": ["yes"], "<b>": ["it is 4, I say again"]}
        rows = [{"prompt": "<a>"}, {"prompt": "<b> with a longer prompt than the other"}]
        env = ChatEnv(batch_size=2).append_transform(
            Compose(DataLoadingPrimer(rows), *transforms, RewardFunctions(one))
        )
        policy = scripted(script, model=models[0].model)
        collector = LLMCollector(env, policy, replay_buffer=buffer, postproc=postproc)
        batch = collector.collect()
        collector.shutdown()
        return batch

    return run


def test_values_by_hand():
    row = TensorDict(
        {
            ("tokens", "full"): torch.tensor([7, 8, 9, 3]),
            ("masks", "all_assistant_mask"): torch.tensor([False, True, True, False]),
            ("log_probs", "full"): torch.tensor([0.0, -1.0, -2.0, 0.0]),
            REF: torch.tensor([-9.0, -1.5, -1.0, -9.0]),
            "reward": torch.tensor([[3.0]]),
        }
    )
    dense = KLComputation(coeff=2.0)(lazy_stack([row]))[0]
    assert dense[KL].tolist() == [0.0, 0.5, -1.0, 0.0], "the prompt and what follows count nothing"
    assert dense["reward"].tolist() == [[0.0], [-1.0], [3.0 + 2.0], [0.0]]
    sparse = KLComputation(coeff=2.0, dense=False)(lazy_stack([row]))[0]
    assert sparse["reward"].tolist() == [[4.0]], "3 - 2 * (0.5 - 1)"
    kept = KLComputation(add_to_reward=False)(lazy_stack([row]))[0]
    assert kept["reward"].tolist() == [[3.0]]
    assert KL not in row.keys(include_nested=True), "the input is not changed"
    k3 = functools.partial(F.kl_estimate, estimator="k3")
    assert KLComputation(estimator=k3)(lazy_stack([row]))[0][KL].tolist() == pytest.approx(
        [0.0, math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1.0 - 1, 0.0]
    )
    twice = lazy_stack([dense])
    assert KLComputation(coeff=2.0)(twice) is twice, "a row that has it gets it once"


@pytest.mark.parametrize("place", ["environment", "postproc", "buffer", "by hand"])
def test_every_place_gives_the_same(collect, models, reference_log_probs, place):
    ref = Counted(models[1])
    transform = RetrieveKL(ref_model=ref, coeff=0.1)
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=2)
    if place == "environment":
        batch = collect(transform)
    elif place == "postproc":
        batch = collect(postproc=transform)
    elif place == "buffer":
        buffer.append_transform(transform)
        collect(buffer=buffer)
        batch = lazy_stack([buffer[i] for i in range(2)])
        sampled = [buffer.sample() for _ in range(4)]
        assert all(len(r[KL]) == len(r["tokens", "full"]) for s in sampled for r in s.unbind(0))
    else:
        batch = transform(collect())
    assert len(ref.asked) == 1, "once for the whole batch"
    rows = batch.unbind(0)
    assert ref.asked[0] == (
        sum(len(row["tokens", "full"]) for row in rows),
        sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows),
    )
    for row in rows:
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        expected = [reference_log_probs(m.model, ids.tolist())[mask] for m in models]
        torch.testing.assert_close(row[REF][mask], expected[1])
        torch.testing.assert_close(row[KL][mask], expected[0] - expected[1])
        assert not row[REF][~mask].any()
        assert not row[KL][~mask].any()
        assert row["reward"].shape == (len(ids), 1)
        total = 1.0 - 0.1 * (expected[0] - expected[1]).sum()
        torch.testing.assert_close(row["reward"].sum(), total)
        assert bool(row["scorable"])


def test_padded_rows_give_what_ragged_ones_give(collect, models):
    ragged = collect()
    transform = RetrieveKL(ref_model=models[1], coeff=0.5)
    expected = transform(ragged)
    rows = ragged.unbind(0)
    tokens = Tokens.from_rows(
        **{part: [row["tokens", part] for row in rows] for part in ("prompt", "response", "full")}
    )
    padded, masks = tokens.to_padded(0)
    attention = masks.all_attention_mask
    values = {
        name: torch.zeros(attention.shape, dtype=rows[0][name].dtype)
        for name in (("masks", "all_assistant_mask"), ("log_probs", "full"))
    }
    for name, value in values.items():
        value[attention] = torch.cat([row[name] for row in rows])
    batch = TensorDict(
        {
            "tokens": padded,
            "masks": Masks(
                all_attention_mask=attention,
                all_assistant_mask=values["masks", "all_assistant_mask"],
                batch_size=[2],
            ),
            ("log_probs", "full"): values["log_probs", "full"],
            "reward": torch.ones(2, 1, 1),
        },
        batch_size=[2],
    )
    out = transform(batch)
    for i, row in enumerate(expected.unbind(0)):
        for name in (REF, KL, "reward"):
            torch.testing.assert_close(out[i][name][attention[i]], row[name])
            assert not out[i][name][~attention[i]].any()


def test_the_kl_of_the_reward_is_the_kl_of_the_loss(collect, models):
    batch = collect(RetrieveKL(ref_model=models[1], add_to_reward=False))
    for row in batch.unbind(0):
        row["advantage"] = torch.zeros(1, 1)
    loss = GRPOLoss(models[0], kl_to_ref_coeff=1.0)
    with torch.no_grad():
        out = loss(batch)
    k3 = functools.partial(F.kl_estimate, estimator="k3")
    again = KLComputation(kl_key="k3", estimator=k3, add_to_reward=False)(batch)
    tokens = [row["masks", "all_assistant_mask"] for row in again.unbind(0)]
    values = [row["next", "k3"][m] for row, m in zip(again.unbind(0), tokens, strict=True)]
    torch.testing.assert_close(out.kl_to_ref, torch.cat(values).mean())


def test_a_model_scores_the_policys_tokens_anew_and_keeps_what_was_recorded(collect, models):
    before = collect()
    transform = RetrieveKL(models[1], models[1], add_to_reward=False, assistant_only=False)
    after = transform(before)
    for old, new in zip(before.unbind(0), after.unbind(0), strict=True):
        assert not new[KL].any(), "a model has no KL from itself"
        torch.testing.assert_close(new["log_probs", "full"], old["log_probs", "full"])
        scored = new["next", "gen_log_probs", "full"]
        assert scored[0] == 0
        assert (scored[1:] < 0).all(), "every token but the first"


def test_temperature_divides_the_logits(collect, models, reference_log_probs):
    (row, _) = RetrieveLogProb(models[1], temperature=0.5)(collect()).unbind(0)
    mask = row["masks", "all_assistant_mask"]
    ids = row["tokens", "full"].tolist()
    expected = reference_log_probs(models[1].model, ids, temperature=0.5)
    torch.testing.assert_close(row[REF][mask], expected[mask])


def test_advantages_see_the_penalty_when_it_stands_after_them_in_the_buffer(collect, models):
    kl = KLRewardTransform(models[1], coef=0.1, dense=False)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), transform=Compose(MCAdvantage(2), kl), batch_size=2
    )

    def one_group(batch):
        return lazy_stack([row.copy().set("group_id", torch.tensor(0)) for row in batch.unbind(0)])

    collect(buffer=buffer, postproc=one_group)
    rows = [buffer[i] for i in range(2)]
    returns = torch.stack([row["reward"].view(()) for row in rows])
    assert returns[0] != returns[1]
    expected = (returns - returns.mean()) / (returns.std() + 1e-4)
    torch.testing.assert_close(torch.cat([row["advantage"].view(1) for row in rows]), expected)


def test_the_penalty_alone_does_not_make_a_row_scorable(scripted, models):
    env = ChatEnv(batch_size=1).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": "<a>"}]),
            RewardFunctions(lambda **_: [None]),
            KLRewardTransform(models[1]),
        )
    )
    policy = scripted(["yes"], model=models[0].model)
    end = env.step(policy(env.reset()))["next"]
    env.close()
    assert not end["scorable"].any()
    num_tokens = end["history"].get("prompt").snapshot().num_tokens(0)
    assert end["ref_log_probs", "full"].shape == (1, num_tokens)
    assert end["reward"].shape == (1, num_tokens, 1)
    assert end["rewards", "kl_penalty"].item() == pytest.approx(-end["kl_penalty"].sum().item())


def test_the_reference_is_no_part_of_the_state(models):
    transform = copy.copy(KLRewardTransform(models[1]))
    assert not list(transform.parameters())
    assert not transform.state_dict()


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda m: RetrieveLogProb(m.model), TypeError, "score_packed.*Qwen3"),
        (lambda m: RetrieveLogProb(m, temperature=0.0), ValueError, "temperature"),
        (lambda m: RetrieveKL(m), ValueError, "needs a ref_model"),
        (lambda m: RetrieveKL(ref_model=m, ref_model_factory=lambda: m), ValueError, "not both"),
        (lambda _: KLComputation(coeff=math.nan), ValueError, "coeff must be a finite number"),
        (lambda m: KLRewardTransform(m, padding_side="left"), TypeError, "padding_side"),
    ],
)
def test_wrong_settings_are_named(models, build, error, words):
    with pytest.raises(error, match=words):
        build(models[0])


KINDS = [
    pytest.param(KLRewardTransform, id="KLRewardTransform"),
    pytest.param(lambda m, **k: RetrieveKL(ref_model=m, **k), id="RetrieveKL"),
    pytest.param(lambda m, **k: Compose(RetrieveLogProb(m, **k), KLComputation()), id="by hand"),
]


@pytest.fixture
def composed():
    """Puts a reference and a policy together, as a collector does."""

    def build(kind, model, policy, **settings):
        parts = Compose(DataLoadingPrimer([{"prompt": "x"}]), kind(model, **settings))
        score = RewardFunctions([lambda completions: [0.0] * len(completions)])
        env = ChatEnv(batch_size=1).append_transform(parts).append_transform(score)
        LLMCollector(env, policy).shutdown()

    return build


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_log_probs_are_at_the_temperature_of_the_reference(
    composed, scripted, models, kind
):
    build = functools.partial(composed, kind, models[1])
    warm = scripted(["x"], generate_kwargs={"temperature": 0.7})
    with pytest.raises(
        ValueError, match=r"at temperature 1, but the policy samples at 0.7: .*=0.7"
    ):
        build(warm)
    build(warm, temperature=0.7)
    build(scripted(["x"], generate_kwargs={"temperature": 0.0}))
    with pytest.raises(ValueError, match="at temperature 2"):
        build(scripted(["x"]), temperature=2.0)


@pytest.mark.parametrize("place", ["environment", "postproc", "Compose"])
def test_a_reference_for_a_loss_scores_what_the_policy_samples(models, scripted, place):
    """The loss subtracts log-probs of the policy's own temperature; with equal weights it is 0."""
    wrapper = models[1]

    def compose(policy, part):
        score = RewardFunctions([lambda completions: [0.0] * len(completions)])
        parts = [DataLoadingPrimer([{"prompt": "x"}]), score]
        after = {"environment": None, "postproc": part, "Compose": Compose(part)}[place]
        parts += [part] if after is None else []
        env = ChatEnv(batch_size=1).append_transform(Compose(*parts))
        LLMCollector(env, policy, postproc=after).shutdown()

    warm = scripted(["x"], generate_kwargs={"temperature": 0.7})
    with pytest.raises(ValueError, match=r"RetrieveLogProb scores at temperature 1, but .* at 0.7"):
        compose(warm, RetrieveLogProb(wrapper))
    compose(warm, RetrieveLogProb(wrapper, temperature=0.7))
    compose(warm, RetrieveLogProb(wrapper, log_probs_full_key=("teacher_log_probs", "full")))
    with pytest.raises(ValueError, match=r"samples with top_p=0.5.*the policy's generate_kwargs"):
        compose(scripted(["x"], generate_kwargs={"top_p": 0.5}), RetrieveLogProb(wrapper))


def test_a_policy_is_no_reference_of_itself(models, chatml_tokenizer):
    policy = TransformersWrapper(models[1].model, tokenizer=chatml_tokenizer)
    score = RewardFunctions([lambda completions: [0.0] * len(completions)])

    def compose(reference):
        parts = Compose(DataLoadingPrimer([{"prompt": "x"}]), score)
        env = ChatEnv(batch_size=1).append_transform(parts)
        LLMCollector(env, policy, postproc=RetrieveLogProb(reference))

    for same in (policy, models[1]):  # another wrapper of the same weights
        with pytest.raises(ValueError, match=r"its model is the one that the policy samples with"):
            compose(same)
    frozen = TransformersWrapper(
        copy.deepcopy(policy.model), tokenizer=chatml_tokenizer, generate=False
    )
    compose(frozen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.1}])
def test_the_reference_scores_the_distribution_that_is_sampled_from(
    composed, scripted, models, kind, option
):
    policy = scripted(["x"], generate_kwargs=option)
    (name,) = option
    with pytest.raises(ValueError, match=f"samples with {name}=.*the policy's generate_kwargs"):
        composed(kind, models[1], policy)
    inside, tokenizer = models[1].model, models[1].tokenizer
    same = {"tokenizer": tokenizer, "generate_kwargs": option, "generate": False}
    composed(kind, TransformersWrapper(inside, **same), policy)
    if policy.sampling.truncates:
        whole = TransformersWrapper(inside, **same, score_truncated=False)
        with pytest.raises(ValueError, match=f"samples with {name}="):
            composed(kind, whole, policy)


def test_log_probs_that_are_scored_anew_may_have_another_temperature(scripted, models):
    own = RetrieveKL(models[0], models[1])
    softmax = RetrieveKL(
        ref_model=models[1], gen_log_probs_full_key=("untempered_log_probs", "full")
    )
    for transform in (own, softmax):
        transform.check_policy(scripted(["x"], generate_kwargs={"temperature": 0.7}))


def test_a_missing_entry_is_named(collect):
    with pytest.raises(MissingEntryError, match=r"KLComputation reads \('ref_log_probs', 'full'\)"):
        KLComputation()(collect())


def test_a_coefficient_that_is_set_later_is_that_of_the_next_rewards(models, collect):
    transform = KLRewardTransform(models[1], coef=1.0)
    rows = collect(postproc=None)
    before = [row["reward"] for row in transform(rows.clone()).unbind(0)]
    transform.coef = 0.5
    want = KLRewardTransform(models[1], coef=0.5)(rows.clone())
    got = transform(rows.clone())
    for row, one, old in zip(got.unbind(0), want.unbind(0), before, strict=True):
        torch.testing.assert_close(row["reward"], one["reward"])
        assert not torch.equal(row["reward"], old)
    with pytest.raises(ValueError, match="coeff must be a finite number"):
        transform.coef = math.nan
    with pytest.raises(AttributeError, match="has no attribute 'coefficient'"):
        transform.coefficient = 0.1


def test_a_temperature_that_the_reference_has_not_is_refused_when_it_is_set_later(
    models, chatml_tokenizer
):
    policy = TransformersWrapper(models[0].model, tokenizer=chatml_tokenizer)
    env = ChatEnv(batch_size=1).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": "a"}] * 4),
            RetrieveKL(ref_model=models[1]),
            RewardFunctions(lambda completions: [1.0] * len(completions)),
            StepCounter(1),
        )
    )
    with LLMCollector(env, policy) as collector:
        collector.collect()
        policy.temperature = 0.5
        with pytest.raises(ValueError, match="temperature"):
            collector.collect()
