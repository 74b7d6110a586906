"""Chats where TorchRL's users look for them: ``from torchrl_data.chat import History``."""

from .content import ContentBase
from .history import History
from .templates.registry import add_chat_template

__all__ = ["ContentBase", "History", "add_chat_template"]
