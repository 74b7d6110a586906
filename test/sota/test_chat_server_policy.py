"""A server of OpenAI's protocol as the policy of an evaluation: what it says, and how it fails."""

import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from torchrl_agents.models.chat_server_policy import ChatServerPolicy
from torchrl_data.conversation import Conversations

CALL = {"name": "add", "arguments": '{"a": 1, "b": '}  # as a small model writes it
ANSWERS = {
    "cut call": {"message": {"content": None, "tool_calls": [{"id": "1", "function": CALL}]}},
    "stopped": {"message": {"content": "4"}, "stop_reason": "</answer>"},
}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["messages"][-1]["content"]
        if asked == "slow":
            time.sleep(1.0)  # each time that it is tried
        status = {"no key": 401, "slow": 500}.get(asked, 200)
        choice = {"index": 0, "finish_reason": "stop", **ANSWERS.get(asked, {})}
        data = json.dumps({"choices": [choice]} if status == 200 else {}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(BrokenPipeError):  # who asked has left
            self.wfile.write(data)

    def log_message(self, *_):  # type: ignore[override]
        pass


@pytest.fixture
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as httpd:
        threading.Thread(target=httpd.serve_forever).start()
        yield f"http://127.0.0.1:{httpd.server_port}/v1"
        httpd.shutdown()


def test_what_it_says_is_kept_as_it_is_and_each_failure_says_what_to_do(url, chatml_tokenizer):
    policy = ChatServerPolicy(
        url, "m", timeout_s=1.5, tokenizer=chatml_tokenizer, chat_template_name="qwen"
    )
    asked = ["cut call", "stopped", "slow", "no key"]
    chats = [[{"role": "user", "content": text}] for text in asked]
    begin_s = time.monotonic()
    _, after, reasons = policy.respond(Conversations.from_messages(chats))
    assert time.monotonic() - begin_s < 4.0
    # Arguments that are no JSON are the model's fault, which the tool's parser tells it.
    said = chatml_tokenizer.decode(after.ids(0))
    assert f'"arguments": {CALL["arguments"]}' in said
    assert after.messages(1)[-1]["content"] == "4</answer>"
    assert reasons[:2] == ["stop", "stop"]
    assert reasons[2].startswith(f"error: {url}, model 'm': no answer within 1.5 s (+engine.")
    assert reasons[3].endswith("OPENAI_API_KEY of the environment has to be the server's key.")
