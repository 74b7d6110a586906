"""Nodes of a job that start servers: how GPUs are shared out, and nodes that do not come."""

import json

import pytest

from torchrl_agents.models.hosted_fleet import hosted_fleet
from torchrl_agents.settings.engine_nodes import ENDED, MARK, shares_of_node
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import EngineConfig

EIGHT = [f"GPU-{i}" for i in range(8)]


def shares(devices=EIGHT, per_node=None, **kwargs):
    engine = EngineConfig(name="vllm", nodes=1, per_node=per_node, engine_kwargs=kwargs)
    return shares_of_node(engine, devices, "n7")


def test_gpus_of_a_node_are_shared_out_by_what_a_server_takes():
    assert shares() == [[name] for name in EIGHT]
    assert shares(tensor_parallel_size=4) == [EIGHT[:4], EIGHT[4:]]
    assert shares(tensor_parallel_size=2, pipeline_parallel_size=2) == [EIGHT[:4], EIGHT[4:]]
    assert shares(tp_size=8) == [EIGHT]
    assert shares(per_node=2) == [EIGHT[:4], EIGHT[4:]]
    assert shares([]) == [None]
    assert shares([], per_node=3) == [None] * 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"per_node": 3}, "engine.per_node=3: the 8 GPUs of n7 are shared out evenly"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size=16: the 8 GPUs of n7"),
        ({"tensor_parallel_size": 3}, "of which each takes 3"),
        ({"per_node": 4, "tensor_parallel_size": 4}, "per_node=4 and .*tensor_parallel_size=4: "),
        ({"per_node": 2, "tensor_parallel_size": 2}, "per_node=2 and .*tensor_parallel_size=2: "),
    ],
)
def test_servers_that_do_not_fit_on_a_node_or_leave_gpus_over_are_refused(settings, words):
    with pytest.raises(SettingsError, match=words):
        shares(**settings)


@pytest.mark.parametrize(
    ("more", "words"),
    [([ENDED], "their step of the job has ended"), ([], "did not say so within 0 s")],
)
def test_nodes_that_do_not_come_are_named(tmp_path, monkeypatch, more, words):
    said = MARK + json.dumps({"node": "n2", "port": 1, "devices": []})
    (tmp_path / "hosts").write_text("\n".join(["a prologue's words", said, *more, ""]))
    monkeypatch.setenv("TORCHRL_ENGINE_HOSTS", str(tmp_path / "hosts"))
    monkeypatch.setenv("TORCHRL_ENGINE_NODES", "n1,n2,n3")
    with pytest.raises(RuntimeError, match=f"^n1, n3: no servers can be started there.*{words}"):
        hosted_fleet("model", EngineConfig(name="vllm", nodes=3), own=print, wait_s=0.2)
