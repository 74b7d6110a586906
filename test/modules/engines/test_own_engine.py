"""The engine of ``examples/engines/sglang_engine.py``, over a server that speaks SGLang's protocol.

The server draws with a real model: tokens, log-probabilities and weights are those of Transformers.
"""

import importlib.util
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from collectors import LLMCollector, StreamingCollector
from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions, StepCounter
from torchrl_modules import (
    LLMWrapperBase,
    SamplingParameters,
    TransformersEngine,
    TransformersWrapper,
)

PATH = Path(__file__).parents[3] / "examples/engines/sglang_engine.py"


@pytest.fixture
def sglang(make_tiny_model):
    """A server, and the requests that it had."""
    model, seen = make_tiny_model(0), []
    engine, lock = TransformersEngine(model), threading.Lock()

    def draw(ids, sampling):
        params = SamplingParameters(
            temperature=sampling["temperature"],
            max_new_tokens=sampling["max_new_tokens"],
            stop_token_ids=tuple(sampling["stop_token_ids"]),
        )
        (row,) = engine.generate([ids], params)
        drawn = [
            [log_prob, token, None] for log_prob, token in zip(row.log_probs, row.ids, strict=True)
        ]
        reason = {"type": row.finish_reason}
        return {
            "output_ids": row.ids,
            "meta_info": {"output_token_logprobs": drawn, "finish_reason": reason},
        }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            with lock:
                if self.path == "/generate":
                    answer = list(map(draw, body["input_ids"], body["sampling_params"]))
                else:
                    folder = Path(body["model_path"])
                    assert (folder / "config.json").is_file()
                    engine.update_weights(load_file(folder / "model.safetensors"))
                    answer = {"success": True, "message": ""}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


@pytest.fixture
def engine(sglang, make_tiny_model, tmp_path):
    spec = importlib.util.spec_from_file_location("sglang_engine", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make_tiny_model(0).save_pretrained(tmp_path)
    made = module.SGLangEngine(sglang[0], str(tmp_path), max_model_len=64)
    yield made
    made.close()


@pytest.mark.parametrize("collect", [LLMCollector, StreamingCollector])
def test_rows_of_an_own_engine_are_what_the_model_gives(
    collect, engine, sglang, make_tiny_model, chatml_tokenizer
):
    env = ChatEnv(batch_size=(4,)).append_transform(
        DataLoadingPrimer([{"prompt": "question"}, {"prompt": "another"}], group_size=2)
    )
    env = env.append_transform(RewardFunctions([lambda completions: [1.0] * len(completions)]))
    env = env.append_transform(StepCounter(max_steps=1))
    policy = LLMWrapperBase(
        engine, tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 6}
    )
    trained = make_tiny_model(1)
    with collect(env, policy) as collector:
        for version, model in enumerate((make_tiny_model(0), trained)):
            rows = collector.collect().unbind(0)
            scorer = TransformersWrapper(model, tokenizer=chatml_tokenizer, generate=False)
            for row in rows if version == 0 or collect is LLMCollector else ():
                mask = row["masks", "all_assistant_mask"]
                ids = row["tokens", "full"]
                scored = scorer.score_packed(ids, torch.tensor([len(ids)]), mask).log_prob
                torch.testing.assert_close(row["log_probs", "full"][mask], scored.detach())
            waits = {} if collect is LLMCollector else {"wait": True}
            collector.update_policy_weights_(trained, **waits)
            assert collector.policy_version == version + 1
    paths = [path for path, _ in sglang[1]]
    assert paths.count("/update_weights_from_disk") == 2
    assert paths.count("/generate") > 1


def test_what_it_can_not_serve_is_told(engine, sglang, chatml_tokenizer):
    params = SamplingParameters(max_new_tokens=4, stop_token_ids=())
    empty, good, long = engine.generate([[], [5, 6], [5] * 64], params)
    assert empty.error == "The prompt is empty."
    assert len(good.ids) == 4
    assert "leaves no room for a response: max_model_len is 64" in long.error
    assert len(sglang[1]) == 1
    with pytest.raises(ValueError, match="its log-probs are the model's own"):
        LLMWrapperBase(engine, tokenizer=chatml_tokenizer, generate_kwargs={"top_p": 0.9})
