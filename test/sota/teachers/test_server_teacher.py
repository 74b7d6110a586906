"""The teacher behind a URL gives the scores of the same model in this process, or says why not."""

import os
import socket
import sys
from dataclasses import replace

import pytest
import torch

from torchrl_agents.models.outline import outline
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import CollectorConfig, PolicyConfig
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

MAX_MODEL_LEN = 64
LENGTHS = [1, 5, MAX_MODEL_LEN - 1]


@pytest.fixture
def teachers(script):
    script("distillation")
    return sys.modules["teachers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher")
    tokenizer = train_tokenizer(["Is 7 odd?"] * 8, vocab_size=300)
    torch.manual_seed(0)
    tiny_qwen3(len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def build(teachers, student, url, model, max_model_len):
    cfg = teachers.TeacherConfig(model=model, url=url)
    return teachers.build_teacher(cfg, student, PolicyConfig(), max_model_len=max_model_len)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_scores_as_the_same_model_in_process(teachers, folder):
    from torchrl_modules import start_server

    policy = PolicyConfig(device="cpu", gradient_checkpointing=False)
    model, tokenizer = teachers.load_model(policy, folder)
    student = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    here = build(teachers, student, None, folder, MAX_MODEL_LEN - 1)
    ids = torch.randint(len(tokenizer), (sum(LENGTHS),))
    lengths = torch.tensor(LENGTHS)
    mask = torch.rand(len(ids)) < 0.7
    mask[lengths.cumsum(0) - lengths] = False  # nothing comes before a first token
    mask[lengths.cumsum(0)[1:] - 1] = True
    expected = here.score_packed(ids, lengths, mask).log_prob
    assert expected.std() > 0.5

    options = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
    with start_server(folder, max_model_len=MAX_MODEL_LEN, **options) as url:
        served = build(teachers, student, url, folder, MAX_MODEL_LEN - 1)
        found = served.score_packed(ids, lengths, mask).log_prob
        assert found.shape == (int(mask.sum()),)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)  # float32 of two engines
        with pytest.raises(SettingsError, match=rf"policy.max_model_len={MAX_MODEL_LEN - 1}"):
            build(teachers, student, url, folder, MAX_MODEL_LEN)
        with pytest.raises(SettingsError, match="no model 'other'.*" + os.path.basename(folder)):
            build(teachers, student, url, "other", 8)
        too_long = torch.zeros(MAX_MODEL_LEN, dtype=torch.long)
        with pytest.raises(ConnectionError, match=f"{url} answers /v1/completions with 400"):
            served.score_packed(too_long, torch.tensor([len(too_long)]), too_long > 0)
        with pytest.raises(ValueError, match=r"temperature 1.*temperature=0\.5"):
            served.score_packed(ids, lengths, mask, temperature=0.5)
    with pytest.raises(ConnectionError, match=f"The teacher at {url} does not answer"):
        served.score_packed(ids, lengths, mask)


@pytest.mark.parametrize("is_outline", [False, True], ids=["the run", "its dry run"])
def test_a_teacher_here_with_too_few_positions_is_refused_as_one_at_a_url_is(
    teachers, folder, is_outline
):
    policy = PolicyConfig(device="cpu", gradient_checkpointing=False)
    model, tokenizer = teachers.load_model(policy, folder)
    student = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    policy = replace(policy, device="meta") if is_outline else policy
    own = model.config.max_position_embeddings
    how = {"load": outline} if is_outline else {}
    cfg = teachers.TeacherConfig(model=folder)
    teachers.build_teacher(cfg, student, policy, max_model_len=own, **how)
    with pytest.raises(SettingsError, match=f"takes {own} tokens.*up to {own + 1}.*max_model_len"):
        teachers.build_teacher(cfg, student, policy, max_model_len=own + 1, **how)


@pytest.mark.parametrize("is_there", [False, True], ids=["nobody listens", "no answer in time"])
def test_a_dead_server_is_named(teachers, is_there):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        if not is_there:
            listener.close()
        with pytest.raises(ConnectionError, match=f"The teacher at {url} does not answer"):
            teachers.ServerTeacher(url, "m", timeout_s=0.2)
        cfg = teachers.TeacherConfig(model="m", url=url, timeout_s=0.2)
        with pytest.raises(SettingsError, match=rf"teacher.url: The teacher at {url}"):
            teachers.build_teacher(cfg, None, PolicyConfig(), max_model_len=8)


@pytest.mark.parametrize(
    ("change", "policy", "hint"),
    [
        ({"url": "host:8000"}, {}, r"http://host:port or unix:///path, got 'host:8000'"),
        ({"url": "http:///v1"}, {}, "got 'http:///v1'"),
        ({"url": "http://h:1/v1"}, {"temperature": 0.7}, r"with policy.temperature=0\.7\. Set"),
        # log p is then of what truncation leaves, and log q of all: the KL of a model to itself
        # would be log(1 / mass kept) nats and not 0.
        ({"url": "http://h:1/v1"}, {"top_p": 0.9}, r"samples with policy.top_p=0\.9\. Set"),
        ({"url": "http://h:1/v1"}, {"top_k": 5}, r"samples with policy.top_k=5\. Set"),
        ({"url": "http://h:1/v1"}, {"min_p": 0.05}, r"with policy.min_p=0\.05\. Set"),
    ],
)
def test_what_a_server_cannot_score_is_refused_before_loading(teachers, change, policy, hint):
    cfg = teachers.TeacherConfig(model="m", **change)
    panel = sys.modules["panel"]
    with pytest.raises(ValueError, match=hint):
        panel.Panel(cfg, {}, None).check(replace(PolicyConfig(), **policy), CollectorConfig())
    without = replace(cfg, url=None)
    panel.Panel(without, {}, None).check(replace(PolicyConfig(), **policy), CollectorConfig())
