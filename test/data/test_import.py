"""Importing the package costs nothing, and every public name is there."""

import subprocess
import sys

import torchrl_data


def test_every_public_name_is_there():
    for name in torchrl_data.__all__:
        assert getattr(torchrl_data, name) is not None
    assert set(torchrl_data.__all__) <= set(dir(torchrl_data))
    for name in ("History", "ContentBase", "add_chat_template", "ChatHistory", "Text", "Tokens"):
        assert name in torchrl_data.__all__
    for name in ("LogProbs", "Masks", "Conversations", "ConversationEncoder", "keys", "pack"):
        assert name in torchrl_data.__all__


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
