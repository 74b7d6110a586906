"""The command of the training service, before it serves."""

import socket

import pytest

pytest.importorskip("tinker")

from torchrl_agents.training_service.command import main


def test_a_port_that_is_taken_is_refused_before_a_model_is_loaded(tmp_path, capsys):
    """No model is there: it would be refused, too, if it were looked for."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([str(tmp_path / "no model"), "--port", str(port)]) == 2
        told = capsys.readouterr()
        assert f"serve-training: --host 127.0.0.1 --port {port} can't be listened at" in told.err
        assert "Serving" not in told.out
    assert main([str(tmp_path / "no model"), "--port", str(port)]) == 2
    assert "no model" in capsys.readouterr().err
