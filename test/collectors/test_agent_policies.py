"""Agents with weights of their own: each token is drawn, scored and trained by its agent's."""

from copy import deepcopy
from functools import partial

import openai
import pytest
import torch
from peft import LoraConfig
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import (
    InProcessUpdater,
    LLMCollector,
    OnPolicy,
    StreamingCollector,
    Wait,
)
from objectives import GRPOLoss, MCAdvantage
from torchrl_envs import AgentProgram, ChatEnv, DataLoadingPrimer, RetrieveLogProb
from torchrl_modules import AgentPolicies, TransformersWrapper, models_over_one_base
from torchrl_modules.engines.batching_engine import BatchingEngine

SAMPLING = {"max_new_tokens": 6, "seed": 3}


def duel(endpoint, *, prompt, names=("first", "second")):
    """Two ask twice, by turns; who says more letters wins."""
    said = dict.fromkeys(names, "")
    with openai.OpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    ) as client:
        chats = {name: [{"role": "user", "content": f"{prompt} {name}"}] for name in names}
        for _ in range(2):
            for name, chat in chats.items():
                reply = client.chat.completions.create(
                    model=endpoint.model, messages=chat, extra_headers={"x-agent-name": name}
                )
                chat += [reply.choices[0].message, {"role": "user", "content": "go on"}]
                said[name] += reply.choices[0].message.content or ""
    return {name: float(len(text)) for name, text in said.items()}


def environment(tokenizer, program=duel, **options):
    rows = [{"prompt": f"What is {i} + 2?"} for i in range(4)]
    options = {"agents": ["first", "second"], "timeout_s": 60} | options
    return ChatEnv(batch_size=4, tokenizer=tokenizer).append_transform(
        Compose(DataLoadingPrimer(rows, group_size=2), AgentProgram(program, **options))
    )


@pytest.fixture
def policies(make_tiny_model, chatml_tokenizer):
    """Two models that have nothing in common."""

    def make(models=None):
        models = models or [make_tiny_model(1), make_tiny_model(2)]
        own = [
            TransformersWrapper(model, tokenizer=chatml_tokenizer, generate_kwargs=SAMPLING)
            for model in models
        ]
        return AgentPolicies(dict(zip(("first", "second"), own, strict=True)))

    return make


def gaps(row, model, reference_log_probs):
    """How far the log-probs of a row are from those of a model, ``[K]``."""
    mask = row["masks", "all_assistant_mask"]
    reference = reference_log_probs(model, row["tokens", "full"].tolist())
    return (row["log_probs", "full"] - reference)[mask].abs()


def gradients(policy):
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "make",
    [
        LLMCollector,
        partial(StreamingCollector, staleness=Wait(1)),
        partial(StreamingCollector, staleness=OnPolicy()),
    ],
    ids=["batch", "streaming", "on policy"],
)
def test_turns_are_drawn_by_the_agents_own_model(
    make, policies, chatml_tokenizer, reference_log_probs
):
    agents = policies()
    copies = policies([deepcopy(p.model) for p in agents.by_agent.values()])
    with make(environment(chatml_tokenizer), copies) as collector:
        rows = collector.collect()
        by_agent = agents.rows_by_agent(rows)
        assert {name: len(own) for name, own in by_agent.items()} == {"first": 4, "second": 4}
        for name, own in by_agent.items():
            (other,) = {"first", "second"} - {name}
            for row in own.unbind(0):
                assert row["agent"] == name
                assert gaps(row, agents.by_agent[name].model, reference_log_probs).max() < 2e-5
                assert gaps(row, agents.by_agent[other].model, reference_log_probs).max() > 0.01

        # New weights of one agent: those of the other stay, and are of the same version.
        changed = agents.by_agent["first"].model
        with torch.no_grad():
            for value in changed.parameters():
                value.mul_(0.9)
        assert collector.update_policy_weights_({"first": changed}) == 1
        worst = {}
        for _ in range(3):  # a streaming collector has begun some before
            for row in collector.collect().unbind(0):
                if row["policy_version"] > 0:
                    own = gaps(row, agents.by_agent[row["agent"]].model, reference_log_probs)
                    worst[row["agent"]] = max(worst.get(row["agent"], 0.0), float(own.max()))
            collector.update_policy_weights_({"first": changed})
        assert worst.keys() == {"first", "second"}
        assert max(worst.values()) < 2e-5


def test_a_reference_scores_each_row_with_its_agents_model(policies, chatml_tokenizer):
    agents = policies()
    at_the_end = RetrieveLogProb(agents, log_probs_full_key=("own", "full"))
    env = environment(chatml_tokenizer).append_transform(at_the_end)
    rows = LLMCollector(env, agents).collect()
    later = RetrieveLogProb(agents, log_probs_full_key=("later", "full"))(rows)
    for row in later.unbind(0):
        mask, drawn = row["masks", "all_assistant_mask"], row["log_probs", "full"]
        for key in ("own", "later"):
            gap = (row["next", key, "full"] - drawn)[mask].abs().max()
            assert gap < 2e-5, key
    # Compared with the very models that are drawn from, there would be no KL.
    with pytest.raises(ValueError, match="its model is the one that the policy samples with"):
        RetrieveLogProb(agents).check_policy(agents)
    frozen = policies([deepcopy(p.model) for p in agents.by_agent.values()])
    RetrieveLogProb(frozen).check_policy(agents)


def test_each_agent_is_trained_by_its_own_rows(policies, chatml_tokenizer):
    agents = policies()
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=MCAdvantage(2, credit="agent"))
    collector = LLMCollector(environment(chatml_tokenizer), agents, replay_buffer=buffer)
    collector.collect()
    rows = buffer[:]
    by_agent = agents.rows_by_agent(rows)
    output = GRPOLoss(agents.by_agent["first"])(by_agent["first"])
    assert abs(float(output.kl_approx)) < 1e-6
    output.total().backward()
    assert gradients(agents.by_agent["second"]) == {}
    alone = gradients(agents.by_agent["first"])
    agents.zero_grad()

    # One loss over all rows, in micro-batches that cut through agents: the same gradient, by the
    # share of the tokens.
    loss = GRPOLoss(agents)
    packed = loss.pack(rows)
    parts = list(packed.micro_batches(num_rows=3))
    window = loss.measure_window(parts)
    outputs = [loss(part, window=window) for part in parts]
    sum(each.total() for each in outputs).backward()
    assert all(abs(float(each.kl_approx)) < 1e-6 for each in outputs)
    counts = {
        name: sum(int(row["masks", "all_assistant_mask"].sum()) for row in own.unbind(0))
        for name, own in by_agent.items()
    }
    share = counts["first"] / sum(counts.values())
    together = gradients(agents.by_agent["first"])
    assert together.keys() == alone.keys()
    for name, value in together.items():
        torch.testing.assert_close(value, alone[name] * share, rtol=1e-4, atol=1e-6)
    assert gradients(agents.by_agent["second"])
    with pytest.raises(ValueError, match="nobody says which agents"):
        loss(rows.exclude("agent"))


def test_adapters_over_one_base_are_models_of_their_own(
    policies, make_tiny_model, chatml_tokenizer, reference_log_probs
):
    base = make_tiny_model()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    models = models_over_one_base(base, {"first": config, "second": config})
    addresses = {
        n.replace(".base_layer", ""): p.data_ptr()
        for m in models.values()
        for n, p in m.named_parameters()
        if "lora_" not in n
    }
    assert {*addresses.values()} == {p.data_ptr() for p in base.parameters()}
    agents = policies(list(models.values()))
    rows = agents.rows_by_agent(LLMCollector(environment(chatml_tokenizer), agents).collect())
    for name, (other,) in {"first": ["second"], "second": ["first"]}.items():
        (row, *_) = rows[name].unbind(0)
        assert gaps(row, models[name], reference_log_probs).max() < 2e-5
        assert gaps(row, models[other], reference_log_probs).max() > 1e-3
    optimizer = torch.optim.SGD([p for p in agents.parameters() if p.requires_grad], lr=0.1)
    agents.by_agent["first"].log_prob(rows["first"]).sum().backward()
    kept = deepcopy([p for n, p in models["second"].named_parameters() if "lora_" in n])
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    now = [p for n, p in models["second"].named_parameters() if "lora_" in n]
    assert all(map(torch.equal, kept, now))
    with pytest.raises(ValueError, match="has adapters already"):
        models_over_one_base(models["first"], {"third": config})
    base.lm_head.bias = torch.nn.Parameter(torch.zeros(base.config.vocab_size))
    with pytest.raises(ValueError, match="trains weights of the base, such as"):
        models_over_one_base(base, {"third": LoraConfig(target_modules=["q_proj"], bias="all")})


def test_adapters_that_are_trained_are_drawn_with_as_they_were_pushed(
    policies, make_tiny_model, chatml_tokenizer, reference_log_probs
):
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    models = models_over_one_base(make_tiny_model(), {"first": config, "second": config})
    agents = policies(list(models.values()))
    with StreamingCollector(environment(chatml_tokenizer), agents, staleness=Wait(1)) as collector:
        pushed = [deepcopy(models["first"])]
        for version in (1, 2, 3):
            collector.collect()
            with torch.no_grad():  # a step of training of one agent
                for value in models["first"].parameters():
                    value.add_(0.3 * torch.randn_like(value) * value.requires_grad)
            pushed.append(deepcopy(models["first"]))
            assert collector.update_policy_weights_({"first": models["first"]}) == version
        rows = agents.rows_by_agent(collector.collect())
    for row in rows["second"].unbind(0):
        assert gaps(row, models["second"], reference_log_probs).max() < 1e-4
    for row in rows["first"].unbind(0):
        mask, versions = row["masks", "all_assistant_mask"], row["policy_versions", "full"]
        assert versions[mask].max() > 0
        for version in versions[mask].unique().tolist():
            own = versions[mask] == version
            assert gaps(row, pushed[version], reference_log_probs)[own].max() < 1e-4


def test_turns_of_an_agent_without_a_policy_fail_alone(policies, chatml_tokenizer):
    def third(endpoint, *, prompt):
        return duel(endpoint, prompt=prompt, names=("first", "third"))

    env = environment(chatml_tokenizer, third, agents=())
    rows = LLMCollector(env, policies()).collect()
    assert all("no policy draws for the agent 'third'" in why for why in rows["stop_reason"])
    assert not rows["scorable"].any()


def test_a_push_that_reaches_some_agents_only_stops_the_rest(policies, make_tiny_model):
    agents = policies()
    good, broken = make_tiny_model(1), make_tiny_model(2)
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    engine = agents.engine
    for source, says in (
        (good, "by the names of agents"),
        ({"third": good}, "third"),
        ({"first": broken, "second": good}, "NaN"),
    ):
        with pytest.raises(ValueError, match=says):
            InProcessUpdater(agents).push(source)
        assert engine.version == 0
    engine.generate([[1, 2]], agents.sampling, agents=["first"])
    with pytest.raises(RuntimeError, match=r"\['first'\] have weights 1, and \['second'\]"):
        InProcessUpdater(agents).push({"first": good, "second": broken})
    with pytest.raises(RuntimeError, match=r"\['second'\] lack"):
        engine.generate([[1, 2]], agents.sampling, agents=["first"])
    assert InProcessUpdater(agents).push({"second": good}) == 2
    (drawn,) = engine.generate([[1, 2]], agents.sampling, agents=["first"])
    assert drawn.versions[0].version == 2


def test_what_does_not_fit_is_refused(policies, make_tiny_model, chatml_tokenizer):
    def wrapper(**sampling):
        return TransformersWrapper(
            make_tiny_model(), tokenizer=chatml_tokenizer, generate_kwargs=SAMPLING | sampling
        )

    with pytest.raises(ValueError, match="sampling of first"):
        AgentPolicies({"first": wrapper(), "second": wrapper(temperature=0.5)})
    with pytest.raises(ValueError, match="otherwise='third'"):
        AgentPolicies({"first": wrapper()}, otherwise="third")
    with pytest.raises(ValueError, match=r"\['second'\] have no policy"):
        LLMCollector(environment(chatml_tokenizer), AgentPolicies({"first": wrapper()}))
    agents = policies()
    engine = BatchingEngine(agents.by_agent["first"].engine)
    with pytest.raises(ValueError, match="BatchingEngine draws for one policy"):
        StreamingCollector(environment(chatml_tokenizer), agents, engine=engine)
    agents.temperature = 0.5
    assert {p.sampling.temperature for p in agents.by_agent.values()} == {0.5}
    agents.by_agent["second"].temperature = 1.0
    with pytest.raises(ValueError, match="policy of second"):
        LLMCollector(environment(chatml_tokenizer), agents).collect()
