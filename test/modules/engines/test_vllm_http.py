"""JSON over HTTP: idle connections, dead servers and slow ones."""

import json
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from torchrl_modules.vllm.json_client import JSONClient


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 0.2  # closes a connection that is idle for so long

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/where"):
            body = json.dumps(self.path).encode()
        if self.path.endswith("/slow"):
            time.sleep(0.5)
        if self.path == "/empty":
            body = b""
        if self.path == "/text":
            body = b"no JSON"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def make_client(url, timeout_s=5.0):
    return JSONClient(url, timeout_s)


def test_a_connection_that_the_server_closed_while_idle_is_opened_anew(url):
    client = make_client(url)
    assert client.request("POST", "/", {"a": 1}) == (200, {"a": 1})
    time.sleep(0.4)
    assert client.request("POST", "/", {"a": 2}) == (200, {"a": 2})
    client.close()


@pytest.mark.parametrize(("path", "answer"), [("/empty", None), ("/text", "no JSON")])
def test_answers_that_are_no_json(url, path, answer):
    client = make_client(url)
    assert client.request("POST", path, []) == (200, answer)
    client.close()


def test_no_server_and_a_slow_one_are_connection_errors(url):
    with pytest.raises(ConnectionError, match=r"No answer from http://127\.0\.0\.1:1:"):
        make_client("http://127.0.0.1:1").request("GET", "/")
    client = make_client(url, timeout_s=0.1)
    with pytest.raises(ConnectionError, match="timed out"):
        client.request("POST", "/slow", json.dumps(1))
    client.close()


@pytest.mark.usefixtures("no_leaks")
def test_a_server_behind_tls_and_a_path(tmp_path, monkeypatch):
    """Its certificate is verified, a path before /v1 is kept, and a request can be interrupted."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    begin, local = datetime.now(UTC) - timedelta(days=1), ip_address("127.0.0.1")
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    made = made.public_key(key.public_key()).serial_number(1)
    made = made.not_valid_before(begin).not_valid_after(begin + timedelta(days=2))
    alternative = x509.SubjectAlternativeName([x509.IPAddress(local)])
    made = made.add_extension(alternative, critical=True).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (tmp_path / "both").write_bytes(secret + made.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both")
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        client = make_client(f"https://127.0.0.1:{server.server_port}/engine/v1/")
        with pytest.raises(ConnectionError, match="certificate verify failed"):
            client.request("POST", "/where")
        client.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "both"))
        client = make_client(f"https://127.0.0.1:{server.server_port}/engine/v1/")
        assert client.request("POST", "/where") == (200, "/engine/where")
        threading.Timer(0.1, client.interrupt).start()
        with pytest.raises(ConnectionError, match="No answer"):
            client.request("POST", "/slow", 1)
        with pytest.raises(ConnectionError, match="the client is closed"):
            client.request("POST", "/where")
        client.close()
        client.close()
        server.shutdown()
        thread.join()


def test_another_kind_of_url_is_refused():
    with pytest.raises(ValueError, match="unix://"):
        make_client("ftp://somewhere")


@pytest.mark.usefixtures("no_leaks")
def test_nothing_is_opened_once_it_is_closed(url):
    """A watch may be about to ask while its engine is closed; nobody would close its connection."""
    client = make_client(url)
    assert client.request("POST", "/empty") == (200, None)
    client.close()
    with pytest.raises(ConnectionError, match="the client is closed"):
        client.request("POST", "/empty")
