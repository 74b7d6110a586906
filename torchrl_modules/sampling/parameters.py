"""Parameters of sampling: one set for every engine, checked when it is made."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torchrl_data.checks import NOT_NEGATIVE, POSITIVE, check_counts, check_not_none, check_numbers
from torchrl_data.conversation import Conversations, stream_number

from .spellings import ALIASES, INSTEAD, PLAIN
from .stop_strings import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        kept_counts: report also how many tokens top-k, top-p and min-p leave, of which each token
            is drawn: with them its distribution can be told from one that was cut elsewhere.
        sampling_mask: report also which tokens these are. A row carries them, and is then scored
            and trained under the distribution that each token was drawn from, whatever the weights
            would leave by then.
        routed_experts: report also the experts to which a mixture sent each token. A row carries
            them, and is then scored and trained with them: the router's scores still weigh them.

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
    kept_counts: bool = False
    sampling_mask: bool = False
    routed_experts: bool = False
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
            target = ALIASES.get(name, name)
            if name in INSTEAD:
                nothing, advice = INSTEAD[name]
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
                settings[target] = PLAIN[target](value) if target in PLAIN else value
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
