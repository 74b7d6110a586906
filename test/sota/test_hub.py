"""A trained model on a hub: its card, and its upload to a server of the same protocol."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

TOKEN = "hf_of_a_test"
TINY = (
    "debug=tiny",
    "logger=none",
    "evaluate.num_shown=0",
    "task.num_demonstrations=64",
    "task.num_rows=64",
)
TINY += ("evaluate.num_samples=2", "push_to_hub=someone/model")


class Hub(BaseHTTPRequestHandler):
    """Makes repositories, and takes commits, whose files it keeps."""

    repositories: dict[str, dict[str, bytes]]
    refuses: str

    def answer(self, reply, status=200):
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def address(self):
        return f"http://{self.headers['Host']}"

    def do_GET(self):
        if self.path != "/api/whoami-v2":
            self.answer({"error": "there is none"}, 404)
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer({"error": "who?"}, 401)
        else:
            self.answer({"name": "someone"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        *_, last, branch = self.path.split("/")
        if self.refuses in self.path:
            self.answer({"error": "not today"}, 403)
        elif self.path == "/api/repos/create":
            self.repositories[f"someone/{json.loads(body)['name']}"] = {}
            self.answer({"url": f"{self.address()}/someone/model", "name": "someone/model"})
        elif last == "preupload":
            files = json.loads(body)["files"]
            told = [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in files]
            self.answer({"files": told})
        elif last == "commit":
            assert branch == "main"
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = line["value"]
                    kept = self.repositories["someone/model"]
                    kept[file["path"]] = base64.b64decode(file["content"])
            url = f"{self.address()}/someone/model/commit/1"
            self.answer({"commitUrl": url, "commitOid": "1"})
        else:
            assert self.path == "/api/validate-yaml"
            self.answer({"errors": [], "warnings": []})

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    Hub.repositories, Hub.refuses = {}, "nothing"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        yield Hub
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_model_goes_to_the_hub_with_its_card(run_recipe, hub, tmp_path):
    result = run_recipe("grpo", *TINY, "name=mine")
    assert result["pushed_to"].endswith("/someone/model/commit/1")
    kept, model = hub.repositories["someone/model"], Path(result["output_dir"]) / "model"
    assert kept == {path.name: path.read_bytes() for path in model.iterdir()}
    assert {"README.md", "learning_curve.png", "model.safetensors", "tokenizer.json"} <= kept.keys()
    again = tmp_path / "again"
    again.mkdir()
    for name, content in kept.items():
        (again / name).write_bytes(content)
    AutoModelForCausalLM.from_pretrained(again)

    _, metadata, card = kept["README.md"].decode().split("---\n", 2)
    about = yaml.safe_load(metadata)
    assert about["library_name"] == "transformers"
    assert "base_model" not in about
    (model_index,) = about["model-index"]
    told = {x["type"]: x["value"] for x in model_index["results"][0]["metrics"]}
    assert told["pass@2"] == result["after/pass@2"]
    assert told["reward"] == result["held_out_after"]
    assert f"| reward | {result['held_out_before']:.3f} (" in card
    assert "8 prompts, 2 rollout(s) of each; in brackets 95 % intervals" in card
    command = card.partition("```sh\n")[2].partition("\n")[0]
    assert command.startswith("torchrl-agents grpo debug=tiny logger=none")
    assert "push_to_hub" not in command
    settings = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])
    assert settings["optim"]["learning_rate"] == 1e-3


@pytest.mark.slow
def test_who_may_not_write_there_is_told_at_once_and_a_failed_upload_loses_nothing(
    run_recipe, hub, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    for more in (("seed=1",), ("dry_run=true",)):
        with pytest.raises(SystemExit, match=r"push_to_hub=someone/model: .*Invalid user token"):
            run_recipe("grpo", *TINY, *more)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuses = "create"
    with pytest.raises(SystemExit, match=r"push_to_hub=someone/model: .*403"):
        run_recipe("grpo", *TINY, "seed=2")
    hub.refuses = "commit"
    result = run_recipe("grpo", *TINY, "seed=3")
    assert result["pushed_to"] is None
    log = (Path(result["output_dir"]) / "grpo.log").read_text()
    assert f"Again: hf upload someone/model {result['output_dir']}/model" in log
    assert (Path(result["output_dir"]) / "model/README.md").exists()
