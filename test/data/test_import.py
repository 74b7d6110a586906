"""Importing the package costs nothing, and every public name is there."""

import subprocess
import sys

import pytest

import torchrl_data


def test_every_public_name_is_there():
    for name in torchrl_data.__all__:
        assert getattr(torchrl_data, name) is not None
    assert set(torchrl_data.__all__) <= set(dir(torchrl_data))
    for name in ("History", "ContentBase", "add_chat_template", "ChatHistory", "Text", "Tokens"):
        assert name in torchrl_data.__all__
    for name in ("LogProbs", "Masks", "Conversations", "ConversationEncoder", "keys", "pack"):
        assert name in torchrl_data.__all__


def test_names_are_where_torchrls_documents_have_them():
    code = (
        "import sys; import torchrl_modules.policies, torchrl_envs.transforms; "
        "heavy = set(sys.modules) & {'torch', 'transformers', 'vllm', 'tensordict'}; "
        "assert not heavy, heavy; "
        "from torchrl_data.chat import ContentBase, History, add_chat_template; "
        "from torchrl_modules.policies import ChatHistory, LogProbs, Masks, Text, Tokens; "
        "assert 'transformers' not in sys.modules; "
        "from torchrl_envs.transforms import *; "
        "from torchrl_modules.policies import *; "
        "assert 'vllm' not in sys.modules; "
        "import torchrl_data, torchrl_envs, torchrl_modules; "
        "assert History is torchrl_data.History; assert Tokens is torchrl_data.Tokens; "
        "assert PythonInterpreter is torchrl_envs.PythonInterpreter; "
        "assert vLLMWrapper is torchrl_modules.vLLMWrapper"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="from objectives import TopKRewardSelector"):
        _ = torchrl_data.TopKRewardSelector


def test_importing_loads_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules); import torchrl_data; "
        "new = set(sys.modules) - before; "
        "heavy = new & {'torch', 'transformers', 'tensordict', 'torchrl', 'rich'}; "
        "assert not heavy, heavy; assert len(new) < 60, len(new); "
        "from torchrl_data import History, Conversations, ChatHistory; "
        "assert 'transformers' not in sys.modules; assert 'torchrl' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_public_name_is_in_torchrl_agents_too():
    code = (
        "import sys, torchrl_agents; assert 'torch' not in sys.modules; "
        "from torchrl_agents import ChatEnv, GRPOLoss, History, LLMCollector, vLLMWrapper; "
        "import collectors, objectives, torchrl_data, torchrl_envs, torchrl_modules; "
        "assert GRPOLoss is objectives.GRPOLoss and ChatEnv is torchrl_envs.ChatEnv; "
        "packages = collectors, objectives, torchrl_data, torchrl_envs, torchrl_modules; "
        "missing = {n for p in packages for n in p.__all__} - set(dir(torchrl_agents)); "
        "assert not missing, missing"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(ImportError, match="cannot import name 'GRPOLos'"):
        from torchrl_agents import GRPOLos  # noqa: F401


def test_a_package_of_the_same_name_in_the_users_folder_is_named(tmp_path):
    (tmp_path / "objectives").mkdir()
    (tmp_path / "objectives/__init__.py").write_text("GRPOLoss = None\n")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from torchrl_agents import GRPOLoss"
    command = [sys.executable, "-c", code, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert f"needs its own package objectives, but import finds {tmp_path}" in run.stderr
