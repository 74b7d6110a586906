"""An engine process with the protocol of the vLLM server and faults on demand; imports no torch.

``python fake_engine.py SOCKET FAULTS``: FAULTS is JSON. A token is drawn from a hash of the seed,
the weights and the tokens before it, one every ``token_s`` seconds.

    {"die_after": 5}   the process ends once it has drawn so many tokens, of all requests together
    {"stop_after": 5}  it stops, as if by SIGSTOP, with its connections open
    {"poison": 7}      a prompt with this token is answered with status 500
    {"garbage": 7}     ... with something that is no generation
    {"nan": 7}         ... with a log-prob that is no number
    {"infinite": 7}    ... with one of minus infinity
    {"positive": 7}    ... with one above 0
    {"die_in_update": true}  it ends before it has taken new weights
    {"stop_in_update": true}  it stops
    {"fail_in_update": true}  it says that it failed in the middle
    {"token_s": 0.01}  seconds a token takes
    {"cold_s": 3}      seconds before the very first one
    {"vocabulary": 400} it says that it has so many token ids
    {"silent": true}   as vLLM before 0.32, it does not say which weights drew a token
    {"plain": "raw"}   it has only the routes of `vllm serve`, and raw log-probs
    {"plain": "processed"}  ... and processed ones
    {"plain": "no"}    ... and takes no token ids
    {"plain": "dev"}   as "raw", with the routes that update, but no worker extension

As vLLM, it drops a connection after status 500, which it does not say.
"""

import hashlib
import json
import os
import signal
import socketserver
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

VOCABULARY = 100
SHAPES = {"a": [4, 3], "b": [3]}
UPDATES = ("/collective_rpc", "/pause", "/weight_info")
REFUSED = {
    "raw": UPDATES,
    "processed": UPDATES,
    "no": (*UPDATES, "/inference/v1/generate"),
}


def this_process():
    with open("/proc/sys/kernel/random/boot_id") as file:
        machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return {"pid": os.getpid(), "machine": machine}


class Engine:
    def __init__(self, faults):
        self.faults = faults
        self.label, self.weights = "default", "first"
        self.num_tokens = 0
        self.running = threading.Event()
        self.running.set()
        self.lock = threading.Lock()

    def count_token(self):
        self.running.wait()
        if self.num_tokens == 0:
            time.sleep(self.faults.get("cold_s", 0))
        time.sleep(self.faults.get("token_s", 0.001))
        with self.lock:
            self.num_tokens += 1
            if self.num_tokens == self.faults.get("die_after"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.num_tokens == self.faults.get("stop_after"):
                os.kill(os.getpid(), signal.SIGSTOP)

    def generate(self, body):
        ids, sampling = body["token_ids"], body["sampling_params"]
        if self.faults.get("poison") in ids:
            return 500, {"error": {"message": "poisoned"}}
        if self.faults.get("garbage") in ids:
            return 200, {"choices": [{"token_ids": "?"}]}
        drawn, spans = [], []
        for position in range(sampling["max_tokens"]):
            self.count_token()
            said = f"{sampling.get('seed')} {self.weights} {ids} {drawn}"
            drawn.append(hashlib.sha256(said.encode()).digest()[0] % VOCABULARY)
            if spans and spans[-1]["version"] == self.label:
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": self.label, "start": position, "end": position + 1})
        log_probs = [{"logprob": -0.5} for _ in drawn]
        if sampling["top_k"] == 1 and self.faults.get("plain") == "processed":
            log_probs = [{"logprob": 0.0} for _ in drawn]
        if self.faults.get("nan") in ids:
            log_probs[-1]["logprob"] = float("nan")
        if self.faults.get("infinite") in ids:
            log_probs[-1]["logprob"] = -float("inf")
        if self.faults.get("positive") in ids:
            log_probs[-1]["logprob"] = 0.25
        choice = {
            "token_ids": drawn,
            "logprobs": {"content": log_probs},
            "weight_versions": spans,
            "finish_reason": "length",
        }
        if self.faults.get("silent"):
            del choice["weight_versions"]
            choice["spans"] = spans  # nobody reads it but a test
        return 200, {"choices": [choice]}

    def rpc(self, method, path=None):
        if method == "torchrl_limits":
            limits = {"vocab_size": self.faults.get("vocabulary", VOCABULARY), "max_model_len": 64}
            said = {"tells_versions": False, "label": self.label}
            return limits | (said if self.faults.get("silent") else {})
        if method == "torchrl_label_weights":
            self.label = path or self.label
            return {"label": self.label}
        if method == "torchrl_process":
            return this_process()
        with open(path, "rb") as file:  # safetensors: length, header, values
            content = file.read()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        if {name: entry["shape"] for name, entry in header.items()} != SHAPES:
            return {"refused": "ValueError: names or shapes"}
        values = struct.unpack(f"<{(len(content) - 8 - length) // 4}f", content[8 + length :])
        if any(value != value for value in values):
            return {"refused": "ValueError: not finite"}
        if self.faults.get("die_in_update"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.faults.get("stop_in_update"):
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # where another thread hears of it first, this one goes on for a moment
        if self.faults.get("fail_in_update"):
            return {"failed": "between two tensors"}
        self.weights = hashlib.sha256(content).hexdigest()
        return {}

    def answer(self, path, body):  # noqa: C901 (one line a route)
        if path == "/v1/models":
            return 200, {"data": [{"max_model_len": 64}]}
        if path in REFUSED.get(self.faults.get("plain"), ()):
            return 404, {"error": {"message": "it has no such route"}}
        if path == "/inference/v1/generate":
            return self.generate(body)
        if path == "/collective_rpc":
            if self.faults.get("plain") == "dev":
                return 500, {"error": {"message": "'Worker' object has no attribute"}}
            return 200, {"results": [self.rpc(body["method"], *body["args"])]}
        if path == "/metrics":
            return 200, f"vllm:generation_tokens_total {self.num_tokens}"
        if path in ("/weight_info", "/update_weight_version") and self.faults.get("silent"):
            return 404, {"error": {"message": "it has no such route"}}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/pause":
            self.running.clear()
        if path == "/resume":
            self.running.set()
        return 200, {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    has_failed = False

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.has_failed:
            self.close_connection = True
            return
        status, answer = self.server.engine.answer(
            urlsplit(self.path).path, json.loads(content) if content else {}
        )
        self.has_failed = status == 500
        text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def get_request(self):
        connection, _ = super().get_request()
        return connection, ("client", 0)


def end_with_parent():
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    server = Server(sys.argv[1], Handler)
    server.engine = Engine(json.loads(sys.argv[2]))
    server.serve_forever(poll_interval=0.05)
