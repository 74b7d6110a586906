"""What is saved goes on as if it had not been, here and in PEFT."""

import json
import time

import httpx2
import peft
import pytest
import tinker
import torch
from tinker import types

from torchrl_agents.training_service.adapted_model import AdaptedModel
from torchrl_agents.training_service.checkpoint_folder import CheckpointFolder
from torchrl_agents.training_service.device_thread import DeviceJob
from torchrl_agents.training_service.errors import RefusedRequest
from torchrl_agents.training_service.service import AdamSettings

from .conftest import NAME
from .test_sampling import INPUT, PROMPT, log_probs_of, trained


@pytest.fixture
def run(served):
    return trained(served.client.create_lora_training_client(NAME, rank=4, seed=1).result())


def test_a_run_goes_on_from_what_was_saved_to_the_bit(served, run):
    path = run.save_state("third").result().path
    assert path == f"tinker://{run.model_id}/weights/third"
    whole = log_probs_of(trained(run), PROMPT)
    resume = served.client.create_training_client_from_state_with_optimizer
    resumed = resume(path, user_metadata={"who": "me"}).result()
    assert torch.equal(log_probs_of(trained(resumed), PROMPT), whole)
    # Without the optimizer's memory the same steps lead elsewhere.
    fresh = served.client.create_training_client_from_state(path).result()
    assert not torch.equal(log_probs_of(trained(fresh), PROMPT), whole)


def test_another_server_has_what_the_first_one_saved(
    serve, run, make_tiny_model, chatml_tokenizer, tiny_folder
):
    path = run.save_state("third").result().path
    sampler = run.save_weights_for_sampler("third").result().path
    whole = log_probs_of(trained(run), PROMPT)
    model = AdaptedModel(NAME, make_tiny_model(), chatml_tokenizer, str(tiny_folder))
    other = serve(model).client
    resumed = other.create_training_client_from_state_with_optimizer(path).result()
    saved = log_probs_of(resumed, PROMPT).tolist()
    assert torch.equal(log_probs_of(trained(resumed), PROMPT), whole)
    told = other.create_sampling_client(model_path=sampler).result().compute_logprobs(INPUT)
    assert told.result()[1:] == pytest.approx(saved, abs=2e-5)


@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_an_adapter_is_refused_over_other_weights_of_the_same_name(
    serve, run, make_tiny_model, chatml_tokenizer, tiny_folder
):
    path = run.save_state("third").result().path
    sampler = run.save_weights_for_sampler("third").result().path
    model = make_tiny_model()
    made = (NAME, model, chatml_tokenizer, str(tiny_folder))
    digest = AdaptedModel(*made).digest
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight[0, 0] += 1
    other = serve(AdaptedModel(*made)).client
    with pytest.raises(tinker.RequestFailedError, match="other weights than those that"):
        other.create_training_client_from_state(path).result()
    with pytest.raises(tinker.APIStatusError, match="other weights than those that"):
        other.create_sampling_client(model_path=sampler).result()
    running = other.create_lora_training_client(NAME, rank=4, seed=1).result()
    with pytest.raises(tinker.RequestFailedError, match="other weights than those that"):
        running.load_state(path).result()
    # The same checkpoint in another type is the same model, as far as it can be told.
    rounded = make_tiny_model().to(torch.bfloat16)
    assert AdaptedModel(NAME, rounded, *made[2:]).digest == digest
    assert AdaptedModel(NAME, rounded.half(), *made[2:]).digest == ""


def test_a_checkpoint_that_is_not_whole_is_refused_by_its_path(served, run):
    path = run.save_state("half").result().path
    folder = served.service.checkpoints.root / run.model_id / "weights/half"
    for file in ("optimizer.safetensors", "adapter_model.safetensors"):
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(tinker.RequestFailedError, match=rf"weights/half can't be.*{file}"):
            served.client.create_training_client_from_state_with_optimizer(path).result()


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("shape", [{}, {"train_unembed": False}, {"train_mlp": False}])
def test_a_saved_adapter_is_one_of_peft(served, make_tiny_model, shape):
    make = served.client.create_lora_training_client
    run = trained(make(NAME, rank=4, seed=1, **shape).result())
    run.save_weights_for_sampler("final").result()
    folder = served.service.checkpoints.root / run.model_id / "sampler_weights" / "final"
    model = peft.PeftModel.from_pretrained(make_tiny_model(), folder)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(log_probs_of(run, PROMPT), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_names_and_paths(served, run):
    run.save_state("a").result()
    with pytest.raises(tinker.RequestFailedError, match="There is a checkpoint"):
        run.save_state("a").result()
    trained(run)
    run.save_state("a", overwrite=True, user_metadata={"k": "v"}).result()
    saved = log_probs_of(run, PROMPT)
    run.load_state(f"tinker://{run.model_id}/weights/a").result()
    assert torch.equal(log_probs_of(run, PROMPT), saved)
    for name in ("../up", "", ".hidden", "a/b", "x" * 300):
        with pytest.raises(tinker.RequestFailedError, match="name"):
            run.save_state(name or " ").result()
    folder = served.service.checkpoints
    for path in ("tinker://a/weights/../../x", "tinker://../weights/x", "file://a/weights/b", "a"):
        with pytest.raises(RefusedRequest, match=r"no path of a checkpoint|a name that no"):
            folder.find(path)
    with pytest.raises(RefusedRequest, match="There is no checkpoint"):
        folder.find("tinker://a/weights/b")
    assert not list(folder.root.rglob("*.partial"))


def test_what_breaks_off_leaves_what_was_there(served, run, monkeypatch):
    path = run.save_state("a").result().path
    before = served.service.checkpoints.load(served.service.checkpoints.find(path))
    trained(run)

    def break_off(weights, folder):
        (folder / "adapter_model.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(served.model, "save", break_off)
    with pytest.raises(tinker.RequestFailedError, match="No space left"):
        run.save_state("a", overwrite=True).result()
    after = served.service.checkpoints.load(served.service.checkpoints.find(path))
    assert all(torch.equal(after.tensors[k], v) for k, v in before.tensors.items())


def test_what_is_saved_is_listed_and_deleted(served, run):
    run.save_state("a", user_metadata={"k": "v"}).result()
    run.save_weights_for_sampler("b").result()
    rest = tinker.RestClient(base_url=served.url, api_key="tml-any")
    listed = rest.list_checkpoints(run.model_id).result().checkpoints
    assert [one.checkpoint_id for one in listed] == ["weights/a", "sampler_weights/b"]
    assert listed[0].user_metadata == {"k": "v"}
    assert listed[0].size_bytes > 1000
    told = rest.get_training_run(run.model_id).result()
    assert (told.base_model, told.lora_rank) == (NAME, 4)
    assert [one.training_run_id for one in rest.list_training_runs().result().training_runs] == [
        run.model_id
    ]
    info = rest.get_weights_info_by_tinker_path(listed[0].tinker_path).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == (NAME, 4, True)
    rest.delete_checkpoint(run.model_id, "weights/a").result()
    listed = rest.list_checkpoints(run.model_id).result().checkpoints
    assert [one.checkpoint_id for one in listed] == ["sampler_weights/b"]


@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_weights_of_another_shape_or_model_are_refused(served, run):
    path = run.save_state("a").result().path
    sampler = run.save_weights_for_sampler("b").result().path
    other = served.client.create_lora_training_client(NAME, rank=2).result()
    with pytest.raises(tinker.RequestFailedError, match="another shape"):
        other.load_state(path).result()
    with pytest.raises(tinker.RequestFailedError, match="no state of an optimizer"):
        served.client.create_training_client_from_state_with_optimizer(sampler).result()
    folder = CheckpointFolder(served.service.checkpoints.root)
    about = folder.root / run.model_id / "weights" / "a" / "about.json"
    told = json.loads(about.read_text())
    about.write_text(json.dumps({**told, "base_model": "someone/else"}))
    with pytest.raises(tinker.APIStatusError, match="not served here"):
        served.client.create_training_client_from_state(path).result()


def test_keys_sessions_and_paths_of_http(serve):
    served = serve(key="tml-secret")
    url = f"{served.url}/api/v1"
    assert httpx2.get(f"{url}/healthz").status_code == 401
    headers = {"X-API-Key": "tml-secret"}
    assert httpx2.get(f"{url}/healthz", headers=headers).json() == {"status": "ok"}
    unknown = httpx2.post(f"{url}/nothing", headers=headers, json={})
    assert unknown.status_code == 404
    assert "/api/v1/nothing is not served here" in unknown.json()["detail"]
    for body, words in ((b"{", "no JSON"), (b"[]", "JSON object"), (b"{}", "tags")):
        told = httpx2.post(f"{url}/create_session", headers=headers, content=body)
        assert told.status_code in (400, 422)
        assert words in told.json()["detail"]
    told = httpx2.post(f"{url}/forward_backward", headers=headers, content=b"\xff" * 9)
    assert "no ForwardBackwardRequest" in told.json()["detail"]


def test_a_session_that_is_not_heard_of_ends_and_its_weights_go(serve):
    served = serve(session_timeout_s=1.0)
    run = served.client.create_lora_training_client(NAME, rank=2).result()
    weights = [name for name, _ in served.model._model.named_parameters() if "lora_A" in name]
    assert weights
    time.sleep(1.5)
    with pytest.raises(tinker.APIStatusError, match="There is no"):
        run.save_weights_and_get_sampling_client().result()
    done = DeviceJob(lambda jobs: [len(jobs)])
    served.service._device.submit(done)
    assert done.result.result(10)
    left = [name for name, _ in served.model._model.named_parameters() if "lora_A" in name]
    assert not left


def test_settings_of_a_step_are_those_of_the_installed_package():
    assert set(types.AdamParams.model_fields) == set(AdamSettings._fields)
    assert types.AdamParams().model_dump() == AdamSettings()._asdict()
