"""The evaluation as a user runs it: a server on a data set, with every number by hand."""

import json
import os
import re
import signal
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from collectors.record import RolloutRecorder, RunRecord
from collectors.record.convert import main as convert
from torchrl_envs import load_rows

NUM_ROWS = 12


class Solver(BaseHTTPRequestHandler):
    """Adds 1: always right for even numbers, at every fourth time for odd ones."""

    asked: Counter[int]
    lock = threading.Lock()
    requests: list[dict]

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = int(re.search(r"\d+", body["messages"][-1]["content"])[0])
        with self.lock:
            turn = self.asked[number]
            self.asked[number] += 1
            self.requests.append(body)
        wrong = number % 2 and turn % 4
        said = f"<think>easy</think><answer>{number + 1 + (wrong if wrong > 1 else 0)}</answer>"
        said = "I do not know." if wrong == 1 else said
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        data = json.dumps({**reply, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    Solver.asked, Solver.requests = Counter(), []
    with ThreadingHTTPServer(("127.0.0.1", 0), Solver) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/v1"
        httpd.shutdown()
        thread.join()


@pytest.fixture
def evaluate(run_script, tmp_path):
    rows = [{"question": f"What is {i} plus 1?", "answer": f"#### {i + 1}"} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    return lambda *arguments, **environment: run_script(
        *arguments, name="evaluate", cwd=tmp_path, **environment
    )


@pytest.mark.slow
def test_a_server_on_a_data_set(evaluate, server, tmp_path):
    done = evaluate(
        *("task=gsm8k", "task.dataset=rows.jsonl", f"evaluate.num_prompts={NUM_ROWS}"),
        *("evaluate.num_samples=4", "evaluate.max_rollouts=20", "evaluate.ks=[1,2,4]"),
        *("engine=chat", f"engine.url={server}", "policy.model=m", "policy.temperature=0.7"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    folder = Path(result["output_dir"])
    assert json.loads((folder / "evaluation.json").read_text()) == result
    # Of the 12 prompts 6 are always right. The others are right once in 4, without an answer once,
    # and wrong twice with different answers, so that their vote is a tie of three.
    found = {name: each["value"] for name, each in result["estimates"].items()}
    assert found == {
        "reward": pytest.approx((1 + (1 + 2 * 0.1) / 4) / 2),
        "mean@4": pytest.approx((1 + 1 / 4) / 2),
        "pass@1": pytest.approx((1 + 1 / 4) / 2),
        "pass@2": pytest.approx((1 + 1 / 2) / 2),
        "pass@4": 1.0,
        "pass^1": pytest.approx((1 + 1 / 4) / 2),
        "pass^2": 0.5,
        "pass^4": 0.5,
        "maj@4": pytest.approx((1 + 1 / 3) / 2),
    }
    assert result["estimates"]["pass^4"]["low"] < 0.5 < result["estimates"]["pass^4"]["high"]
    assert "maj@4" in done.stderr
    # 48 rollouts, 20 at once: what is left is told in the steps that are timed.
    assert re.findall(r"evaluation step (\d/\d) ", done.stderr) == ["1/3", "2/3", "3/3"]
    record = RunRecord(folder)
    rollouts = [sample for step in record.steps for sample in record.samples(step.step)]
    assert len(rollouts) == 4 * NUM_ROWS
    assert set(Solver.asked.values()) == {4}
    assert all(sample.messages[0]["role"] == "system" for sample in rollouts)
    # Of the 6 that are not always right, the answer that is and the one that was not given.
    pairs = tmp_path / "pairs.jsonl"
    assert convert([str(folder), str(pairs)]) == 0
    read = load_rows(pairs)
    assert [(row["chosen_reward"], row["rejected_reward"]) for row in read] == [(1.0, 0.0)] * 6
    assert {row["rejected"][0]["content"] for row in read} == {"I do not know."}
    assert all([m["role"] for m in row["prompt"]] == ["system", "user"] for row in read)
    request = Solver.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.7, 512)
    assert [m["role"] for m in request["messages"]] == ["system", "user"]


@pytest.mark.slow
def test_a_runs_model_is_asked_as_it_was_trained(run_recipe, evaluate, tmp_path, monkeypatch):
    """Its prompts, its turns, and for training the settings of the model that it began with."""
    monkeypatch.chdir(tmp_path)
    tiny = ("collector.num_prompts=2", "collector.group_size=2", "train.num_steps=2")
    tiny += ("evaluate.num_prompts=8", "evaluate.num_shown=0", "logger=none")
    tiny += ("task.num_rows=64", "task.num_demonstrations=64")
    begin = ("policy.max_new_tokens=20", "warm_start.num_steps=2", "name=first")
    first = run_recipe("grpo", *tiny, *begin)["output_dir"]
    second = run_recipe("grpo", *tiny, f"policy.model={first}", "name=second")["output_dir"]
    for model in (first, f"{second}/model"):
        options = ("evaluate.num_prompts=4", "evaluate.num_samples=2", "evaluate.num_shown=0")
        result = run_recipe("evaluate", f"policy.model={model}", *options)
        assert {each["num_prompts"] for each in result["estimates"].values()} == {4}
        settings = settings_of(result["output_dir"])
        assert settings["policy"]["show_tool_schemas"] is False
        assert settings["policy"]["max_new_tokens"] == 20
        again = run_recipe("evaluate", f"policy.model={model}", *options)
        assert again["rollouts"] == result["rollouts"]  # the seed says what is drawn
    settings = settings_of(second)
    assert settings["policy"]["max_new_tokens"] == 20
    assert settings["optim"]["learning_rate"] == 1e-3
    assert settings["warm_start"]["num_steps"] == 0
    # Of another task its turns are as long as that task's are, and may be as the user says.
    options = ("task=echo", "policy.show_tool_schemas=true", "evaluate.num_prompts=2")
    done = evaluate(f"policy.model={first}", *options, "dry_run=true")
    assert done.returncode == 0, done.stderr
    settings = settings_of("outputs/evaluate/echo/seed0-001")
    assert settings["policy"]["show_tool_schemas"] is True
    assert settings["policy"]["max_new_tokens"] != 20


def settings_of(folder):
    return yaml.safe_load(Path(folder, "config.yaml").read_text())


@pytest.mark.slow
def test_one_that_was_stopped_goes_on_as_it_would_have(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("evaluate.num_prompts=10", "evaluate.num_samples=2", "evaluate.max_rollouts=8")
    options += ("policy.max_new_tokens=8", "evaluate.num_shown=0")
    write = RolloutRecorder.write

    def write_and_stop(recorder, step, *rows, **more):
        write(recorder, step, *rows, **more)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = run_recipe("evaluate", *options, "name=whole")
    with monkeypatch.context() as patch:
        patch.setattr(RolloutRecorder, "write", write_and_stop)
        with pytest.raises(SystemExit):
            run_recipe("evaluate", *options, "name=cut")
    cut = Path("outputs/evaluate/calculator/cut-001")
    assert json.loads((cut / "evaluation.json").read_text())["rollouts"]["turns"] >= 1
    again = run_recipe("evaluate", f"resume={cut}")
    assert again["estimates"] == whole["estimates"]
    said = [
        [(each.group_id, each.messages) for each in record.samples(step.step)]
        for record in map(RunRecord, (whole["output_dir"], cut))
        for step in record.steps
    ]
    assert list(map(len, said)) == 2 * [8, 8, 4]  # 20 rollouts, 4 prompts at once
    assert said[:3] == said[3:]
    assert said[1] != said[2][:4]


@pytest.mark.slow
def test_several_data_sets_in_one_command(evaluate, server, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    odd = [{"question": f"What is {i} plus 1?", "answer": f"#### {i + 1}"} for i in range(1, 9, 2)]
    (tmp_path / "odd.jsonl").write_text("\n".join(map(json.dumps, odd)))
    done = evaluate(
        *("--multirun", "task=gsm8k", "task.dataset=odd.jsonl,rows.jsonl"),
        *("task.held_out_split=train", "evaluate.num_prompts=4", "evaluate.num_samples=4"),
        *("engine=chat", f"engine.url={server}", "policy.model=m", "evaluate.num_shown=0"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tmp_path.rglob("multirun.json")
    odd, both = json.loads(path.read_text())
    assert odd["estimates"]["pass@1"]["value"] == 0.25
    assert both["estimates"]["pass@1"]["value"] == pytest.approx((2 + 2 * 0.25) / 4)
    table = done.stderr[done.stderr.rindex("multirun.json") :]
    assert re.search(r"overrides .* reward .* pass@4", table)
    assert re.search(r"odd\.jsonl .* 0\.250 ", table)


@pytest.mark.slow
def test_what_could_not_be_scored_is_said_and_kept(evaluate, tmp_path):
    (tmp_path / "never.py").write_text("def applies(completions):\n    return [None] * 4\n")
    rows = [{"prompt": f"What is {n} + 1?"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = ("task.dataset=rows.jsonl", "task.rewards=never:applies", "policy.max_new_tokens=4")
    done = evaluate(*own, "evaluate.num_prompts=4", "evaluate.num_samples=1")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert re.search(r"no rollout could be scored: \d+ x response_length", done.stderr)
    (file,) = tmp_path.rglob("evaluation.json")
    found = json.loads(file.read_text())["estimates"]["reward"]
    assert found == {"value": None, "low": None, "high": None, "num_prompts": 0}
    assert {sample.reward for sample in RunRecord(file.parent).samples(1)} == {None}


@pytest.mark.slow
def test_prompts_that_are_too_long_are_told_and_where_none_fits_that_is_refused(evaluate, tmp_path):
    """Of four prompts one has more characters than the model takes tokens."""
    (tmp_path / "ones.py").write_text(
        "def one(completions):\n    return [1.0] * len(completions)\n"
    )
    rows = [{"prompt": f"{n} + 1?" if n != 2 else "word " * 400} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = ("task.dataset=rows.jsonl", "task.rewards=ones:one", "policy.max_new_tokens=4")
    few = ("evaluate.num_prompts=4", "evaluate.num_samples=1")
    done = evaluate(*own, *few, "policy.max_model_len=200")
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(
        r"1 row\(s\) are left out .*: row 2: the prompt has \d+ tokens, 184 are allowed",
        done.stderr,
    )
    found = json.loads(next(tmp_path.rglob("evaluation.json")).read_text())
    assert found["estimates"]["reward"]["num_prompts"] == 3
    refused = evaluate(*own, *few, "policy.max_model_len=17", "name=short")
    assert refused.returncode != 0
    assert "Traceback" not in refused.stderr
    assert "no prompt is short enough: row 0: the prompt has" in refused.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_model_that_is_not_there_is_told_in_a_line_whichever_engine_draws(evaluate, engine):
    asked = (f"engine={engine}", "engine.url=http://127.0.0.1:1", "policy.model=no/where")
    done = evaluate(*asked, "task=spell_backward", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    told = r"evaluate.py: policy\.model='no/where' \(no folder of that name.*\) can't be loaded: "
    assert re.match(told, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr
