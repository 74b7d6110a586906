"""Chats where TorchRL's users look for them: ``from torchrl_data.chat import History``."""

from .history import ContentBase, History
from .templates.template import add_chat_template

__all__ = ["ContentBase", "History", "add_chat_template"]
