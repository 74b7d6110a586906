"""Rewards of a model that was trained to give them: a sequence classifier of Transformers."""

from collections.abc import Sequence
from typing import Any

import torch

from torchrl_data.checks import check_counts
from torchrl_data.messages import Message
from torchrl_data.pretrained import load_pretrained
from torchrl_data.ragged.packed import pad
from torchrl_data.templates.encoder import ConversationEncoder


class RewardModel:
    """Scores whole conversations with a sequence classifier with one label.

    Use it as a reward function: ``RewardFunctions([RewardModel(model, tokenizer)])``.

    Args:
        model: a sequence classifier, or a hub id or local path to load one from.
        tokenizer: a fast one with a chat template; loaded beside the model when that is a string.
        chat_template_name: a built-in template instead of the tokenizer's.
        batch_size: most conversations of one pass, in order of their length.

    Raises:
        TypeError: the model is an object and no tokenizer is given.
        ValueError: the model has several labels, its files lack weights, or the batch size is not
            positive.

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
    ) -> None:
        if isinstance(model, str):
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            tokenizer = tokenizer or load_pretrained(AutoTokenizer, model)
            path, auto = model, AutoModelForSequenceClassification
            model, found = load_pretrained(auto, path, output_loading_info=True)
            if found["missing_keys"]:
                raise ValueError(
                    f"RewardModel: the files of {path!r} lack the weights "
                    f"{sorted(found['missing_keys'])}, which would be random numbers. It must be "
                    "trained as a sequence classifier."
                )
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
