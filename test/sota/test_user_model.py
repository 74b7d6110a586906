"""A model of this process plays the simulated user: whose words they are, and when they come."""

import json
import pickle
import shutil

import pytest
import torch

from collectors.record import RunRecord
from torchrl_agents.models.user_model import UserModel, user_models, with_user_models
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import PolicyConfig
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.task import TaskEnv
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

POLICY = PolicyConfig(dtype="float32", device="cpu")
MINE = """
def length(completions, **_):
    return [float(len(str(text)) % 7) for text in completions]
"""
OWN = (
    *("debug=tiny", "logger=none", "task.dataset=rows.jsonl", "task.rewards=mine:length"),
    *("task.user=user", "task.user_temperature=1.0", "task.max_turns=3"),
    *("collector.max_error_fraction=1", "policy.max_new_tokens=20", "policy.stop=[a,e,o,i]"),
    *("collector.num_prompts=2", "collector.group_size=4", "evaluate.num_prompts=4"),
    *("evaluate.num_shown=0", "checkpoint.every=1"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that says something else each time, and ends at every third token of its words."""
    path = tmp_path_factory.mktemp("user")
    tokenizer = train_tokenizer(["I would like six eggs, please."])
    stops = list(range(0, len(tokenizer), 3))
    torch.manual_seed(0)
    tiny_qwen3(len(tokenizer), stop_token_ids=stops).save_pretrained(path / "user")
    tokenizer.save_pretrained(path / "user")
    (path / "mine.py").write_text(MINE)
    rows = [{"prompt": f"What is {i}?", "scenario": "You ask."} for i in range(64)]
    (path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def asked(text):
    return [{"role": "system", "content": "Ask."}, {"role": "user", "content": text}]


def answered(model, texts, streams):
    return [str(each) for each in model([asked(text) for text in texts], streams=streams)]


def test_an_answer_follows_from_the_seed_the_stream_and_the_question_alone(folder):
    def made(seed=3):
        own = {"seed": seed, "temperature": 1.0, "max_new_tokens": 64}
        return UserModel(str(folder / "user"), POLICY, **own)

    model, streams = made(), list(range(12))
    texts = ["How many?"] * 12
    together = answered(model, texts, streams)
    assert len({*together}) > 3, "streams differ"
    torch.manual_seed(99)  # whatever was drawn before
    alone = [answered(model, [text], [n])[0] for text, n in zip(texts, streams, strict=True)]
    copy = pickle.loads(pickle.dumps(model))
    assert alone == together == answered(copy, texts, streams)
    assert answered(made(seed=4), texts, streams) != together
    weights = model.load().policy.model.parameters()
    assert not any(weight.requires_grad for weight in weights)
    assert model.load() is model.load()


def test_names_of_models_become_models_and_others_stay(folder):
    user = str(folder / "user")
    own = {"user": user, "user_temperature": 0.5, "user_max_tokens": 9, "num_rows": 8}
    changed = with_user_models(own, POLICY, seed=5)
    assert (changed["user"].source, changed["num_rows"]) == (user, 8)
    sampling = changed["user"].sampling
    assert (sampling.seed, sampling.temperature, sampling.max_new_tokens) == (5, 0.5, 9)
    assert {*changed} == {"user", "num_rows"}
    for kept in ({"user": "http://localhost:1/v1", "user_temperature": 1.0}, {"user": "mine:user"}):
        assert with_user_models(kept, POLICY, seed=5) == kept
    parts = {"tasks": {"ordering": {"share": 1, "user": user}, "echo": 1}}
    inside = with_user_models(parts, POLICY, seed=5)["tasks"]
    assert isinstance(inside["ordering"]["user"], UserModel)
    assert (inside["ordering"]["share"], inside["echo"]) == (1, 1)


def test_one_model_plays_in_all_environments_of_a_task(folder):
    settings = with_user_models({"user": str(folder / "user")}, POLICY, seed=0)
    sizes = {"num_rows": 8, "num_held_out": 4, "num_demonstrations": 0}
    task = make_task("ordering", **settings, **sizes)
    envs = [TaskEnv(task), TaskEnv(task, held_out=True)]
    assert user_models(envs) == {settings["user"]: False}
    for env in envs:
        env.close()


def test_who_can_not_be_loaded_is_told_before_it_is_asked(folder):
    with pytest.raises(SettingsError, match=r"task\.user=user\.gguf.*There is no file or folder"):
        UserModel("user.gguf", POLICY, seed=0)
    with pytest.raises(SettingsError, match="temperature"):
        UserModel("user", POLICY, seed=0, temperature=-1.0)
    empty = UserModel(str(folder), POLICY, seed=0)
    with pytest.raises(SettingsError, match="holds no model"):
        empty.check()
    given = {"user": "smollm2", "user_model": "a"}
    with pytest.raises(SettingsError, match=r"task\.user_model=a is for a server"):
        with_user_models(given, POLICY, seed=0)


def test_a_template_that_shows_no_tools_is_refused_where_the_user_has_some(folder, tmp_path):
    mute = tmp_path / "mute"
    shutil.copytree(folder / "user", mute)
    config = json.loads((mute / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (mute / "tokenizer_config.json").write_text(json.dumps(config))
    (mute / "chat_template.jinja").unlink(missing_ok=True)
    given = {"user": str(mute), "user_tools": f"{__name__}:look_up"}
    settings = with_user_models(given, POLICY, seed=0)
    own = {
        "rewards": f"{__name__}:no_reward",
        "dataset": str(folder / "rows.jsonl"),
        "num_held_out": 2,
    }
    env = TaskEnv(make_task("environment", **own, **settings))
    assert user_models([env]) == {settings["user"]: True}
    env.close()
    for ask in (settings["user"].check, settings["user"].load):
        with pytest.raises(SettingsError, match="this user has tools, and the chat template"):
            ask(has_tools=True)
    settings["user"].check(has_tools=False)
    UserModel(str(folder / "user"), POLICY, seed=0).check(has_tools=True)


def look_up() -> str:
    """Look something up."""
    return "seven"


def no_reward(completions):
    return [0.0] * len(completions)


def words_of(run, step):
    """What was said in a step, by the number of the draw and of the rollout."""
    return [
        [(message["role"], message["content"]) for message in sample.messages]
        for sample in RunRecord(run).samples(step)
    ]


def test_a_run_that_goes_on_hears_what_a_whole_one_hears(run_script, folder):
    def run(*settings):
        done = run_script(*OWN, *settings, cwd=folder, name="grpo")
        assert done.returncode == 0, done.stderr
        return done

    run("hydra.run.dir=whole", "train.num_steps=2")
    run("hydra.run.dir=cut", "train.num_steps=1")
    run("resume=cut", "train.num_steps=2")
    whole, resumed = words_of(folder / "whole", 2), words_of(folder / "cut", 2)
    assert whole == resumed
    said = [text for chat in whole for role, text in chat[1:] if role == "user"]
    assert len({*said}) > 2, "the user draws its words"
    dry = run("hydra.run.dir=dry", "dry_run=true")
    assert "nothing is refused" in dry.stdout
