"""Base of all losses: score a batch, sum over the window, report the outputs."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import torch
from tensordict import NestedKey, TensorClass, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from objectives import functional as F
from objectives.batching.loss_keys import TokenKeys
from objectives.batching.packed_batch import (
    Entries,
    MaskingStrategy,
    PackedBatch,
    pack_batch,
    resolve_masking_strategy,
)
from objectives.batching.ranks import Ranks
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_type
from torchrl_data.missing_entry import MissingEntryError
from torchrl_data.token_scorer import (
    TokenScorer,
    TokenScores,
    check_scorer,
    expert_arguments,
    image_arguments,
    mask_arguments,
)

from .options import TokenOptions

# What the losses give back: named terms, of which only the ``loss_*`` ones are optimised.
#
# Every tensor is a scalar, unless the loss was told not to aggregate. Losses are shares of the
# accumulation window, so those of its micro-batches add up; metrics are means over the trained
# tokens of the call, and ``combine`` weighs them by these.

Output = TypeVar("Output")


def make_output(kind: type[Output], terms: Mapping[str, Tensor]) -> Output:
    """Make an output from its entries by name."""
    made: Any = kind
    return made.from_tensordict(TensorDict(dict(terms)))


class LossTerms:
    """The fields that every output of a loss has."""

    def total(self) -> Tensor:
        """The objective: the sum of the ``loss_*`` entries."""
        output: Any = self
        terms = [value for key, value in output.items() if str(key).startswith("loss_")]
        return torch.stack([term for term in terms if term is not None]).sum(0)

    @classmethod
    def combine(
        cls: type[Output], outputs: Sequence[Output], *, ranks: Ranks | None = None
    ) -> Output:
        """The output of a whole window from those of its micro-batches, detached.

        Args:
            outputs: at least one, each computed with the window's counts (``window=``).
            ranks: also over all of these, each of which calls it.

        Returns:
            What one call on all rows would have given; over several ranks on the CPU.

        Raises:
            ValueError: there are no outputs.
        """
        if not outputs:
            raise ValueError("combine needs at least one output.")
        terms = combined_terms(outputs)
        if ranks is not None and ranks.data.size > 1:
            own = {  # its losses were divided by its share of the counts of all
                name: value.cpu() / (ranks.data.size if name.startswith("loss_") else 1)
                for name, value in terms.items()
            }
            terms = combined_terms(ranks.data.gather(own))
        return make_output(cls, terms)


def combined_terms(outputs: Sequence[Any]) -> dict[str, Tensor]:
    """The entries of a whole window by name, from the outputs of its micro-batches."""
    parts = [
        {str(key): value.detach() for key, value in output.items() if value is not None}
        for output in outputs
    ]
    combined: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        present = [part for part in parts if name in part]
        values = torch.stack([part[name] for part in present])
        if name.startswith(("loss_", "num_")):
            combined[name] = values.sum(0)
        else:
            combined[name] = _token_mean(values, present)
    if "ESS" in combined:
        # ESS = mean(r)^2 / mean(r^2): recover the mean square of each part.
        ratio = torch.stack([part["ratio_mean"] for part in parts])
        ess = torch.stack([part["ESS"] for part in parts])
        fraction = combined["ratio_mean"].square() / _token_mean(ratio.square() / ess, parts)
        combined["ESS"] = torch.where(combined["num_active_tokens"] > 0, fraction, 1.0)
    return combined


def _token_mean(values: Tensor, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    weights = torch.stack([part["num_active_tokens"] for part in parts])
    return (values * weights).sum(0) / weights.sum(0).clamp(min=1)


def loss_output(kind: type[Output]) -> type[Output]:
    """Class decorator: an output shows its values, and reduces to its objective."""
    # loss.mean(reduce=True) is TorchRL's idiom for what to differentiate.
    # TensorClass gives its own text and docstring; the class keeps a copy of what it says itself.
    own = {name: _reduction(name, getattr(kind, name)) for name in ("mean", "sum")}
    for key, value in {**own, "__repr__": _shown, "__doc__": vars(kind)["_documentation"]}.items():
        setattr(kind, key, value)
    return kind


def _reduction(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def reduction(output: Any, *args: Any, reduce: bool | None = None, **options: Any) -> Any:
        if reduce:
            return getattr(output.total(), name)(*args, **options)
        return plain(output, *args, reduce=reduce, **options)

    reduction.__name__ = name
    reduction.__doc__ = f"With ``reduce=True`` the {name} of the objective; else of each entry."
    return reduction


def _shown(output: TensorClass) -> str:
    entries = ", ".join(
        f"{key}={value.item():.6g}" if value.numel() == 1 else f"{key}=[{value.numel()} values]"
        for key, value in output.items()
        if isinstance(value, Tensor)
    )
    return f"{type(output).__name__}({entries})"


@loss_output
class GRPOLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.GRPOLoss`.

    All are scalars, ``[]``; with ``aggregation="none"`` the policy term and the KL terms are
    ``[K]``, one value per trained token. Metrics are detached, and over the trained tokens of the
    call; :meth:`combine` gives those of a window.

    Example:
        >>> from tensordict import lazy_stack
        >>> from objectives import GRPOLoss
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> row = TensorDict({("tokens", "full"): torch.tensor([65, 66, 67])})  # [T]
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        >>> row["log_probs", "full"], row["advantage"] = torch.full((3,), -5.0), torch.ones(1, 1)
        >>> loss = GRPOLoss(TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer))
        >>> outputs = [loss(lazy_stack([row])), loss(lazy_stack([row, row]))]
        >>> outputs[0].total().shape  # what to call backward on
        torch.Size([])
        >>> whole = GRPOLossOutput.combine(outputs)
        >>> whole.num_sequences, whole.num_active_tokens
        (tensor(3.), tensor(6.))
    """

    _documentation = __doc__

    loss_objective: Tensor
    """The policy term."""
    clip_fraction: Tensor
    """Tokens that the clip leaves without gradient."""
    clip_fraction_low: Tensor
    """Of them, bad tokens with too low a ratio."""
    clip_fraction_high: Tensor
    """Of them, good tokens with too high a ratio."""
    kl_approx: Tensor
    """Mean of ``log pi_old - log pi``, in nats per token."""
    ESS: Tensor
    """Effective sample size of the ratios as a fraction of the tokens, in (0, 1]."""
    ratio_mean: Tensor
    """Mean ratio; 1 on policy."""
    kept_fraction: Tensor
    """Tokens that no filter took out of the policy term."""
    signal_fraction: Tensor
    """Tokens whose advantage is not 0; where it is 0, only KL and entropy terms have a gradient."""
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""
    num_rows_left_out: Tensor
    """Of them, those that no policy can have sampled with the log-probs that they hold (NaN,
    infinite or positive); nothing of them is trained."""
    entropy: Tensor | None = None
    """Mean entropy in nats, where it was asked for."""
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    """Mean KL estimate to the reference, in nats per token."""
    loss_kl_to_inference: Tensor | None = None
    kl_to_inference: Tensor | None = None
    """Mean KL estimate to the policy that sampled, in nats per token."""
    sampler_gap: Tensor | None = None
    """Mean absolute gap between the trainer's and the engine's log-probs, in nats per token."""
    correction_fraction: Tensor | None = None
    """Tokens whose sampler correction was truncated or masked."""


@loss_output
class SFTLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.SFTLoss`.

    All are scalars, ``[]``; with ``aggregation="none"`` the terms are ``[K]``, one value per
    trained token.
    """

    _documentation = __doc__

    loss_sft: Tensor
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""
    nll: Tensor
    """Mean negative log-likelihood, in nats per token; detached."""
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    """Mean KL estimate to the reference, in nats per token; detached."""


@loss_output
class DistillationLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.DistillationLoss`.

    All are scalars, ``[]``; with ``aggregation="none"`` the term is ``[K]``, one value per
    trained token.
    """

    _documentation = __doc__

    loss_distill: Tensor
    kl_to_teacher: Tensor
    """Mean KL estimate, in nats per token; detached."""
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""


# What the losses over tokens share: read a batch once, score its trained tokens, reduce.
#
# Shape legend: B rows, N tokens of all of them, K trained tokens.


class Window(NamedTuple):
    """The counts of one optimizer step, whatever it is split into.

    Pass it to each micro-batch's loss, add their gradients up, and the sum is the gradient of the
    whole. ``loss.measure_window(parts, ranks=ranks)`` gives the counts of all ranks, divided by
    their number because the mean of their gradients is taken.

    Example:
        >>> Window.of([Window(3.0, 1.0), Window(5.0, 2.0)])[:2]
        (8.0, 3.0)
    """

    num_active_tokens: float
    """Trained tokens."""
    num_sequences: float
    """Rows, also those without a trained token."""
    entropy_threshold: float | None = None
    """In nats; ``TokenFilters(top_entropy_fraction=...)`` needs it, so that all parts filter alike.
    ``GRPOLoss.measure_window`` takes it when that filter is on."""
    sampler_weight_mean: float | None = None
    """Over the trained tokens; ``SamplerCorrection(normalize=True)`` divides by it.
    ``GRPOLoss.measure_window`` takes it then."""

    @classmethod
    def of(cls, windows: Iterable[Window]) -> Window:
        """Add windows up.

        Args:
            windows: of the micro-batches, or of the processes.

        Returns:
            The sum of their counts, and the mean of their means. Quantiles do not add up: the
            entropy threshold is theirs where all have the same, and None where they differ.
        """
        windows = list(windows)
        tokens = sum(window.num_active_tokens for window in windows)
        sequences = sum(window.num_sequences for window in windows)
        thresholds = {window.entropy_threshold for window in windows}
        weights = [w.sampler_weight_mean for w in windows if w.sampler_weight_mean is not None]
        mean = None
        if weights and len(weights) == len(windows):
            total = sum(
                w * each.num_active_tokens for w, each in zip(weights, windows, strict=True)
            )
            mean = total / tokens if tokens else 1.0
        return cls(tokens, sequences, thresholds.pop() if len(thresholds) == 1 else None, mean)

    def check(self, num_active_tokens: int, num_sequences: int, who: str) -> Window:
        """Check the counts beside those of a part of the window.

        Args:
            num_active_tokens: trained tokens of the part.
            num_sequences: its rows.
            who: the loss, for the message.

        Returns:
            The window to divide by; a count of 0, of nothing, is 1.

        Raises:
            ValueError: a count is negative or not finite, or 0 though the part has some.
        """
        for name, found, part in (
            ("num_active_tokens", self.num_active_tokens, num_active_tokens),
            ("num_sequences", self.num_sequences, num_sequences),
        ):
            if not 0 <= found < math.inf or (found == 0 and part):
                raise ValueError(
                    f"{who}: the window has {name}={found}, but the batch at hand has {part} of "
                    "them. Measure the window over all of its batches: measure_window(...)."
                )
        return self._replace(
            num_active_tokens=self.num_active_tokens or 1, num_sequences=self.num_sequences or 1
        )


Keys = TypeVar("Keys", bound=TokenKeys)
_LOG: Final = logging.getLogger(__name__)


def scorer_device(actor: object) -> torch.device | None:
    """Return where an actor's parameters are; None when it has none to show."""
    if not isinstance(actor, torch.nn.Module):
        return None
    first = next(actor.parameters(), None)
    return None if first is None else first.device


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
        actor_network: scores packed tokens (:class:`~torchrl_data.TokenScorer`).
        settings: options by name.
        options: what ``settings`` are added to.
        read: names of the batch entries to read.
        allow_empty: a batch without a trained token has loss 0; otherwise it raises.

    Raises:
        TypeError: the actor cannot score, or settings are of another class.
        ValueError: an option is unknown, out of range, or cannot take effect with the others.
        AttributeError: there is no option of the name that is set.
    """

    option_type: ClassVar[type[TokenOptions]]
    """Class of its options."""
    key_type: ClassVar[type[TokenKeys]] = TokenKeys
    """Class of its entry names."""
    output_type: ClassVar[type[TensorClass]]
    """Class of what it gives back."""
    takes_own_temperature: ClassVar[bool] = False
    """Without a temperature it takes the actor's own."""
    changeable = frozenset({"allow_empty"})

    def __init__(
        self,
        actor_network: TokenScorer,
        settings: Mapping[str, Any],
        *,
        options: TokenOptions | None = None,
        read: Keys,
        allow_empty: bool,
    ) -> None:
        super().__init__()
        self._made_options(options, settings)  # what is wrong with them is told first
        check_scorer(self._get_name(), actor_network)
        check_type("read", read, self.key_type)
        self.actor_network = actor_network
        self.read = read
        self.allow_empty = allow_empty
        self.on_scores: Callable[[PackedBatch, TokenScores], None] | None = None
        """Told of the scores of trained tokens, detached, whenever they were computed."""
        self._num_empty: Counter[str] = Counter()
        self._configure(options, settings)

    # Options ------------------------------------------------------------------------------------

    @property
    def options(self) -> Any:
        """All options as one record, which can be set as a whole."""
        return self._options

    @options.setter
    def options(self, options: TokenOptions) -> None:
        if not isinstance(options, self.option_type):
            raise TypeError(
                f"{self._get_name()}: options takes {self.option_type.__name__}(...), got "
                f"{options!r}."
            )
        self._configure(options, {})

    def _made_options(
        self, options: TokenOptions | None, settings: Mapping[str, Any]
    ) -> TokenOptions:
        """The record of settings by name, added to another one."""
        return self.option_type(**settings) if options is None else replace(options, **settings)

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
        entries = chain.from_iterable(named.values() for named in self._entries())
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
        elif name == "actor_network" and "actor_network" in self._modules | vars(self):
            check_scorer(self._get_name(), value)
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
        return self._options.named_aggregation

    @property
    def masking_strategy(self) -> MaskingStrategy:
        """Name of the tokens that are trained."""
        return resolve_masking_strategy(self._options.masking_strategy)

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

    def pack(self, batch: TensorDictBase | PackedBatch) -> PackedBatch:
        """Read what the loss needs of a batch, without padding.

        Args:
            batch: ``[B]``, ragged (a lazy stack of rows, what ``LazyStackStorage`` gives) or
                padded ``[B, T]`` with an attention mask; the entries of ``read``.

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
            wanted = chain.from_iterable(self._entries())
            if missing := [name for name in wanted if name not in batch.entries]:
                raise MissingEntryError(
                    f"{self._get_name()} needs {missing}, which the packed batch lacks: it was "
                    "packed for other options. Pack the rows again: loss.pack(rows)."
                )
            return batch
        return pack_batch(
            batch,
            self.read,
            self.masking_strategy,
            self._entries(),
            who=self._get_name(),
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
        counts = Window.of(Window(rows.num_targets, rows.num_rows) for rows in packed)
        if ranks is not None:
            data = ranks.data
            tokens, rows = data.sum([float(counts.num_active_tokens), float(counts.num_sequences)])
            counts = Window(tokens / data.size, rows / data.size)
        self._tell_if_empty(counts)
        return counts._replace(**self._statistics(packed, ranks))

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
        if window is None:
            window = Window(packed.num_targets, packed.num_rows)
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
        return packed, window.check(packed.num_targets, packed.num_rows, self._get_name())

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

    def _score(self, batch: PackedBatch, *, entropy: bool = False) -> TokenScores:
        """Log-probs (and entropies) of the trained tokens, ``[K]``, in float32 at least."""
        actor: Any = self.actor_network
        # Other ranks wait for the actor's passes, those without a token included.
        if batch.num_targets == 0 and not getattr(actor, "is_distributed", False):
            nothing = torch.zeros(0, device=scorer_device(actor), requires_grad=True)
            return TokenScores(nothing, nothing if entropy else None)
        trained = batch.target_lengths > 0  # a scorer takes no empty rows
        if not bool(trained.all()):
            batch = batch.take_rows(trained)
        scores: TokenScores = actor.score_packed(
            batch.ids,
            batch.lengths,
            batch.target_mask,
            temperature=self.temperature,
            entropy=entropy,
            **image_arguments(actor, batch.images, self._get_name()),
            **mask_arguments(actor, batch.sampling_masks, self._get_name()),
            **expert_arguments(actor, batch.routed_experts, self._get_name()),
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
