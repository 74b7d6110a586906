"""What differs between releases of vLLM is asked of what is there; modules stand in for them."""

import sys
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace

import pytest

from torchrl_modules.vllm import releases
from torchrl_modules.vllm.image_scheduler import (
    IMAGE_SCHEDULER,
    rereads_images,
    send_whole_images,
)
from torchrl_modules.vllm.requests import read_answer


@pytest.fixture
def vllm(monkeypatch):
    """Puts modules of some vLLM in the place of what is installed; a name in it has a value."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)

    def install(name, **values):
        parts = name.split(".")
        for number in range(1, len(parts) + 1):
            path = ".".join(parts[:number])
            if path not in sys.modules:
                module = ModuleType(path)
                module.__path__ = []
                module.__spec__ = SimpleNamespace(name=path, submodule_search_locations=[])
                monkeypatch.setitem(sys.modules, path, module)
        vars(sys.modules[name]).update(values)

    install("vllm")
    return install


def test_refused_requests_are_errors_of_values_before_0_27(vllm):
    vllm("vllm.exceptions")
    assert releases.client_error() is ValueError
    error = type("VLLMClientError", (Exception,), {})
    vllm("vllm.exceptions", VLLMClientError=error)
    assert releases.client_error() is error


def test_versions_are_told_by_outputs_that_have_them(vllm):
    vllm("vllm.outputs", CompletionOutput=make_dataclass("CompletionOutput", ["text"]))
    assert not releases.tells_versions()
    assert [line.partition(" (0.32)")[0] for line in releases.lacking()] == [
        "servers say which weights drew a token"
    ]
    fields = ["text", "weight_versions"]
    vllm("vllm.outputs", CompletionOutput=make_dataclass("CompletionOutput", fields))
    assert releases.tells_versions()
    assert releases.lacking() == []


@pytest.mark.parametrize(
    ("has_function", "is_v2", "strips"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_images_are_sent_whole_where_vllm_would_leave_them_out(vllm, has_function, is_v2, strips):
    """A server reads images again with the scheduler that sends them, or with such a vLLM."""
    vllm("vllm.multimodal.utils", **{"strip_covered_mm_data": None} if has_function else {})
    chosen = SimpleNamespace(scheduler_cls=None)
    config = SimpleNamespace(use_v2_model_runner=is_v2, scheduler_config=chosen)
    scheduler = SimpleNamespace(
        vllm_config=config,
        requests={"a": SimpleNamespace(mm_features=["whole"])},
        schedule=lambda throttles: SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id="a", mm_features=[throttles])]
        ),
    )
    send_whole_images(scheduler)
    schedule = scheduler.schedule
    send_whole_images(scheduler)  # of an engine that is taken twice
    assert scheduler.schedule is schedule
    [new] = scheduler.schedule("cut").scheduled_new_reqs
    assert new.mm_features == (["whole"] if strips else ["cut"])
    assert rereads_images(config) is not strips
    chosen.scheduler_cls = IMAGE_SCHEDULER
    assert rereads_images(config)


def test_the_server_is_where_this_release_has_it(vllm):
    with pytest.raises(ImportError, match=r"none of the servers vllm\.entrypoints"):
        releases.server_module()
    vllm("vllm.entrypoints.openai.api_server")
    assert releases.server_module() == "vllm.entrypoints.openai.api_server"
    vllm("vllm.entrypoints.launchers.api_server.entry")
    assert releases.server_module() == "vllm.entrypoints.launchers.api_server.entry"


def test_an_engine_that_takes_no_label_gets_none():
    labels = []
    releases.label_weights(SimpleNamespace(), "1")
    releases.label_weights(SimpleNamespace(set_weight_version=labels.append), "2")
    assert labels == ["2"]


def test_an_answer_without_versions_is_of_the_weights_that_it_was_asked_of():
    choice = {
        "token_ids": [5, 6],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        "finish_reason": "stop",
    }
    drawn = read_answer({"choices": [choice]}, ["3"])
    assert drawn.versions == [(3, 0, 2)]
    empty = choice | {"token_ids": [], "logprobs": {"content": []}}
    assert read_answer({"choices": [empty]}, ["3"]).versions == []


def test_routed_experts_are_loaded_by_their_old_name_too():
    """As Qwen3-MoE has them in vLLM 0.26; a parameter that is nowhere is told."""
    names = ["layers.0.mlp.experts.routed_experts.w13_weight", "layers.0.mlp.gate.weight"]
    for experts in (names[0], "layers.0.mlp.experts.w13_weight"):
        assert releases.not_loaded(names, {experts, names[1]}) == []
        assert releases.not_loaded(names, {experts}) == [names[1]]
    assert releases.not_loaded(names, {names[1]}) == [names[0]]
