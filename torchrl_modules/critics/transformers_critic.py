"""A critic over a Transformers model: what the rest of an episode is worth, before each token.

The same model says at the end of a row what all of it is worth: that is a reward model.

Shape legend: B rows, T tokens of a row (ragged), N tokens of all of them, K sampled tokens.
"""

from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.devices import accelerator
from torchrl_data.keys import ASSISTANT_MASK, FULL, STATE_VALUE, TOKENS_FULL
from torchrl_data.missing_entry import missing_entry
from torchrl_data.ragged.packed import set_rows
from torchrl_data.ragged.token_entries import TokenEntries
from torchrl_modules.policies.base import RowsToScore
from torchrl_modules.policies.model_files import local_model
from torchrl_modules.scoring.value_scorer import ValueScorer

from .value_model import load_value_model, value_model_of


class TransformersCritic(ChecksAttributes, TensorDictModuleBase):
    """Says what the rest of an episode is worth before each token that the policy samples.

    Rows are read as a policy's are: packed, and what they begin with in common once. The values of
    a token are those of all that comes before it, in a head of one number that is computed in
    float32. A critic is a reward model, too (:meth:`reward_packed`), and may begin as one.

    Args:
        model: for sequence classification with one label, as TRL's reward models are; or where to
            load one from: a hub id or a folder, of such a model or of a causal language model,
            which gets a head of zeros. See :meth:`of_policy` for one that begins as the policy
            does.
        device: where a model is loaded to; the accelerator, if there is one, when not given.
        dtype: of the parameters of a model that is loaded; float32 when not given.
        autocast_dtype: compute under ``torch.autocast`` of this type, with parameters of float32.
        max_model_len: most tokens of a row; the model's own limit when not given.
        micro_batch_tokens: most tokens of one pass when no gradient is needed.
        compile_layers: see :class:`~torchrl_modules.TransformersWrapper`.
        value_key: the entry that is written.

    Raises:
        TypeError: the model has no head of one number, or ``device`` or ``dtype`` is given beside a
            model that is loaded already.
        ValueError: the model can't be read in rows, or is of a family without such a class.

    See Also:
        Ouyang et al., 2022, arXiv:2203.02155, appendix C.4, for a critic that begins as a reward
        model.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> policy = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> critic = TransformersCritic.of_policy(policy)
        >>> row = TensorDict({("tokens", "full"): torch.tensor([65, 66, 67])})  # [T]
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        >>> critic(lazy_stack([row]))["state_value"].shape  # its head begins as zeros
        torch.Size([1, 3, 1])
    """

    def __init__(
        self,
        model: nn.Module | str,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        autocast_dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        micro_batch_tokens: int | None = None,
        compile_layers: bool | None = None,
        value_key: NestedKey = STATE_VALUE,
    ) -> None:
        super().__init__()
        if isinstance(model, str):
            loaded: Any = load_value_model(local_model(model), dtype=dtype or torch.float32)
            whole: nn.Module = loaded.to(accelerator() if device is None else device)
        elif device is not None or dtype is not None:
            raise TypeError(
                "TransformersCritic: device= and dtype= apply only when the critic loads the "
                f"model, and got a {type(model).__name__}. Pass a hub id or path, or build the "
                "model that way."
            )
        else:
            whole = model
        self.model = whole
        self.scorer = ValueScorer(
            whole,
            micro_batch_tokens=micro_batch_tokens,
            autocast_dtype=autocast_dtype,
            max_model_len=max_model_len,
            compile_layers=compile_layers,
        )
        self.value_key = value_key
        self.in_keys: list[NestedKey] = [TOKENS_FULL, ASSISTANT_MASK]  # pyright: ignore[reportIncompatibleVariableOverride]
        self.out_keys: list[NestedKey] = [value_key]  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def of_policy(
        cls, policy: Any, *, random_head: bool = False, **options: Any
    ) -> "TransformersCritic":
        """Make a critic whose decoder is a copy of a policy's, with a new head.

        Where the configuration of the policy's model names no padding token, that of the copy names
        the tokenizer's: sequence classification can't go without one.

        Args:
            policy: a :class:`~torchrl_modules.TransformersWrapper`.
            random_head: as of :func:`value_model_of`: for a reward model that begins here. The head
                of a critic is 0 at first.
            **options: of the constructor.
        """
        model = value_model_of(policy.model, random_head=random_head)
        config = model.config.get_text_config()
        if config.pad_token_id is None:
            config.pad_token_id = policy.tokenizer.pad_token_id
        return cls(model, **options)

    @property
    def is_distributed(self) -> bool:
        """Return whether other ranks take part in every pass: all have to make equally many."""
        return self.scorer.is_distributed

    def value_packed(self, ids: Tensor, lengths: Tensor, target_mask: Tensor) -> Tensor:
        """See :class:`torchrl_data.ValueNetwork`."""
        return self.scorer.value_packed(ids, lengths, target_mask)

    def reward_packed(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """See :class:`torchrl_data.RewardNetwork`.

        It is what Transformers' class for sequence classification gives of each row.
        """
        return self.scorer.reward_packed(ids, lengths)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the value of the state before each token that the assistant mask marks.

        Args:
            tensordict: ``[B]`` rows with ``("tokens", "full")`` and the assistant mask, ragged, or
                padded beside an attention mask.

        Returns:
            The same TensorDict with ``value_key``, float32 ``[B, T, 1]``, 0 where nothing is
            sampled; NaN in a row that holds a token outside the model's vocabulary.

        Raises:
            MissingEntryError: the tokens or the mask are missing.
            ValueError: the mask has the first token of a row, or entries are not aligned.
        """
        who = self._get_name()
        entries = TokenEntries(tensordict, FULL, who=who)
        masks = entries.aligned(ASSISTANT_MASK)
        if masks is None:
            raise missing_entry(tensordict, ASSISTANT_MASK, who)
        ids = [torch.tensor(row, dtype=torch.int64) for row in entries.ids()]
        size = self.scorer.vocab_size
        known = [bool(((row >= 0) & (row < size)).all()) for row in ids]
        rows = RowsToScore(ids, [mask.bool().cpu() for mask in masks], entries.keep, known)
        values = rows.spread(self.value_packed(*rows.packed()))
        if rows.keep is not None:  # padded: in the columns of the tokens
            values = rows.columns(values).unbind(0)
        set_rows(tensordict, self.value_key, [value.unsqueeze(-1) for value in values])
        return tensordict

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the model as Transformers' class for sequence classification loads it.

        Where it is a reward model, ``policy.encoder.save_pretrained(folder)`` puts the tokenizer
        and the chat template beside it, with which ``RewardModel(folder)`` reads conversations.

        Args:
            folder: is made.
        """
        self.scorer.model.save_pretrained(folder)
