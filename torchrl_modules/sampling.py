"""Sampling.

Its parameters, several responses of a prompt, stop strings, and what warps the logits.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchrl_data.batched_object import read_objects, write_objects
from torchrl_data.checks import NOT_NEGATIVE, POSITIVE, check_counts, check_not_none, check_numbers
from torchrl_data.conversation import Conversations, stream_number
from torchrl_data.devices import on_device
from torchrl_data.ragged.packed import cumulative_lengths, sequence_index

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Sampling parameters as users of vLLM, TRL and Transformers write them.

_ALIASES: Final = {
    "max_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_SEVERAL: Final = "Use num_samples of the wrapper: several responses per prompt, each a row."
_BEAMS: Final = (
    "Beam search draws from no distribution whose log-probs could be trained on. "
    "Use num_samples of the wrapper, and choose with objectives.TopKRewardSelector."
)
_TOKENS: Final = (
    "Policies write the ids that were drawn, with their log-probs; score other tokens with "
    "TransformersWrapper(model, generate=False)."
)
# What is done in another way here: the value that changes nothing, and what to write instead.
_INSTEAD: Final[dict[str, tuple[Any, str]]] = {
    "n": (1, _SEVERAL),
    "num_return_sequences": (1, _SEVERAL),
    "best_of": (1, f"{_SEVERAL} Choose with objectives.TopKRewardSelector."),
    "use_beam_search": (False, _BEAMS),
    "num_beams": (1, _BEAMS),
    "do_sample": (True, "Use temperature=0 for the most likely token."),
    "logprobs": (0, _TOKENS),
    "prompt_logprobs": (None, _TOKENS),
    "detokenize": (False, _TOKENS),
    "include_stop_str_in_output": (True, "The token that completes a stop text is always kept."),
    "bad_words": (None, "Use logit_bias={token: -100}."),
}


# Settings as they are kept: JSON has lists, and texts for keys.
_PLAIN: Final[dict[str, Callable[[Any], Any]]] = {
    "stop": lambda value: (value,) if isinstance(value, str) else tuple(value),
    "stop_token_ids": tuple,
    "logit_bias": lambda value: {int(token): bias for token, bias in value.items()},
}


# Stop strings: at which sampled token a response ends.


class StopStrings:
    """Finds the token that completes one of some texts; nothing is ever re-tokenised."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        self._first = min_tokens + 1
        # A token has at least one byte, and a character at most four.
        self._num_tail = 4 + max(len(text.encode()) for text in texts)
        # What a text may end in: its last character, or a part of one.
        self._last = ("\ufffd", *{text[-1] for text in texts})
        self._may_end: dict[int, bool] = {}

    def num_kept(self, ids: Sequence[int]) -> int | None:
        """How many tokens there are up to the one that completes a text; ``None`` if none does."""
        if len(ids) < self._first:
            return None
        ids, begin = list(ids), len(self._decode(ids[: self._first - 1]))
        counts = range(self._first, len(ids) + 1)
        index = bisect_left(counts, True, key=lambda count: self._ends(ids[:count], begin))
        return None if index == len(counts) else counts[index]

    def may_end(self, token: int) -> bool:
        """Whether a token can complete a text at all; few can, and the others cost nothing."""
        known = self._may_end.get(token)
        if known is None:
            # Alone, and behind another one: tokenizers write the first of a text differently.
            said = self._decode([token]) + self._decode([token, token])
            known = self._may_end[token] = any(last in said for last in self._last)
        return known

    def just_ended(self, ids: Sequence[int]) -> bool:
        """Whether the last token, most likely, completes a text; after each token, and fast."""
        if not ids or not self.may_end(ids[-1]):
            return False
        tail = self._decode(ids[-self._num_tail :])
        return any(text in tail for text in self._texts) and self.num_kept(ids) is not None

    def _ends(self, ids: list[int], begin: int) -> bool:
        text = self._decode(ids)
        return any(text.find(stop, max(0, begin - len(stop) + 1)) >= 0 for stop in self._texts)

    def _decode(self, ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))


# How tokens are drawn: one set of parameters for every engine, checked when it is made.


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """The distribution that tokens are drawn from, and when to stop.

    What changes the logits is applied in vLLM's order: ``logit_bias``, ``min_tokens``, the
    repetition, frequency and presence penalties, the temperature, min-p, top-k, top-p. Reported
    log-probs are those after all of it. What came before a turn (the whole conversation) is its
    prompt; what the turn itself has drawn so far is its output.

    Args:
        max_new_tokens: most tokens drawn in one turn, the stop token included.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_p: keep the smallest set of tokens with at least this probability, in (0, 1].
        top_k: keep this many most likely tokens; 0 keeps all.
        min_p: keep tokens with at least this fraction of the most likely one's probability.
        repetition_penalty: positive logits of tokens that the prompt or the output hold are divided
            by it, negative ones multiplied.
        presence_penalty: subtracted from the logits of tokens that the output holds.
        frequency_penalty: the same, as often as the output holds them.
        logit_bias: added to the logits of tokens, by id, each in [-100, 100].
        min_tokens: among the first so many tokens is no stop token, and no stop string ends there.
        stop: texts that end a turn. The response is kept as it was drawn, up to and with the token
            that completes one, and all of it is trained. They may hold control tokens.
        stop_token_ids: tokens that end a turn; the one drawn is part of the response. ``None``: the
            chat template's end of turn, the tokenizer's end of sequence and what the model's
            ``generation_config.eos_token_id`` names, but for tokens that the template writes within
            a turn, which is logged.
        seed: what is drawn follows from it, the prompts and the weights. Each rollout of an
            environment has a stream of random numbers of its own, made of the seed, of the seed of
            its group and of its place in the group, and each turn its part of the stream: whichever
            collector and engine draw it, no batch repeats the numbers of another one, and a resumed
            run goes on with those that an uninterrupted one has. Without an environment the same
            call draws the same responses, each row with a stream of its own. ``None``: torch's
            generator, for an engine of this process.
        untempered_log_probs: report also the log-prob of each token under the model's own softmax,
            at temperature 1, untruncated and without penalties.
        entropy: report also the entropy of the distribution that each token is drawn from.

    Raises:
        ValueError: a value is of another kind or outside its range; the message names it.

    Example:
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> params = SamplingParameters(max_new_tokens=4, temperature=0.8, top_p=0.95, seed=0)
        >>> engine = TransformersEngine(tiny_qwen3(len(tokenizer)))
        >>> first, second = (engine.generate([[5, 6, 7]], params)[0].ids for _ in range(2))
        >>> first == second, len(first) <= 4
        (True, True)
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    untempered_log_probs: bool = False
    entropy: bool = False
    stop_matcher: StopStrings | None = field(default=None, repr=False, compare=False)
    """Finds ``stop`` in tokens; a policy, which has the tokenizer, sets it."""

    def __post_init__(self) -> None:
        who = "SamplingParameters"
        optional = ("stop_token_ids", "seed", "stop_matcher")
        check_not_none(who, **{n: value for n, value in vars(self).items() if n not in optional})
        check_counts(who, max_new_tokens=self.max_new_tokens)
        check_counts(who, 0, top_k=self.top_k, min_tokens=self.min_tokens, seed=self.seed)
        check_numbers(who, NOT_NEGATIVE, temperature=self.temperature)
        check_numbers(who, "(0, 1]", top_p=self.top_p)
        check_numbers(who, "[0, 1]", min_p=self.min_p)
        check_numbers(who, POSITIVE, repetition_penalty=self.repetition_penalty)
        penalties = {n: getattr(self, n) for n in ("presence_penalty", "frequency_penalty")}
        check_numbers(who, "[-2, 2]", **penalties)
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                check_not_none(who, **{f"a token of {name}": token})
                check_counts(who, 0, **{f"a token of {name}": token})
        biases = {f"logit_bias[{token}]": bias for token, bias in self.logit_bias.items()}
        check_not_none(who, **biases)
        check_numbers(who, "[-100, 100]", **biases)
        if self.seed is not None and self.seed >= 1 << 63:
            raise ValueError(f"{who}: seed must be below 2^63, got {self.seed}.")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"{who}: stop must be texts that are not empty, got {self.stop!r}.")
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"{who}: min_tokens is {self.min_tokens}, but max_new_tokens {self.max_new_tokens}."
            )

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p leave tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the logits."""
        others = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1.0 or others != (0.0, 0.0)

    @property
    def changes_logits(self) -> bool:
        """Whether the logits are others than the model's before the temperature comes."""
        return self.penalises or self.min_tokens > 0 or bool(self.logit_bias)

    @property
    def is_own_softmax(self) -> bool:
        """Whether the log-probs that are reported are those of the model's own softmax."""
        return self.temperature in (0.0, 1.0) and not self.truncates and not self.changes_logits

    def row_seeds(self, num_rows: int) -> list[int | None]:
        """A seed for each row of a call; ``None`` for each without a seed."""
        if self.seed is None:
            return [None] * num_rows
        draw = random.Random(self.seed)
        return [draw.getrandbits(31) for _ in range(num_rows)]

    def turn_seeds(self, prompts: Conversations) -> list[int] | None:
        """A seed for the next turn of each conversation; ``None`` without a seed.

        Args:
            prompts: encoded, as a policy has them. One of a stream of its own
                (:meth:`~torchrl_data.Conversations.with_streams`) is drawn with that; the others
                with one of the call.
        """
        if self.seed is None:
            return None
        seeds: list[int] = []
        for row, of_call in enumerate(self.row_seeds(len(prompts))):
            assert of_call is not None
            stream, num_tokens = prompts.stream(row), prompts.num_tokens(row)
            if stream is not None:
                seeds.append(stream_number(self.seed, stream, num_tokens))
            elif prompts.was_sampled(row):  # a later turn
                seeds.append(stream_number(of_call, num_tokens))
            else:
                seeds.append(of_call)
        return seeds

    def check_stops_are_found(self) -> None:
        """Check that an engine, which has no tokenizer, can find ``stop`` in tokens.

        Raises:
            ValueError: nobody has called `with_tokenizer`, which policies do.
        """
        if self.stop and self.stop_matcher is None:
            raise ValueError(
                f"SamplingParameters: the engine can't find stop={list(self.stop)} in tokens. "
                "Pass params.with_tokenizer(tokenizer)."
            )

    def with_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> "SamplingParameters":
        """The same, able to find ``stop`` in the tokens of a model.

        Args:
            tokenizer: of the model.
        """
        if not self.stop:
            return self
        return replace(self, stop_matcher=StopStrings(tokenizer, self.stop, self.min_tokens))

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> "SamplingParameters":
        """Read a ``generate_kwargs`` dictionary, with the names of vLLM, TRL or Transformers.

        Args:
            kwargs: names and values of this class, or such as ``max_tokens``, ``stop_strings``,
                ``min_new_tokens``, ``do_sample``. ``None`` leaves the default.

        Raises:
            TypeError: a name is not known; the message lists those that are, or says what to write
                instead.
            ValueError: a name is given twice under two spellings, or a value is out of range.
        """
        known = set(cls.__dataclass_fields__) - {"stop_matcher"}
        settings: dict[str, Any] = {}
        for name, value in kwargs.items():
            target = _ALIASES.get(name, name)
            if name in _INSTEAD:
                nothing, advice = _INSTEAD[name]
                if value is None or value == nothing:
                    continue
                raise TypeError(f"SamplingParameters does not take {name}={value!r}. {advice}")
            if target not in known:
                raise TypeError(
                    f"SamplingParameters has no parameter {name!r}; it has {sorted(known)}."
                )
            if target in settings:
                raise ValueError(f"SamplingParameters: {target} is given twice, once as {name!r}.")
            if value is not None:
                settings[target] = _PLAIN[target](value) if target in _PLAIN else value
        return cls(**settings)


def requested_sampling(
    generate_kwargs: Mapping[str, Any] | SamplingParameters | None,
    *,
    untempered_log_probs: bool,
    entropy: bool,
) -> SamplingParameters:
    """The sampling parameters that a policy was given."""
    if not isinstance(generate_kwargs, SamplingParameters):
        generate_kwargs = SamplingParameters.from_kwargs(generate_kwargs or {})
    return replace(
        generate_kwargs,
        untempered_log_probs=untempered_log_probs or generate_kwargs.untempered_log_probs,
        entropy=entropy or generate_kwargs.entropy,
    )


# Several responses per prompt: the batch gets one dimension more.
#
# Shape legend: B rows, n samples of each.


def repeat_rows(
    batch: TensorDictBase, prompt: Conversations, num_samples: int
) -> tuple[TensorDictBase, Conversations]:
    """Repeat each row n times, next to each other: the batch ``[*B, n]``, B x n conversations."""
    index = torch.arange(batch.numel()).repeat_interleave(num_samples)
    # Entries that hold a list of one Python value per row, which indexing does not see into.
    values = {
        str(key): read_objects(batch, str(key))
        for key, value in (() if isinstance(batch, LazyStackedTensorDict) else batch.items())
        if type(value) is NonTensorData and isinstance(value.data, list)
    }
    repeated_prompt = prompt[index]
    streams = [
        stream if stream is None else stream_number(stream, number)
        for row in range(len(prompt))
        for number, stream in enumerate([prompt.stream(row)] * num_samples)
    ]
    if None not in streams:
        repeated_prompt = repeated_prompt.with_streams([s for s in streams if s is not None])
    size = (*batch.batch_size, num_samples)
    repeated = batch.exclude(*values).reshape(-1)[index].reshape(size)
    for key, column in values.items():
        write_objects(repeated, key, [column[i] for i in index.tolist()])
    return repeated, repeated_prompt


# What changes logits because of the tokens so far: penalties, a bias, stop tokens too early.
#
# A turn's output are the tokens that it has drawn; its prompt is all that came before it.
#
# Shape legend: K positions, N packed tokens, V vocabulary.


class TokenHistory(NamedTuple):
    """What a turn has before it draws its next token, at each of K positions."""

    num_drawn: Tensor | None
    """int64 ``[K]``: tokens of the output; ``None`` where all are known to have ``min_tokens``."""
    seen: Tensor | None = None
    """bool ``[K, V]``: tokens that the prompt or the output hold; only for penalties."""
    counts: Tensor | None = None
    """float32 ``[K, V]``: how often the output holds them; only for penalties."""


class TargetHistory(NamedTuple):
    """Where the history of each target lies in packed sequences; on the host."""

    ids: Tensor
    """int64 ``[N]``."""
    first: Tensor
    """int64 ``[K]``: where the target's sequence begins."""
    turn: Tensor
    """int64 ``[K]``: where its turn begins."""
    at: Tensor
    """int64 ``[K]``: where it is itself."""

    @classmethod
    def of(cls, ids: Tensor, lengths: Tensor, target_mask: Tensor) -> "TargetHistory":
        """Of all targets; a turn is a run of targets."""
        at = target_mask.nonzero().squeeze(1)
        begins = target_mask.clone()
        begins[1:] &= ~target_mask[:-1]
        places = torch.arange(len(ids), device=ids.device)
        turn = torch.where(begins, places, 0).cummax(0).values[at]
        first = cumulative_lengths(lengths)[:-1][sequence_index(lengths)[at]]
        return cls(ids, first, turn, at)

    def part(self, rows: slice) -> "TargetHistory":
        """Of some of the targets."""
        return TargetHistory(self.ids, self.first[rows], self.turn[rows], self.at[rows])

    @property
    def longest(self) -> int:
        """Most tokens before a target."""
        return int((self.at - self.first).max()) if len(self.at) else 0

    def read(
        self, vocab_size: int, params: SamplingParameters, device: torch.device
    ) -> TokenHistory:
        """The tokens themselves on a device, as far as they are needed: memory of K x V."""
        count, num_drawn = self.at - self.turn, None
        if params.stop_token_ids and bool((count < params.min_tokens).any()):
            num_drawn = on_device(count, device)
        if not params.penalises:
            return TokenHistory(num_drawn)
        index = self.first[:, None] + torch.arange(self.longest)
        tokens = self.ids[index.clamp(max=len(self.ids) - 1)]
        tokens = tokens.masked_fill(index >= self.at[:, None], vocab_size)  # an extra column
        output = on_device(tokens.masked_fill(index < self.turn[:, None], vocab_size), device)
        tokens = on_device(tokens, device)
        shape = (len(self.at), vocab_size + 1)
        seen = torch.zeros(shape, dtype=torch.bool, device=device)
        counts = torch.zeros(shape, device=device)
        seen.scatter_(1, tokens, True)
        counts.scatter_add_(1, output, torch.ones_like(output, dtype=counts.dtype))
        return TokenHistory(num_drawn, seen[:, :vocab_size], counts[:, :vocab_size])


def changed_logits(logits: Tensor, params: SamplingParameters, history: TokenHistory) -> Tensor:
    """Logits ``[K, V]`` with the bias and the penalties, as vLLM applies them; differentiable."""
    if params.logit_bias:
        tokens = on_device(list(params.logit_bias), logits.device)
        values = on_device(list(params.logit_bias.values()), logits.device, logits.dtype)
        bias = torch.zeros(logits.shape[1], dtype=logits.dtype, device=logits.device)
        logits = logits + bias.index_copy(0, tokens, values)
    if history.seen is not None and params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(history.seen, penalised, logits)
    if history.counts is not None:
        logits = logits - params.frequency_penalty * history.counts
        logits = logits - params.presence_penalty * (history.counts > 0)
    return logits


def too_early(logits: Tensor, params: SamplingParameters, history: TokenHistory) -> Tensor | None:
    """Stop tokens that ``min_tokens`` does not allow yet, bool ``[K, V]``; ``None`` for none."""
    if not params.stop_token_ids or not params.min_tokens or history.num_drawn is None:
        return None
    early = history.num_drawn < params.min_tokens
    stops = on_device(params.stop_token_ids, logits.device)
    banned = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    return banned.index_copy_(1, stops, early[:, None].expand(-1, len(stops)))


# The distribution that tokens are drawn from: penalties, temperature, min-p, top-k and top-p.
#
# They are applied in this order, which is vLLM's, each to what the one before has left.
#
# Shape legend: K positions, V vocabulary.

_TILE_BYTES = 32 << 20


def logits_warpers(params: SamplingParameters) -> list[LogitsProcessor]:
    """Processors of Transformers for the temperature (0 stands for 1), min-p, top-k and top-p."""
    warpers: list[LogitsProcessor] = []
    if params.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers


def warped_log_softmax(
    logits: Tensor,
    params: SamplingParameters,
    targets: Tensor | None = None,
    history: TokenHistory | None = None,
) -> Tensor:
    """Log-probabilities of the distribution that is sampled from."""
    # logits: of the model, [K, V], in full precision.
    # targets: int64 [K]: tokens that are kept whatever their probability. They were drawn, so they
    # were kept then; the weights may have moved since, and a log-prob of minus infinity would have
    # no gradient to bring them back.
    # Gives [K, V], minus infinity where a token is left out; which ones is never differentiated.
    left_out = None
    if history is not None and params.changes_logits:
        logits = changed_logits(logits, params, history)
        left_out = too_early(logits, params, history)
    temperature = params.temperature or 1.0
    tempered = logits / temperature if temperature != 1.0 else logits
    if not params.truncates and left_out is None:
        return torch.log_softmax(tempered, -1)
    with torch.no_grad():
        warped = logits if left_out is None else logits.masked_fill(left_out, -torch.inf)
        for warper in logits_warpers(params):
            warped = warper(None, warped)  # type: ignore[arg-type]
        left_out = warped == -torch.inf
        if targets is not None:
            left_out.scatter_(1, targets[:, None], False)
    return torch.log_softmax(tempered.masked_fill(left_out, -torch.inf), -1)


def warped_log_prob(
    logits: Tensor, targets: Tensor, params: SamplingParameters, history: TokenHistory | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under :func:`warped_log_softmax`, and the entropy, ``[K]`` each."""
    log_p = warped_log_softmax(logits, params, targets, history)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def warped_head_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    params: SamplingParameters,
    *,
    bias: Tensor | None = None,
    history: TargetHistory | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`warped_log_prob` of ``hidden @ weight.T``, a tile of about 32 MB of logits at a time.

    A truncation needs a position's whole vocabulary at once, sorted, and a penalty its history:
    slower than the plain head. Hidden states are ``[K, D]``, the weight ``[V, D]``; the products
    are computed in ``compute_dtype``, if one is given.
    """
    num_rows = max(1, _TILE_BYTES // (4 * len(weight)))
    if history is not None and params.penalises:
        num_rows = max(1, min(num_rows, _TILE_BYTES // (8 * max(1, history.longest))))
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32

    def tile(start: int, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if compute_dtype is not None:
            hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
        own_bias = bias if bias is None or compute_dtype is None else bias.to(compute_dtype)
        with torch.autocast(hidden.device.type, enabled=False) if compute_dtype else nullcontext():
            logits = torch.nn.functional.linear(hidden, weight, own_bias).to(dtype)
        some = history and history.part(slice(start, start + len(hidden)))
        tokens = some and some.read(len(weight), params, logits.device)
        return warped_log_prob(logits, targets, params, tokens)

    pairs = zip(hidden.split(num_rows), targets.split(num_rows), strict=True)
    parts: list[Any] = [
        checkpoint(tile, i * num_rows, some, weight, at, use_reentrant=False)
        for i, (some, at) in enumerate(pairs)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
