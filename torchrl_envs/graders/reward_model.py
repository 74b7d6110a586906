"""Rewards of a model that was trained to give them: a sequence classifier of Transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchrl_data.checks import check_counts
from torchrl_data.devices import accelerator
from torchrl_data.messages import Message
from torchrl_data.pretrained import load_pretrained
from torchrl_data.ragged.packed import pad
from torchrl_data.templates.encoder import ConversationEncoder


class RewardModel:
    """Scores whole conversations with a sequence classifier with one label.

    Use it as a reward function: ``RewardFunctions([RewardModel(model, tokenizer)])``.

    Args:
        model: a sequence classifier, or a hub id or local path to load one from, such as the folder
            of a run of the recipe ``reward``.
        tokenizer: a fast one with a chat template; loaded beside the model when that is a string.
        chat_template_name: a built-in template instead of the tokenizer's.
        batch_size: most conversations of one pass, in order of their length.
        device: where a model is loaded to; the accelerator, if there is one, when not given.

    Raises:
        TypeError: the model is an object, and no tokenizer or a device is given.
        ValueError: there is no model in the folder, it has several labels, its files lack weights,
            or the batch size is not positive.

    Example:
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> from transformers import Qwen3ForSequenceClassification
        >>> config = tiny_qwen3(len(tokenizer)).config
        >>> config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
        >>> model = Qwen3ForSequenceClassification(config)  # or a hub id
        >>> grader = RewardFunctions([RewardModel(model, tokenizer)])
        >>> grader.reward_names
        ['RewardModel']
    """

    needs_messages = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        chat_template_name: str | None = None,
        batch_size: int = 16,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(model, str):
            model, loaded = _load(model)
            model = model.to(accelerator() if device is None else device)
            tokenizer = tokenizer or loaded
        elif device is not None:
            raise TypeError("RewardModel: device= is for a model that is loaded here. Move yours.")
        if tokenizer is None:
            raise TypeError("RewardModel needs the tokenizer of the model.")
        check_counts("RewardModel", batch_size=batch_size)
        if model.config.num_labels != 1:
            labels = f"{model.config.num_labels} labels"
            raise ValueError(f"RewardModel takes a model with one label, got {labels}.")
        self.model = model.eval()
        self.batch_size = batch_size
        self._encoder = ConversationEncoder(tokenizer, chat_template_name=chat_template_name)
        # The model finds the last token by its own pad token; a mask says where the padding is.
        config = model.config.get_text_config()
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id or 0
        self._pad = config.pad_token_id

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Sequence[Message]],
        completions: Sequence[Sequence[Message]],
        **_: Any,
    ) -> list[float]:
        """Score conversations.

        Args:
            prompts: messages before the policy's first turn, per rollout.
            completions: the messages after.
        """
        chats = [[*a, *b] for a, b in zip(prompts, completions, strict=True)]
        rows = [torch.tensor(encoded.ids) for encoded in self._encoder.encode_chats(chats)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        rewards = [0.0] * len(rows)
        for start in range(0, len(order), self.batch_size):
            part = order[start : start + self.batch_size]
            ids = pad([rows[i] for i in part], value=self._pad).to(self.model.device)
            mask = pad([torch.ones_like(rows[i]) for i in part], value=0).to(ids.device)
            logits = self.model(input_ids=ids, attention_mask=mask).logits
            for i, value in zip(part, logits.squeeze(-1).float().tolist(), strict=True):
                rewards[i] = value
        return rewards


def _load(source: str) -> tuple[Any, Any]:
    """A sequence classifier, from a hub id, a folder or the folder of a run, and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = Path(source)
    if folder.is_dir():
        folder = folder / "model" if (folder / "model").is_dir() else folder
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"RewardModel: the folder {source!r} has no config.json, so it holds no model. "
                "Give the folder of a reward model, or of a run of the recipe reward that is over."
            )
        source = str(folder)
    auto: Any = AutoModelForSequenceClassification
    model, found = load_pretrained(auto, source, output_loading_info=True)
    if found["missing_keys"]:
        raise ValueError(
            f"RewardModel: the files of {source!r} lack the weights "
            f"{sorted(found['missing_keys'])}, which would be random numbers. It must be "
            "trained as a sequence classifier."
        )
    return model, load_pretrained(AutoTokenizer, source)
