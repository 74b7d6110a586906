"""Weights from a trainer to a policy: gathered, merged, taken whole or refused; their version."""

import subprocess
import sys
import uuid

import peft
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Compose

from collectors import InProcessUpdater, LLMCollector
from collectors.weight_update import gathered_state_dict, vLLMUpdater
from torchrl_envs import ChatEnv, DataLoadingPrimer, PolicyVersion, StepCounter
from torchrl_modules import TransformersWrapper
from torchrl_modules.weights.expected_weights import all_finite

NORM = "model.norm.weight"


@pytest.fixture
def policy(chatml_tokenizer, make_tiny_model):
    return TransformersWrapper(
        make_tiny_model(0), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 3}
    )


def make_env():
    rows = [{"prompt": f"question <{i}>"} for i in range(4)]
    return ChatEnv(batch_size=2).append_transform(
        Compose(DataLoadingPrimer(rows, group_size=1, num_epochs=None), StepCounter(max_steps=1))
    )


@torch.no_grad()
def logits(model):
    return model(torch.tensor([[5, 6, 7, 8]])).logits


def with_adapters(model, **settings):
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings
    )
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="LoRA"),
        pytest.param({"use_dora": True}, id="DoRA changes the weights' norms too"),
        pytest.param({"modules_to_save": ["lm_head"]}, id="a module that is trained whole"),
    ],
)
def test_adapters_are_pushed_merged_and_the_trained_model_is_left_as_it_was(
    make_tiny_model, settings
):
    plain = make_tiny_model(1)
    plain.config.tie_word_embeddings = "modules_to_save" not in settings
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        trained = with_adapters(plain, **settings)
        for name, value in trained.named_parameters():
            if "modules_to_save" in name:
                torch.nn.init.normal_(value)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    weights = gathered_state_dict(trained)
    after = trained.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)

    receiver = make_tiny_model(2)
    if "modules_to_save" in settings:
        receiver.lm_head.weight = torch.nn.Parameter(receiver.lm_head.weight.clone())
    assert weights.keys() == receiver.state_dict().keys()
    receiver.load_state_dict(weights)
    torch.testing.assert_close(logits(receiver), logits(trained))
    assert (logits(receiver) - logits(make_tiny_model(1))).abs().max() > 0.01


class Explora(torch.nn.Module):
    """Names that look like an adapter's, or like PEFT's, and are not."""

    def __init__(self):
        super().__init__()
        self.colora_gate = torch.nn.Linear(4, 4)
        self.base_layer_norm = torch.nn.LayerNorm(4)
        self.config = type("Config", (), {"get": lambda *_: None})()

    def forward(self, x):
        return self.base_layer_norm(self.colora_gate(x))


def test_names_that_only_look_like_an_adapters_are_weights():
    plain = Explora()
    names = plain.state_dict().keys()
    assert gathered_state_dict(plain).keys() == names
    assert gathered_state_dict(plain.state_dict()).keys() == names
    trained = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["colora_gate"]))
    assert gathered_state_dict(trained).keys() == names


def test_a_merge_that_fails_leaves_the_model_as_it_was(make_tiny_model):
    trained = with_adapters(make_tiny_model(1))
    with torch.no_grad():  # the layer before is merged first
        layer = trained.base_model.model.model.layers[1].mlp.down_proj
        layer.lora_B["default"].weight[0, 0] = torch.nan
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    addresses = {name: value.data_ptr() for name, value in trained.state_dict().items()}
    with pytest.raises(ValueError, match="NaNs detected"):
        gathered_state_dict(trained)
    after = trained.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if "layers.1.mlp" not in n)
    assert {name: value.data_ptr() for name, value in after.items()} == addresses
    assert not any(getattr(module, "merged", False) for module in trained.modules())


def test_adapters_that_are_merged_already_or_off_are_taken_as_they_are(make_tiny_model):
    trained = with_adapters(make_tiny_model(1))
    expected = gathered_state_dict(trained)
    with trained.disable_adapter():
        plain = gathered_state_dict(trained)
    assert all(torch.equal(plain[k], v) for k, v in make_tiny_model(1).state_dict().items())
    trained.merge_adapter()
    merged = gathered_state_dict(trained)
    assert all(torch.equal(merged[name], value) for name, value in expected.items())
    assert all(m.merged for m in trained.modules() if hasattr(m, "merged_adapters"))


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")  # PEFT says so, too
def test_an_adapter_of_one_of_two_tied_weights_is_not_lost_in_silence(policy, make_tiny_model):
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens"], init_lora_weights=False)
    trained = peft.get_peft_model(make_tiny_model(1), config)
    with pytest.raises(ValueError, match="are tied, but are given different values"):
        InProcessUpdater(policy).push(trained)
    assert policy.policy_version == 0


def test_a_model_that_samples_itself_is_pushed_as_it_is(make_tiny_model, chatml_tokenizer):
    trained = with_adapters(make_tiny_model(1)).eval()
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    updater = InProcessUpdater(TransformersWrapper(trained, tokenizer=chatml_tokenizer))
    assert updater.push(trained) == updater.version == 1
    assert all(torch.equal(before[name], value) for name, value in trained.state_dict().items())
    with torch.no_grad():
        trained.base_model.model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"norm.weight holds NaN"):
        updater.push(trained)
    assert updater.version == 1


def test_a_state_dict_of_adapters_is_refused_whole(policy, make_tiny_model):
    updater = InProcessUpdater(policy)
    adapters = peft.get_peft_model_state_dict(with_adapters(make_tiny_model(1)))
    with pytest.raises(ValueError, match=r"holds adapters, such as .*lora_A"):
        updater.push(adapters)
    assert updater.version == 0


def test_adapters_that_are_no_weights_are_refused(make_tiny_model):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(TypeError, match="no change of weights"):
        gathered_state_dict(peft.get_peft_model(make_tiny_model(1), config))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_wrappers_of_the_trained_model_are_taken_off(make_tiny_model):
    model = make_tiny_model(1)
    weights = gathered_state_dict(torch.compile(model))
    assert weights.keys() == model.state_dict().keys()
    assert all(weights[name] is not None for name in weights)
    named = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    assert gathered_state_dict(named).keys() == model.state_dict().keys()


SHARDED = """
import sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from collectors.weight_update import gathered_state_dict

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
mesh = torch.distributed.init_device_mesh("cpu", (2,))
fully_shard(model, mesh=mesh)
assert model[0].weight.to_local().shape == (3 - rank, 6)
for source in (model, model.state_dict()):
    gathered = gathered_state_dict(source)
    assert gathered.keys() == whole.keys()
    for name, value in gathered.items():
        assert type(value) is torch.Tensor, type(value)
        assert torch.equal(value, whole[name]), name
dist.destroy_process_group()
"""


def test_shards_are_gathered(tmp_path, pytestconfig):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(tmp_path / "store")],
            cwd=pytestconfig.rootpath,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=240)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], printed


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param({NORM: torch.ones(3)}, r"has shape \(3,\)", id="shape"),
        pytest.param({NORM: torch.ones(32, dtype=torch.long)}, "is torch.int64", id="integers"),
        pytest.param({NORM: torch.full((32,), torch.inf)}, "NaN or infinity", id="infinite"),
        pytest.param({"extra": torch.ones(3)}, "it has no use for extra", id="unknown"),
        pytest.param({"lm_head.weight": torch.ones(360, 32)}, "are tied", id="untied"),
    ],
)
def test_a_wrong_push_is_refused_whole(policy, make_tiny_model, spoil, message):
    updater = InProcessUpdater(policy)
    before = logits(policy.model)
    with pytest.raises(ValueError, match=message):
        updater.push({**make_tiny_model(1).state_dict(), **spoil})
    assert updater.version == 0
    assert torch.equal(logits(policy.model), before)


def test_a_version_is_the_one_asked_for_and_does_not_go_back(policy, make_tiny_model):
    updater = InProcessUpdater(policy)
    assert updater.push(make_tiny_model(1), version=7) == updater.version == 7
    assert torch.equal(logits(policy.model), logits(make_tiny_model(1)))
    with pytest.raises(ValueError, match="version 7 is not above the present one, 7"):
        updater.push(make_tiny_model(2), version=7)
    assert torch.equal(logits(policy.model), logits(make_tiny_model(1)))


def test_metadata_is_what_every_push_holds(policy, make_tiny_model):
    updater = InProcessUpdater()
    with pytest.raises(RuntimeError, match="has no policy yet"):
        updater.init()
    weights = make_tiny_model(1).state_dict()
    metadata = {name: (value.dtype, value.shape) for name, value in weights.items()}
    updater.init(metadata, policy=policy)
    with pytest.raises(ValueError, match=rf"1 weights .* such as \['{NORM}'\]"):
        updater.push({**weights, NORM: torch.ones(3)})
    assert updater.push(weights) == 1


def test_the_updater_of_vllm_refuses_another_engine(policy):
    with pytest.raises(TypeError, match="TransformersEngine"):
        LLMCollector(make_env(), policy, weight_updater=vLLMUpdater())


def test_versions_by_hand():
    tracker = PolicyVersion()
    env = ChatEnv(batch_size=2).append_transform(tracker)
    batch = env.reset(TensorDict({"query": "hello"}, batch_size=2))
    assert batch["policy_version"].tolist() == [0, 0]
    assert batch["policy_version"].dtype == torch.int64
    assert tracker.increment_version() == tracker.version == 1
    assert env.reset(TensorDict({"query": "hello"}, batch_size=2))["policy_version"].tolist() == [
        1,
        1,
    ]
    assert env.observation_spec["policy_version"].dtype == torch.int64
    with pytest.raises(ValueError, match="can't go back to 0"):
        tracker.advance_to(0)
    with pytest.raises(ValueError, match="'int' or 'uuid'"):
        PolicyVersion("float")


@pytest.mark.parametrize("version_type", ["int", "uuid"])
def test_a_collector_keeps_the_tracker_at_the_policys_version(
    policy, make_tiny_model, version_type
):
    tracker = PolicyVersion(version_type)
    collector = LLMCollector(make_env(), policy, track_policy_version=tracker)
    assert collector.policy_version_tracker is tracker
    first = tracker.version
    batches = [collector.collect()]
    assert collector.update_policy_weights_(state_dict=make_tiny_model(1).state_dict()) == 1
    assert tracker.version != first
    batches.append(collector.collect())
    collector.weight_updater.push(make_tiny_model(2))  # not through the collector
    batches.append(collector.collect())
    written = [list(batch["policy_version"]) for batch in batches]
    names = [tracker.label(number) for number in range(3)]
    assert names[0] == first
    assert written == [[name] * 2 for name in names]
    assert tracker.version == names[2]
    if version_type == "uuid":
        assert len({uuid.UUID(name) for name in names}) == 3
    collector.shutdown()


def test_an_update_names_its_weights_once(policy, make_tiny_model):
    collector = LLMCollector(make_env(), policy)
    weights = make_tiny_model(1).state_dict()
    assert collector.policy_version_tracker is None
    for arguments in ({}, {"source": weights, "state_dict": weights}):
        with pytest.raises(TypeError, match="takes a model or a state dict"):
            collector.update_policy_weights_(**arguments)
    collector.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_tensor_is_finite_where_isfinite_says_so(dtype):
    largest = torch.finfo(dtype).max
    for value in (1.0, largest, -largest, torch.nan, torch.inf, -torch.inf):
        tensor = torch.full((7, 33), largest / 2, dtype=dtype)  # their sum overflows
        tensor[3, 5] = value
        assert all_finite(tensor) == bool(torch.isfinite(tensor).all()), value
        # Long enough to be summed in rows, with a rest.
        tensor = torch.full((2, 20_000), largest, dtype=dtype)
        for place in (0, 17_000, 39_999):
            tensor.view(-1)[place] = value
            assert all_finite(tensor) == bool(torch.isfinite(tensor).all()), (value, place)
            assert all_finite(tensor.T) == all_finite(tensor)
            tensor.view(-1)[place] = largest
    assert all_finite(torch.empty(0, dtype=dtype))


def test_an_update_without_any_weights_is_refused(policy):
    for nothing in ({}, torch.nn.Module()):
        with pytest.raises(ValueError, match=r"lacks model\.embed_tokens\.weight"):
            InProcessUpdater(policy).push(nothing)
