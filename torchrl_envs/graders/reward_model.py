"""Rewards of a model that was trained to give them: a sequence classifier of Transformers."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchrl_data.checks import check_counts
from torchrl_data.devices import accelerator
from torchrl_data.messages import Message
from torchrl_data.positions import num_positions
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
        load: whether the weights of a model that is named are loaded now. Otherwise its
            configuration, tokenizer and template are checked now, and the weights are loaded by
            :meth:`load`, or with the first conversations.

    Raises:
        TypeError: the model is an object, and no tokenizer or a device is given, or ``load=False``.
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
        load: bool = True,
    ) -> None:
        self._model: Any = None
        self._lock = threading.Lock()
        self.source: str | None = None
        """Where the model is loaded from: a hub id or a folder; ``None`` of one that was given."""
        self._device = device
        if isinstance(model, str):
            self.source = _source_of(model)
            tokenizer = _looked_up(self.source, tokenizer)
        elif device is not None or not load:
            given = "load=False" if device is None else "device="
            raise TypeError(f"RewardModel: {given} is for a model that is loaded here. Move yours.")
        if tokenizer is None:
            raise TypeError("RewardModel needs the tokenizer of the model.")
        check_counts("RewardModel", batch_size=batch_size)
        self.batch_size = batch_size
        self._encoder = ConversationEncoder(tokenizer, chat_template_name=chat_template_name)
        if self.source is None:
            self._take(model)
        elif load:
            self.load()

    @property
    def model(self) -> Any:
        """The classifier, which is loaded if it was not yet."""
        self.load()
        return self._model

    def load(self, device: torch.device | str | None = None) -> None:
        """Load the weights, if they were not yet.

        Args:
            device: where to, if the constructor was given no device; then the accelerator, if there
                is one, when not given.

        Raises:
            ValueError: the files lack some.
        """
        with self._lock:
            if self._model is None:
                assert self.source is not None
                own = device if self._device is None else self._device
                self._take(_load(self.source).to(accelerator() if own is None else own))

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process loads the weights itself, where they are in files."""
        own = {"_lock": None} | ({} if self.source is None else {"_model": None})
        return {**self.__dict__, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_lock": threading.Lock()})

    def _take(self, model: Any) -> None:
        """Score with a model that has its weights."""
        _check_labels(model.config)
        # The model finds the last token by its own pad token; a mask says where the padding is.
        config = model.config.get_text_config()
        if config.pad_token_id is None:
            config.pad_token_id = self._encoder.tokenizer.pad_token_id or 0
        self._pad: Any = config.pad_token_id
        self._longest = num_positions(model)
        self._model = model.eval()

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Sequence[Message]],
        completions: Sequence[Sequence[Message]],
        **_: Any,
    ) -> list[float | ValueError]:
        """Score conversations.

        Args:
            prompts: messages before the policy's first turn, per rollout.
            completions: the messages after.

        Returns:
            A reward of each; an error of one that has more tokens than the model has positions for.
        """
        model = self.model
        chats = [[*a, *b] for a, b in zip(prompts, completions, strict=True)]
        rows = [torch.tensor(encoded.ids) for encoded in self._encoder.encode_chats(chats)]
        longest = self._longest
        rewards: dict[int, float | ValueError] = {
            i: ValueError(f"it has {len(row)} tokens, and the reward model takes {longest}")
            for i, row in enumerate(rows)
            if longest is not None and len(row) > longest
        }
        read = [i for i in range(len(rows)) if i not in rewards]
        order = sorted(read, key=lambda i: len(rows[i]))
        for start in range(0, len(order), self.batch_size):
            part = order[start : start + self.batch_size]
            ids = pad([rows[i] for i in part], value=self._pad).to(model.device)
            mask = pad([torch.ones_like(rows[i]) for i in part], value=0).to(ids.device)
            logits = model(input_ids=ids, attention_mask=mask).logits
            rewards.update(zip(part, logits.squeeze(-1).float().tolist(), strict=True))
        return [rewards[i] for i in range(len(rows))]


def _source_of(source: str) -> str:
    """Hub id, or the folder of the model where the folder of a run is given."""
    folder = Path(source)
    if not folder.is_dir():
        return source
    folder = folder / "model" if (folder / "model").is_dir() else folder
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"RewardModel: the folder {source!r} has no config.json, so it holds no model. "
            "Give the folder of a reward model, or of a run of the recipe reward that is over."
        )
    return str(folder)


def _check_labels(config: Any) -> None:
    if config.num_labels != 1:
        raise ValueError(
            f"RewardModel takes a model with one label, got {config.num_labels} labels. It must "
            "be trained as a sequence classifier that gives one number."
        )


def _looked_up(source: str, tokenizer: Any) -> Any:
    """The tokenizer of a model that a hub id or a folder names, where none is given.

    Raises:
        ValueError: the model's configuration is that of no reward model.
    """
    _check_labels(_read("AutoConfig", source))
    return tokenizer or _read("AutoTokenizer", source)


def _load(source: str) -> Any:
    """A sequence classifier with its weights."""
    kind = "AutoModelForSequenceClassification"
    model, found = _read(kind, source, output_loading_info=True)
    if found["missing_keys"]:
        raise ValueError(
            f"RewardModel: the files of {source!r} lack the weights "
            f"{sorted(found['missing_keys'])}, which would be random numbers. It must be "
            "trained as a sequence classifier."
        )
    return model


def _read(kind: str, source: str, **options: Any) -> Any:
    """What a loader of Transformers gives, by its name."""
    import transformers

    return load_pretrained(getattr(transformers, kind), source, **options)
