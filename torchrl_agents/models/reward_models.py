"""The reward model that a recipe trains: of a language model, with a head that gives a number."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.settings.schema import TrainingConfig
from torchrl_data.positions import num_positions
from torchrl_data.pretrained import load_pretrained
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs.tasks.task import Task
from torchrl_modules import TransformersCritic, load_value_model
from torchrl_modules.critics.value_model import check_value_config
from torchrl_modules.policies.loading import has_value_head

from .loading import load_model, place_of
from .sources import model_source, name_of_model


class ChatRewardModel(TransformersCritic):
    """A reward model with the tokenizer and the chat template by which it reads conversations.

    Args:
        model: for sequence classification with one label, in wrappers or not.
        tokenizer: of it.
        chat_template_name: a built-in template instead of the tokenizer's.
        max_model_len: most tokens of a conversation; the model's own limit when not given.
        **options: of :class:`~torchrl_modules.TransformersCritic`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template_name: str | None = None,
        max_model_len: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, max_model_len=max_model_len, **options)
        self.encoder = ConversationEncoder(tokenizer, chat_template_name=chat_template_name)
        """With the chat template."""
        self.tokenizer = tokenizer
        """Of the model."""
        own = num_positions(self.scorer.model)
        if max_model_len is not None and own is not None and max_model_len > own:
            raise ValueError(
                f"policy.max_model_len={max_model_len}, but {type(self.scorer.model).__name__} has "
                f"positions for {own} tokens."
            )
        self.max_model_len = max_model_len or own
        """Most tokens of a conversation."""


def load_reward_model(cfg: TrainingConfig, task: Task) -> ChatRewardModel:
    """Load the model that is trained: a reward model goes on, and another one gets a new head.

    Args:
        cfg: the settings. The seed decides the head, which begins as random numbers.
        task: for the embedded model.

    Raises:
        SettingsError: there is no such model, or it can't be a reward model.
    """
    torch.manual_seed(cfg.seed)
    with model_source(cfg, task) as source:
        with refusing(name_of_model(cfg), foreign=True):
            check_beginning(cfg, load_pretrained(AutoConfig, source, **place_of(cfg.policy)))
        model, tokenizer = load_model(cfg.policy, source, load=_with_head)
    config: Any = model.config.get_text_config()
    if config.pad_token_id is None:  # sequence classification can't go without one
        own = tokenizer.pad_token_id
        config.pad_token_id = tokenizer.eos_token_id if own is None else own
    return reward_model_over(cfg, model, tokenizer)


def _with_head(path: str, auto: Any, **arguments: Any) -> Any:
    del auto  # the configuration says which
    return load_value_model(path, random_head=True, **arguments)


def check_beginning(cfg: TrainingConfig, config: Any) -> None:
    """Check that a model can be trained, or tested, as a reward model, by its configuration.

    Args:
        cfg: the settings.
        config: of the model.

    Raises:
        SettingsError: it can't.
    """
    with refusing(name_of_model(cfg)):
        check_value_config(config, who="it")
    if cfg.train.num_steps == 0 and not has_value_head(config):
        raise SettingsError(
            f"train.num_steps=0 tests a reward model, and {name_of_model(cfg)} is none: it has no "
            "head that gives a number. Give policy.model= one, such as the folder of a run of "
            "reward, or train.num_steps."
        )


def reward_model_over(
    cfg: TrainingConfig, model: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> ChatRewardModel:
    """A reward model over a model that is there, as the settings say.

    Args:
        cfg: the settings.
        model: with its wrappers.
        tokenizer: of it.

    Raises:
        SettingsError: the model can't be used so.
    """
    with refusing(f"{name_of_model(cfg)} can't be used so"):
        return ChatRewardModel(
            model,
            tokenizer,
            chat_template_name=cfg.policy.chat_template_name,
            **network_options(cfg),
        )


def network_options(cfg: TrainingConfig) -> dict[str, Any]:
    """Return how a model with a head of one number is read, as the settings say."""
    return {
        "autocast_dtype": torch.bfloat16 if cfg.train.autocast else None,
        "max_model_len": cfg.policy.max_model_len,
        "compile_layers": cfg.train.compile_layers,
    }
