"""Base of the losses over tokens: read a batch once, score its trained tokens, reduce.

Shape legend: B rows, N tokens of all of them, K trained tokens.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Concatenate, Final, Generic, ParamSpec, TypeVar

import torch
from tensordict import NestedKey, TensorClass, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from objectives import functional as F
from objectives.batching.loss_keys import TokenKeys
from objectives.batching.masking_strategy import MaskingStrategy, resolve_masking_strategy
from objectives.batching.packed_batch import (
    Entries,
    PackedBatch,
    pack_batch,
)
from objectives.batching.ranks import Ranks
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_names, check_type
from torchrl_data.missing_entry import MissingEntryError
from torchrl_data.token_scorer import (
    TokenScorer,
    TokenScores,
    agent_arguments,
    check_scorer,
    expert_arguments,
    image_arguments,
    mask_arguments,
)
from torchrl_data.value_network import RewardNetwork, ValueNetwork

from .loss_output import Output
from .token_options import TokenOptions
from .window import Window

Arguments = ParamSpec("Arguments")
Keys = TypeVar("Keys", bound=TokenKeys)
_LOG: Final = logging.getLogger(__name__)


def scorer_device(actor: object) -> torch.device | None:
    """Return where an actor's parameters are; None when it has none to show."""
    if not isinstance(actor, torch.nn.Module):
        return None
    first = next(actor.parameters(), None)
    return None if first is None else first.device


def takes(
    record: Callable[Arguments, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Arguments], None]]:
    """Make a constructor show the fields of a record as its arguments, in place of ``**settings``.

    Args:
        record: a data class with a field for each argument.
    """

    def declare(init: Callable[..., None]) -> Callable[Concatenate[Any, Arguments], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        shown = inspect.signature(record).parameters.values()
        setattr(init, "__signature__", inspect.Signature([own, *shown]))  # noqa: B010
        return init

    return declare


class TokenLoss(ChecksAttributes, TensorDictModuleBase, Generic[Keys, Output]):
    """Base of the losses that train tokens of packed sequences.

    A batch can be read once and trained in parts, as often as wanted::

        packed = loss.pack(buffer[:])
        window = loss.measure_window(packed)
        for part in packed.micro_batches(max_tokens=8192):
            loss(part, window=window).total().backward()

    Every option is an attribute, which may be set at any time: ``loss.kl_to_ref_coeff = 0.01``. It
    is checked as at construction, and the loss is then what a new one with it would be. Several at
    once: ``loss.options = dataclasses.replace(loss.options, ...)``.

    Args:
        network: scores packed tokens (:class:`~torchrl_data.TokenScorer`), or is a critic
            or a reward model; it becomes the attribute ``network_name``.
        settings: options by name.
        options: what ``settings`` are added to.
        read: names of the batch entries to read; the usual ones when not given.
        allow_empty: a batch without a trained token has loss 0; otherwise it raises.

    Raises:
        TypeError: the actor cannot score, or settings are of another class.
        ValueError: an option is unknown, out of range, or cannot take effect with the others.
        AttributeError: there is no option of the name that is set.
    """

    option_type: ClassVar[type[TokenOptions]]
    """Class of its options."""
    preset: ClassVar[Mapping[str, Any]] = {}
    """Options that a subclass sets itself."""
    key_type: ClassVar[type[TokenKeys]] = TokenKeys
    """Class of its entry names."""
    output_type: ClassVar[type[TensorClass]]
    """Class of what it gives back."""
    network_name: ClassVar[str] = "actor_network"
    """Attribute of the model whose tokens are trained."""
    takes_own_temperature: ClassVar[bool] = False
    """Without a temperature it takes the actor's own."""
    changeable = frozenset({"allow_empty"})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        shown = None  # a constructor of its own shows itself
        if "__init__" not in vars(cls):
            _, *arguments = inspect.signature(cls.__init__).parameters.values()
            preset = cls.preset
            shown = inspect.Signature(
                [each.replace(default=preset.get(each.name, each.default)) for each in arguments]
            )
        cls.__signature__ = shown

    def __init__(
        self,
        network: TokenScorer | ValueNetwork | RewardNetwork,
        settings: Mapping[str, Any],
        *,
        options: TokenOptions | None = None,
        read: Keys | None,
        allow_empty: bool,
    ) -> None:
        super().__init__()
        self._made_options(options, settings)  # what is wrong with them is told first
        self._check_network(network)
        keys: Any = self.key_type() if read is None else read
        check_type("read", keys, self.key_type)
        setattr(self, self.network_name, network)
        self.read: Keys = keys
        self.allow_empty = allow_empty
        self.on_scores: Callable[[PackedBatch, TokenScores], None] | None = None
        """Told of the scores of trained tokens, detached, whenever they were computed."""
        self._num_empty: Counter[str] = Counter()
        self._configure(options, settings)

    def _check_network(self, network: object) -> None:
        check_scorer(self._get_name(), network)

    # Options ------------------------------------------------------------------------------------

    @property
    def options(self) -> Any:
        """All options as one record, which can be set as a whole."""
        return self._options

    @options.setter
    def options(self, options: TokenOptions) -> None:
        check_type("options", options, self.option_type, who=self._get_name())
        self._configure(options, {})

    def _made_options(
        self, options: TokenOptions | None, settings: Mapping[str, Any]
    ) -> TokenOptions:
        """The record of settings by name, added to another one or to what the class presets."""
        who = self._get_name()
        check_names(who, settings, [field.name for field in fields(self.option_type)])
        if options is None:
            return self.option_type(**{**self._preset_beside(settings), **settings})
        check_type("options", options, self.option_type, who=who)
        if self.preset:
            raise ValueError(
                f"{who} has options of its own ({dict(self.preset)}), which a record would "
                "replace: give single options here, or options= to the class that it comes from."
            )
        return replace(options, **settings)

    def _preset_beside(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the class presets, as far as it goes with the settings that are given."""
        del settings
        return self.preset

    def _configure(self, options: TokenOptions | None, settings: Mapping[str, Any]) -> None:
        """Take options, all or, where they are refused, none."""
        made = self._made_options(options, settings)
        if made.temperature is None and not self.takes_own_temperature:
            raise ValueError("temperature must be a positive number, got None.")
        # What was given, so that an option that is set later meets what a constructor would.
        self._options, self._given = made, (options, dict(settings))
        self._options_changed()

    def _options_changed(self) -> None:
        """Make what follows from the options."""
        self._aggregation: F.Aggregation = self._options.named_aggregation
        self._masking_strategy: MaskingStrategy = resolve_masking_strategy(
            self._options.masking_strategy
        )
        entries = self._entries().required.values()
        self.in_keys: list[NestedKey] = [self.read.tokens, self.read.assistant_mask, *entries]  # pyright: ignore[reportIncompatibleVariableOverride]
        self.out_keys = sorted(self.output_type.__annotations__)

    def __getattr__(self, name: str) -> Any:
        if name in _option_names(type(self)):
            return getattr(self.options, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _option_names(type(self)):
            options, settings = self._given
            self._configure(options, {**settings, name: value})
        elif name == self.network_name and name in self._modules | vars(self):
            self._check_network(value)
            TensorDictModuleBase.__setattr__(self, name, value)
        elif name == "read" and "read" in vars(self):
            check_type("read", value, self.key_type, who=self._get_name())
            TensorDictModuleBase.__setattr__(self, name, value)
            self._options_changed()
        else:
            super().__setattr__(name, value)

    @property
    def aggregation(self) -> F.Aggregation:
        """Name of how values of tokens become one number."""
        return self._aggregation

    @property
    def masking_strategy(self) -> MaskingStrategy:
        """Name of the tokens that are trained."""
        return self._masking_strategy

    @property
    def temperature(self) -> float:
        """Divisor of the logits."""
        given = self._options.temperature
        if given is not None:
            return given
        return float(getattr(self.actor_network, "temperature", 1.0)) or 1.0

    # Batches ------------------------------------------------------------------------------------

    def _entries(self) -> Entries:
        """Return what is read beside tokens and masks, by the fields of ``read``."""
        raise NotImplementedError

    def pack(
        self,
        batch: TensorDictBase | PackedBatch,
        *,
        also: Sequence[TokenLoss[Any, Any]] = (),
    ) -> PackedBatch:
        """Read what the loss needs of a batch, without padding.

        Args:
            batch: ``[B]``, ragged (a lazy stack of rows, what ``LazyStackStorage`` gives) or
                padded ``[B, T]`` with an attention mask; the entries of ``read``.
            also: further losses that train the same tokens, such as that of the critic: what they
                read is packed, too, so that they take the parts of this batch.

        Returns:
            The packed batch, on the host; one that is packed already as it is, with the tokens that
            were to be trained when it was packed.

        Raises:
            MissingEntryError: an entry is missing, also of a batch that was packed before an
                option was set that reads it.
            TypeError: the batch is no TensorDict.
            ValueError: entries are not aligned with the tokens, or the batch is not ``[B]``.
        """
        if isinstance(batch, PackedBatch):
            wanted = self._entries().required
            if missing := [name for name in wanted if name not in batch.entries]:
                raise MissingEntryError(
                    f"{self._get_name()} needs {missing}, which the packed batch lacks: it was "
                    "packed for other options. Pack the rows again: loss.pack(rows)."
                )
            return batch
        wanted = self._entries()
        for other in also:
            if other.masking_strategy != self.masking_strategy:
                raise ValueError(
                    f"{self._get_name()}: also= is for losses that train the same tokens, and "
                    f"{other._get_name()} has masking_strategy={other.masking_strategy!r}, not "
                    f"{self.masking_strategy!r}."
                )
            more = other._entries()
            both = [{**own, **its} for own, its in zip(wanted, more, strict=True)]
            wanted = Entries(*both)
        return pack_batch(
            batch,
            self.read,
            self.masking_strategy,
            wanted,
            who=self._get_name(),
            pad_id=getattr(getattr(self._network, "tokenizer", None), "pad_token_id", None),
        )

    def measure_window(
        self,
        batches: TensorDictBase | PackedBatch | Iterable[TensorDictBase | PackedBatch],
        *,
        ranks: Ranks | None = None,
    ) -> Window:
        """Count what an accumulation window will train, before any of it is trained.

        Args:
            batches: all rows of the window that this process trains, as one batch or several.
            ranks: train the window together; each of them calls it.

        Returns:
            The counts, for ``window=``; of several ranks their sum divided by their number, because
            the mean of their gradients is taken.

        Raises:
            MissingEntryError: an entry is missing.
        """
        parts = [batches] if isinstance(batches, TensorDictBase | PackedBatch) else batches
        packed = [self.pack(rows) for rows in parts]
        counts = Window.of(self._counts(rows) for rows in packed)
        if ranks is not None:
            data = ranks.data
            tokens, rows = data.sum([float(counts.num_active_tokens), float(counts.num_sequences)])
            counts = Window(tokens / data.size, rows / data.size)
        self._tell_if_empty(counts)
        return counts._replace(**self._statistics(packed, ranks))

    def _counts(self, packed: PackedBatch) -> Window:
        """Count what of a batch is trained."""
        return Window(packed.num_targets, packed.num_rows)

    def _statistics(self, batches: Sequence[PackedBatch], ranks: Ranks | None) -> dict[str, float]:
        """Fields of the window that are no counts, where an option needs them."""
        del batches, ranks
        return {}

    @property
    def wants_entropy(self) -> bool:
        """Whether the entropy of the trained tokens is needed."""
        return False

    def fit(self, packed: PackedBatch) -> PackedBatch:
        """Leave out the rows that are unfit to be trained.

        Args:
            packed: a batch.

        Returns:
            The batch with all of its rows.
        """
        return packed

    def of_scores(self, batch: PackedBatch, scores: TokenScores, window: Window) -> Output:
        """The loss of tokens that are scored already.

        Args:
            batch: packed.
            scores: of its trained tokens, ``[K]``; with entropy where :attr:`wants_entropy`.
            window: counts of the whole accumulation window, none of them 0.

        Returns:
            What the loss gives back.
        """
        raise NotImplementedError

    def forward(
        self, tensordict: TensorDictBase | PackedBatch, *, window: Window | None = None
    ) -> Output:
        """Compute the terms of the loss.

        Args:
            tensordict: ``[B]``, ragged or padded, with the entries of ``read``; or packed.
            window: counts of the whole accumulation window; None: this batch is all of it.

        Returns:
            Terms and metrics; ``.total()`` is what to call ``backward`` on.

        Raises:
            MissingEntryError: an entry is missing.
            ValueError: entries are not aligned with the tokens, the batch is not ``[B]``, or it
                has no token to train.
        """
        batch, window = self._pack_window(tensordict, window)
        return self.of_scores(batch, self._score(batch, entropy=self.wants_entropy), window)

    def _pack_window(
        self, batch: TensorDictBase | PackedBatch, window: Window | None
    ) -> tuple[PackedBatch, Window]:
        """The batch, and its own counts where there is no wider window."""
        packed = self.pack(batch)
        own = self._counts(packed)
        if window is None:
            window = own
            if self.allow_empty:
                self._tell_if_empty(window)
        if window.num_active_tokens == 0 and not self.allow_empty:
            raise ValueError(
                f"{self._get_name()}: no token of the {packed.num_rows} rows is trained; "
                f"masking_strategy={self.masking_strategy!r} goes by {self.read.assistant_mask!r}, "
                "which is True on what a policy sampled. For demonstrations: "
                "row_tensordicts(encode_demonstrations(policy.encoder, chats)) of torchrl_data. "
                "With allow_empty=True such a batch has loss 0."
            )
        tokens, rows = int(own.num_active_tokens), int(own.num_sequences)
        return packed, window.check(tokens, rows, self._get_name())

    def _tell_if_empty(self, window: Window) -> None:
        if not window.num_active_tokens:
            self._tell_of_nothing(
                "empty",
                f"no token of the {window.num_sequences:g} rows of the window is trained, so that "
                f"the loss is 0. {self.read.assistant_mask!r} says which are, with "
                f"masking_strategy={self.masking_strategy!r}",
            )

    def _tell_of_nothing(self, kind: str, why: str) -> None:
        """Log that there was nothing to learn: the 1st, 2nd, 4th, 8th, ... time of a kind."""
        self._num_empty[kind] += 1
        count = self._num_empty[kind]
        if count & (count - 1) == 0:
            _LOG.warning("%s: no signal in %d window(s): %s.", self._get_name(), count, why)

    @property
    def _network(self) -> Any:
        """The model whose tokens are trained."""
        return getattr(self, self.network_name)

    def _rows_to_read(self, batch: PackedBatch) -> PackedBatch | None:
        """The rows that have a trained token; ``None`` where nothing has to be read."""
        # Other ranks wait for the model's passes, those without a token included.
        if batch.num_targets == 0 and not getattr(self._network, "is_distributed", False):
            return None
        trained = batch.target_lengths > 0  # a model takes no empty rows
        return batch if bool(trained.all()) else batch.take_rows(trained)

    def _no_tokens(self) -> Tensor:
        """Scores or values of no token, ``[0]``."""
        return torch.zeros(0, device=scorer_device(self._network), requires_grad=True)

    def _score(self, batch: PackedBatch, *, entropy: bool = False) -> TokenScores:
        """Log-probs (and entropies) of the trained tokens, ``[K]``, in float32 at least."""
        actor, rows = self._network, self._rows_to_read(batch)
        if rows is None:
            nothing = self._no_tokens()
            return TokenScores(nothing, nothing if entropy else None)
        batch = rows
        scores: TokenScores = actor.score_packed(
            batch.ids,
            batch.lengths,
            batch.target_mask,
            temperature=self.temperature,
            entropy=entropy,
            **image_arguments(actor, batch.images, self._get_name()),
            **mask_arguments(actor, batch.sampling_masks, self._get_name()),
            **expert_arguments(actor, batch.routed_experts, self._get_name()),
            **agent_arguments(actor, batch.agents),
        )
        scores = scores._replace(log_prob=F.at_least_float32(scores.log_prob))
        if self.on_scores is not None:
            detached = [None if value is None else value.detach() for value in scores]
            self.on_scores(batch, TokenScores._make(detached))
        return scores

    def _reduce(self, values: Tensor, batch: PackedBatch, window: Window) -> Tensor:
        """A number from a value per trained token, ``[K]``."""
        if batch.weights is not None:
            values = values * batch.weights.to(values.dtype)
        return F.aggregate(
            values,
            lengths=batch.target_lengths,
            aggregation=self.aggregation,
            max_tokens=self._options.max_tokens,
            num_active_tokens=window.num_active_tokens,
            num_sequences=window.num_sequences,
        )


@functools.cache
def _option_names(cls: type[TokenLoss[Any, Any]]) -> frozenset[str]:
    """The options of a loss, each of which can be set."""
    kind = getattr(cls, "option_type", None)
    return frozenset() if kind is None else frozenset(field.name for field in fields(kind))
