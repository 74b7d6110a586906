"""``TextEnvironment``: tools called in plain text."""

import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final, NamedTuple, get_type_hints

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_data.checks import check_counts
from torchrl_data.conversation import (
    ConversationRecord,
    Conversations,
    EncodedMessages,
    Position,
    Source,
    Turn,
    stream_number,
)
from torchrl_data.display.text_history import TextHistory
from torchrl_data.stop_reason import StopReason
from torchrl_data.templates.control_tokens import ControlTokenGuard
from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.episode.runner import EpisodeRunner
from torchrl_envs.episode.tool_source import Answer, Job, ToolSource
from torchrl_envs.rewards.scoring_call import scores_one_rollout
from torchrl_envs.tool_results import result_text
from torchrl_modules import Generation, LLMWrapperBase, SamplingParameters
from torchrl_modules.engines.engine import Engine, checked, seeded

from .rollout_func import COMPLETION_IDS, ENV_MASK, LOG_PROBS, PROMPT_IDS, TRUNCATED_ROWS

# What a ``TextEnvironment`` is made from: an engine, its sampling, named tools.

_log = logging.getLogger(__name__)
Tool = Callable[[str], Any]
_IGNORED: Final = frozenset({"pad_token_id", "do_sample", "eos_token_id"})
_NONE: Final = (("min_length", -1), ("min_length", 0), ("top_k", 0.0))
"""What TRL's examples give where there is no bound; no end of a sequence is ``eos_token_id=-1``."""


def engine_of(model: Any) -> Engine:
    """What generates: a Transformers model, a policy's engine, or an engine itself.

    Raises:
        TypeError: it is none of them.
    """
    if isinstance(model, PreTrainedModel):
        from torchrl_modules.engines.transformers import TransformersEngine

        return TransformersEngine(model)
    engine = getattr(model, "engine", model)
    if not (hasattr(engine, "generate") and hasattr(engine, "update_weights")):
        raise TypeError(
            "TextEnvironment: model must be a Transformers model, a policy or an engine, got "
            f"{type(model).__name__}."
        )
    return engine


def named_tools(tools: Mapping[str, Tool] | Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name; those of a list are named after their function or class.

    Raises:
        TypeError: one can't be called.
        ValueError: a name is taken, empty, or can't be written in a request.
    """
    named: dict[str, Tool] = {}
    own = ((getattr(tool, "__name__", type(tool).__name__), tool) for tool in tools)
    for name, tool in tools.items() if isinstance(tools, Mapping) else own:
        if not callable(tool):
            raise TypeError(f"TextEnvironment: the tool {name} can't be called: {tool!r:.60}.")
        if not name or set(name) & set("<>"):
            raise ValueError(f"TextEnvironment: a tool can't be named {name!r} in a request.")
        if name in named:
            raise ValueError(
                f"TextEnvironment: two tools are named {name!r}; give tools={{name: tool}}."
            )
        named[name] = tool
    return named


def sampling_of(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: Mapping[str, Any] | None,
    own_ends: Sequence[int] = (),
) -> SamplingParameters:
    """Sampling as ``generation_kwargs`` of TRL say it; a policy's own where there are none."""
    own = getattr(model, "sampling", None)
    if kwargs is None and isinstance(own, SamplingParameters):
        return own
    kwargs = dict(kwargs or {})
    ends = kwargs.get("eos_token_id", tokenizer.eos_token_id)
    ends = (ends,) if isinstance(ends, int) else tuple(ends or ())
    if "eos_token_id" not in kwargs:
        ends = tuple(dict.fromkeys([*ends, *own_ends]))
    settings: dict[str, Any] = {"stop_token_ids": tuple(end for end in ends if end != -1)}
    settings |= {k: v for k, v in kwargs.items() if k not in _IGNORED and (k, v) not in _NONE}
    if str(kwargs.get("do_sample", True)).lower() in ("false", "0"):
        settings["temperature"] = 0.0
    return SamplingParameters.from_kwargs(settings)


def scores_one_text(function: Callable[..., Any]) -> bool:
    """Whether a reward function is of one text, and not of the texts of all episodes.

    It is if :func:`~torchrl_envs.row_reward` marked it, or its first parameter is
    annotated with ``str``.
    """
    if scores_one_rollout(function):
        return True
    try:
        parameters = list(inspect.signature(function).parameters)
        while isinstance(function, functools.partial):
            function = function.func
        own = function if inspect.isroutine(function) else type(function).__call__
        return bool(parameters) and get_type_hints(own).get(parameters[0]) is str
    except (NameError, TypeError, ValueError):  # built-ins, and names that only a checker knows
        return False


# The syntax ``<request><Tool>query<call>result<response>``, and where a turn stops.

_TOOL: Final = re.compile(r"\s*<([^<>]+)>")


class RequestSyntax(NamedTuple):
    """The marks of requests."""

    request: str = "<request>"
    """Begins a request; the tool's name in angle brackets and the query follow."""
    call: str = "<call>"
    """Ends the query; the model stops here."""
    response: str = "<response>"
    """Ends the tool's result."""
    submit: str = "<submit>"
    """Ends the episode."""

    def parse(self, text: str) -> tuple[str, str] | None:
        """Tool and query of a request.

        Args:
            text: any text; the request is the last one before the first ``<call>`` after one.

        Returns:
            The tool's name and the query, or ``None`` if there is no well-formed request.
        """
        first = text.find(self.request)
        end = text.find(self.call, first) if first >= 0 else -1
        if end < 0:
            return None
        start = text.rfind(self.request, 0, end) + len(self.request)
        match = _TOOL.match(text, start, end)
        return None if match is None else (match.group(1), text[match.end() : end])


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of tokens, control tokens included; never empty where there are tokens."""
    text = str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
    return text or "".join(tokenizer.convert_ids_to_tokens(list(ids)))


class TextModel:
    """An engine and its tokenizer: samples turns that end at a text, and encodes what others say.

    Engines stop at tokens. Every token that could complete one of the texts stops the engine; where
    it did not complete one, the turn is continued. Nothing is re-tokenised.

    Args:
        engine: draws the tokens.
        tokenizer: of the engine's model, a fast one.
        sampling: the distribution and the budget; its stop tokens are the ends of a sequence.
        stop_texts: each ends with an ASCII character.

    Raises:
        ValueError: a stop text is empty or ends with another character.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParameters,
        stop_texts: Sequence[str],
    ) -> None:
        if not all(text and text[-1].isascii() for text in stop_texts):
            raise ValueError(
                f"A stop text must end with an ASCII character, got {list(stop_texts)}."
            )
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_texts = tuple(stop_texts)
        self.end_ids = frozenset(sampling.stop_token_ids or ())
        self.max_new_tokens = sampling.max_new_tokens
        last = {text[-1] for text in stop_texts}
        bytes_of = {f"<0x{ord(character):02X}>" for character in last}
        closers = [
            index
            for piece, index in tokenizer.get_vocab().items()
            if piece in bytes_of or last & set(piece)
        ]
        stops = tuple(sorted({*closers, *self.end_ids}))
        self._sampling = replace(sampling, stop_token_ids=stops)
        self._num_calls = 0
        self._guard = ControlTokenGuard(tokenizer)
        bos = tokenizer.bos_token_id
        begins = list(tokenizer("x")["input_ids"])
        self._prefix = [bos] if isinstance(bos, int) and begins[:1] == [bos] else []

    def _call_seeds(self, num_rows: int) -> list[int] | None:
        """A seed for each row of the next call; none where sampling has none."""
        self._num_calls += 1
        if (seed := self._sampling.seed) is None:
            return None
        return [stream_number(seed, self._num_calls, row) for row in range(num_rows)]

    def sample(self, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> list[Generation]:
        """A turn for each prompt.

        Args:
            prompts: token ids.
            budgets: most new tokens of each.

        Returns:
            What was sampled, up to the token that completes a stop text or the end of the
            sequence, which is part of it.
        """
        ids: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        ends = [Generation([], [], "length")] * len(prompts)
        waiting = list(range(len(prompts)))
        while waiting:
            params, own = seeded(self._engine, self._sampling, self._call_seeds(len(waiting)))
            drawn = self._engine.generate(
                [[*prompts[i], *ids[i]] for i in waiting],
                params,
                max_new_tokens=[budgets[i] - len(ids[i]) for i in waiting],
                **own,
            )
            going_on = []
            drawn = checked(self._engine, drawn, self._sampling, len(waiting))
            for i, generation in zip(waiting, drawn, strict=True):
                ids[i] += generation.ids
                log_probs[i] += generation.log_probs
                ends[i] = generation
                is_stopped = generation.finish_reason == "stop" and ids[i][-1] not in self.end_ids
                if is_stopped and len(ids[i]) < budgets[i]:
                    text = decode(self._tokenizer, ids[i])
                    if not any(stop in text for stop in self._stop_texts):
                        going_on.append(i)
            waiting = going_on
        return [
            Generation(ids[i], log_probs[i], end.finish_reason, end.error)
            for i, end in enumerate(ends)
        ]

    def encode(self, before: str, content: str, after: str, *, opens: bool) -> list[int]:
        """Token ids of ``before + content + after``.

        Args:
            before: the environment's own text; control tokens in it are control tokens.
            content: of somebody else; nothing in it becomes a control token.
            after: the environment's own text.
            opens: whether it begins the sequence.
        """
        pieces = self._guard.split(f"{before}{self._guard.escape(content)}{after}")
        runs = [(piece.text, piece.before) for piece in pieces if piece.control_id is None]
        texts, starts = [text for text, _ in runs], [start for _, start in runs]
        encoded = iter(self._guard.encode_texts(texts, starts))
        ids = list(self._prefix) if opens else []
        for piece in pieces:
            ids += next(encoded) if piece.control_id is None else [piece.control_id]
        return ids


# What happens in an episode in plain text: tools are called, room runs out, it is scored.

_CUT: Final = "..."
_REWARD: Final = "reward_fn"


class RequestTools(ToolSource):
    """Answers a turn's request with ``result<response>``, or with what is wrong with it.

    Args:
        tools: functions of a string, by name.
        syntax: of requests.
        max_result_chars: most characters of a result, without the mark that ends it.
        timeout_s: deadline of one call.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        syntax: RequestSyntax,
        max_result_chars: int,
        timeout_s: float,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self.tools, self.syntax, self.max_result_chars = tools, syntax, max_result_chars

    def read_turn(self, episode: Episode, text: str) -> Sequence[Job | Answer]:
        """The request of a turn that did not end its episode."""
        del episode
        name, query = self.syntax.parse(text) or ("", "")
        if name in self.tools:
            return [Job(functools.partial(self.tools[name], query), self._phrase, self.timeout_s)]
        wrong = f"Unknown tool {name}." if name else f"Unknown tool call: {text}"
        return [self._answer(wrong, is_error=True)]

    def _phrase(self, outcome: Outcome) -> Answer:
        failed = outcome.error is not None
        result = f"Tool error: {outcome.error}" if failed else result_text(outcome)
        return self._answer(result, is_error=failed)

    def _answer(self, result: str, *, is_error: bool) -> Answer:
        if len(result) > self.max_result_chars:
            kept = max(self.max_result_chars - len(_CUT), 0)
            result = f"{result[:kept]}{_CUT}"[: self.max_result_chars]
        content = f"{result}{self.syntax.response}"
        return Answer({"role": "tool", "content": content}, is_error=is_error)


class TextReward(EpisodeTransform):
    """Scores episodes by their last segments and the arguments of ``run``, their ``example``.

    Args:
        function: of all texts, or of one, see :func:`scores_one_text`; or it shows when asked.
        calls: runs it.
    """

    def __init__(self, function: Callable[..., Any], calls: ConcurrentCalls) -> None:
        super().__init__()
        self.function = function
        self._of_one = scores_one_text(function)
        self._calls = calls

    def finish_batch(self, episodes: Sequence[Episode]) -> None:
        """Score episodes."""
        outcomes = self._one_by_one(episodes) if self._of_one else self._at_once(episodes)
        for episode, outcome in zip(episodes, outcomes, strict=True):
            episode.score.add_outcome(_REWARD, outcome, who=_REWARD)

    def _one_by_one(self, episodes: Sequence[Episode]) -> list[Outcome]:
        chains = [
            [functools.partial(self.function, e.last_message["content"], **(e.example or {}))]
            for e in episodes
        ]
        return [chain[0] for chain in self._calls.run(chains)]

    def _at_once(self, episodes: Sequence[Episode]) -> list[Outcome]:
        texts = [episode.last_message["content"] for episode in episodes]
        arguments = [episode.example or {} for episode in episodes]
        lists = {name: [own[name] for own in arguments] for name in arguments[0]}
        ((outcome,),) = self._calls.run([[functools.partial(self.function, texts, **lists)]])
        values = outcome.value
        if _is_list(values) and len(values) == len(texts):
            return [Outcome(value) for value in values]
        each = self._one_by_one(episodes)
        scalars = [one for one in each if not (one.error or _is_list(one.value))]
        if (scalars and not _is_list(values)) or "'list'" in str(outcome.error):
            told = "reward_fn gave no list of %d rewards: it gets one text at a time."
            _log.warning(told, len(texts), exc_info=outcome.error)
            self._of_one = True
            return each
        found = "failed" if outcome.error is not None else f"returned {values!r:.80}"
        raise ValueError(
            f"TextEnvironment: reward_fn {found} when it got the texts of {len(texts)} episodes as "
            "a list. It must return a list of as many rewards; one that scores one text returns a "
            "number, and can be marked with @row_reward."
        ) from outcome.error


def _is_list(value: Any) -> bool:
    return isinstance(value, str) or (hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0)


# Episodes in plain text as histories of segments, and back.
#
# Shape legend: T tokens of an episode.


def episode_of(history: TextHistory) -> Episode:
    """An episode in which was said what a history shows; each segment is a message.

    Args:
        history: not empty.
    """
    record = ConversationRecord()
    ids, log_probs = history.tokens.tolist(), history.log_probs.tolist()
    segments = zip(history.text_spans, history.token_spans, history.system_spans, strict=True)
    for (first, last), (start, end), is_system in segments:
        role = ("tool" if record.messages else "user") if is_system else "assistant"
        record.messages.append({"role": role, "content": history.text[first:last]})
        source = Source.CONTENT if is_system else Source.MODEL
        record.extend_tokens(ids[start:end], [source] * (end - start), log_probs[start:end])
    size = len(record.messages)
    awaits = record.messages[-1]["role"] != "assistant"
    episode = Episode()
    episode.conversation = Conversations(
        [record], [Position(len(ids), size, size, awaits, len(ids) if awaits else 0)]
    )
    episode.num_turns = sum(not is_system for is_system in history.system_spans)
    if history.completed:
        (episode.truncate if history.truncated else episode.terminate)(history.stop_reason)
    return episode


def show(episode: Episode, history: TextHistory) -> TextHistory:
    """A history brought up to date: what was said since, how it ended, and its reward.

    Args:
        episode: whose messages and tokens begin with those of the history.
        history: may be empty.

    Returns:
        The history.
    """
    conversation, start = episode.conversation, len(history.tokens)
    ids, log_probs = conversation.token_ids(0), conversation.log_probs(0)
    new = groupby(conversation.assistant_mask(0)[start:].tolist())
    for message, (is_sampled, run) in zip(
        conversation.messages(0)[len(history.text_spans) :], new, strict=True
    ):
        end = start + sum(1 for _ in run)
        content, values = message["content"], log_probs[start:end]
        history.append_segment(content, ids[start:end], system=not is_sampled, log_probs=values)
        start = end
    if episode.is_done and not history.completed:
        history.complete(truncated=episode.is_truncated, stop_reason=episode.stop_reason)
    score = episode.score
    if score.is_scored or score.error:
        history.reward = score.reward
        history.reward_error = score.error
    return history


# Tools that a model calls in plain text: few-shot prompts, no chat template.
#
# Shape legend: T tokens of an episode.

Episodes = tuple[list[Tensor], list[Tensor], list[Tensor], list[float], list[TextHistory]]


class TextEnvironment:
    """Episodes in which a model calls tools with ``<request><Tool>query<call>``.

    The environment appends ``result<response>`` and the model goes on, until it says ``<submit>``
    or ends its text, calls nothing, or comes to a limit. A tool is a function of a string; the
    tools of all episodes run at once. Sampled tokens are kept as they were sampled.

    Args:
        model: a Transformers model, a policy (``LLMWrapperBase``) or an engine.
        tokenizer: of the model; a policy brings its own.
        tools: ``{name: tool}``, or a list of tools that are named after their class, or after
            themselves where they are functions. They may be ``async``.
        reward_fn: gets the last segments of all episodes, a list of strings, and the arguments of
            :meth:`run`, lists too; returns as many rewards. Marked with
            :func:`~torchrl_envs.row_reward`, or with ``str`` as the annotation of its
            first parameter, it gets those of one episode; also, from then on, where it can use
            one text and not a list.
        prompt: comes before every query: examples of how to call the tools.
        max_turns: most turns of the model.
        max_tool_response: most characters of a result; longer ones are cut, and end with ``...``.
        max_length: most tokens of an episode, query included.
        generation_kwargs: of :class:`~torchrl_modules.SamplingParameters`, and Transformers'
            ``do_sample`` (``False`` takes the most likely tokens) and ``eos_token_id``;
            ``pad_token_id`` is not needed. A policy's own when not given.
        max_tool_reponse: TRL's spelling of ``max_tool_response``.
        timeout_s: deadline of one tool call, and of one reward.
        syntax: other marks than the usual ones.

    Raises:
        TypeError: the model, a tool or the reward function is of the wrong type.
        ValueError: a limit is not positive, two tools have one name, or a name can't be written in
            a request.

    Example:
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> def reward(texts):
        ...     return [float("4" in text) for text in texts]
        >>> def add(query: str) -> str:
        ...     return str(sum(map(int, query.split("+"))))
        >>> model, sampling = tiny_qwen3(len(tokenizer)), {"max_new_tokens": 4}
        >>> env = TextEnvironment(model, tokenizer, [add], reward, generation_kwargs=sampling)
        >>> queries, responses, masks, rewards, histories = env.run(["2 + 2 is", "3 + 3 is"])
        >>> responses[0].dtype, responses[0].shape == masks[0].shape, len(rewards)
        (torch.int64, True, 2)
    """

    def __init__(
        self,
        model: PreTrainedModel | LLMWrapperBase | Engine,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tools: Mapping[str, Tool] | Sequence[Tool] = (),
        reward_fn: Callable[..., Any] | None = None,
        prompt: str = "",
        max_turns: int = 4,
        max_tool_response: int = 100,
        max_length: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        *,
        max_tool_reponse: int | None = None,
        timeout_s: float = 30.0,
        syntax: RequestSyntax = RequestSyntax(),  # noqa: B008 (a constant)
    ) -> None:
        self.max_tool_response = max_tool_response if max_tool_reponse is None else max_tool_reponse
        check_counts(
            "TextEnvironment",
            max_turns=max_turns,
            max_tool_response=self.max_tool_response,
            max_length=max_length,
        )
        if not callable(reward_fn):
            raise TypeError(
                "TextEnvironment: reward_fn must be a function of the texts and the arguments of "
                f"run, got {reward_fn!r:.60}."
            )
        tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
        if tokenizer is None:
            raise TypeError("TextEnvironment needs the tokenizer of the model: tokenizer=...")
        self.tokenizer = tokenizer
        self.tools = named_tools(tools)
        self.reward_fn = reward_fn
        self.prompt = prompt
        self.max_turns = max_turns
        self.max_length = max_length
        self.syntax = syntax
        stops, engine = (syntax.call, syntax.submit), engine_of(model)
        own_ends = getattr(engine, "end_token_ids", ())  # as in Transformers' generate()
        sampling = sampling_of(model, self.tokenizer, generation_kwargs, own_ends)
        self._model = TextModel(engine, self.tokenizer, sampling, stops)
        bounds = (max_length, getattr(engine, "max_model_len", None))
        self._max_tokens = min((bound for bound in bounds if bound is not None), default=1 << 62)
        self._runner = EpisodeRunner(ConcurrentCalls(timeout_s=timeout_s))
        answers = RequestTools(self.tools, syntax, self.max_tool_response, timeout_s)
        self._runner.set_transforms([answers, TextReward(reward_fn, self._runner.calls)])

    def run(self, queries: Sequence[str], **rewards_kwargs: Any) -> Episodes:
        """Run an episode for each query.

        Args:
            queries: what comes after the prompt.
            **rewards_kwargs: passed to the reward function, a list with an item per query each.

        Returns:
            ``queries``, ``responses`` (token ids, int64 ``[T]``), ``masks`` (1 on the tokens of a
            response that the model sampled, int64 ``[T]``), ``rewards`` (floats) and ``histories``,
            one of each per query, in order.

        Raises:
            ValueError: the reward function does not give a reward per episode, or an argument does
                not have an item per query.
            RuntimeError: the reward function raised, or missed its deadline.
        """
        episodes = [self._open(query) for query in queries]
        _set_examples(episodes, rewards_kwargs)
        self._runner.begin(episodes)
        try:
            for _ in range(self.max_turns):
                self._take_turns(_running(episodes))
                for episode in _running(episodes):
                    self._end_if_over(episode)
                self._answer(_running(episodes))
            self._end_if_full(_running(episodes))
            for episode in _running(episodes):
                episode.truncate(StopReason.MAX_STEPS)
            self._runner.finish(episodes)
        finally:
            self._runner.close(episodes)
        histories = [show(episode, TextHistory()) for episode in episodes]
        split = [history.split_query_response_tokens() for history in histories]
        return (
            [query for query, _, _ in split],
            [response for _, response, _ in split],
            [mask for _, _, mask in split],
            [history.reward for history in histories],
            histories,
        )

    # Events of episodes -------------------------------------------------------------------------

    def _open(self, query: str) -> Episode:
        ids = self._model.encode(self.prompt, query, "", opens=True)
        if not ids:
            raise ValueError("TextEnvironment: the prompt and the query are empty.")
        opening = [{"role": "user", "content": self.prompt + query}]
        episode = Episode()
        episode.conversation = Conversations.from_tokens([ids], [opening], awaits_response=True)
        return episode

    def _left(self, episode: Episode) -> int:
        """Tokens that an episode has room for."""
        return self._max_tokens - episode.conversation.num_tokens(0)

    def _end_if_full(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            if self._left(episode) < 1:
                episode.truncate(StopReason.CONTEXT_LENGTH)

    def _take_turns(self, episodes: Sequence[Episode]) -> None:
        """The model goes on with episodes that have room for a token."""
        self._end_if_full(episodes)
        episodes = _running(episodes)
        most = self._model.max_new_tokens
        generations = self._model.sample(
            [episode.conversation.ids(0) for episode in episodes],
            [min(most, self._left(episode)) for episode in episodes],
        )
        for episode, drawn in zip(episodes, generations, strict=True):
            episode.num_turns += 1
            if drawn.ids:
                said = {"role": "assistant", "content": decode(self.tokenizer, drawn.ids)}
                turn = Turn(drawn.ids, drawn.log_probs, said)
                episode.conversation = episode.conversation.append_turns([turn])
            if drawn.error is not None:
                episode.truncate(f"{StopReason.ERROR}: {drawn.error}")

    def _answer(self, episodes: Sequence[Episode]) -> None:
        """Run the tools that the last turns ask for, all at once, and encode what they answer."""
        runner, mark = self._runner, self.syntax.response
        runner.run(functools.partial(runner.run_safely, runner.dispatcher, "after_turn"), episodes)
        for episode in _running(episodes):
            conversation = episode.conversation
            (answer,) = conversation.waiting_messages(0)
            ids = self._model.encode("", answer["content"].removesuffix(mark), mark, opens=False)
            num_left = len(ids)
            if self.max_length is not None:
                num_left = max(self.max_length - conversation.num_tokens(0), 0)
            if num_left < len(ids):  # as many as the episode has room for
                ids = ids[:num_left]
                kept = [{**answer, "content": decode(self.tokenizer, ids)}] if ids else []
                conversation = conversation.replace_waiting([kept])
            encoded = EncodedMessages(ids, [Source.CONTENT] * len(ids))
            episode.conversation = conversation.append_encoded([encoded])

    def _end_if_over(self, episode: Episode, *, model_turn: bool = True) -> None:
        said = episode.last_message["content"] if episode.awaits_answer else ""
        is_full = self._left(episode) < 1
        if episode.is_done:
            return
        if self.syntax.submit in said:
            episode.terminate(StopReason.ANSWERED)
        elif model_turn and not (self.syntax.request in said and self.syntax.call in said):
            if episode.conversation.last_id(0) in self._model.end_ids:
                episode.terminate(StopReason.ANSWERED)
            else:
                episode.truncate(
                    StopReason.CONTEXT_LENGTH if is_full else StopReason.RESPONSE_LENGTH
                )
        elif is_full:
            episode.truncate(StopReason.CONTEXT_LENGTH)

    # The same on histories, one event at a time ---------------------------------------------------

    def begin(self, query: str) -> TextHistory:
        """A history of the prompt and a query; no part of the query becomes a control token.

        Raises:
            ValueError: both are empty.
        """
        return show(self._open(query), TextHistory())

    def generate(self, histories: Sequence[TextHistory]) -> list[TextHistory]:
        """Append a turn of the model to the histories that are not completed.

        The turn is as long as ``max_new_tokens``, ``max_length`` and the model allow; a history
        without room for a token is truncated.
        """
        episodes = [episode_of(history) for history in histories]
        self._take_turns(_running(episodes))
        return list(map(show, episodes, histories))

    def parse_tool_call(self, text: str) -> tuple[str | None, str | None]:
        """Tool and query of a request.

        Args:
            text: ``<request><Tool>query<call>``, perhaps after other text.

        Returns:
            The tool's name and the query; ``None`` twice if there is no well-formed request.
        """
        return self.syntax.parse(text) or (None, None)

    def step(self, history: TextHistory) -> TextHistory:
        """Answer the request in the last turn of a history."""
        episode = episode_of(history)
        self._answer([episode])
        return show(episode, history)

    def task_end_check(self, history: TextHistory, model_turn: bool = True) -> tuple[bool, bool]:
        """Whether an episode is over.

        Args:
            history: its history.
            model_turn: whether the model has just spoken, and not a tool.

        Returns:
            Whether it was truncated, and whether it has ended; ``False`` twice for one that was
            completed before.
        """
        episode = episode_of(history)
        self._end_if_over(episode, model_turn=model_turn)
        return (False, False) if history.completed else (episode.is_truncated, episode.is_done)

    def tasks_end_check(
        self, histories: Sequence[TextHistory], model_turn: bool = True
    ) -> list[TextHistory]:
        """Complete the episodes that are over, see :meth:`task_end_check`."""
        episodes = [episode_of(history) for history in histories]
        for episode in episodes:
            self._end_if_over(episode, model_turn=model_turn)
        return list(map(show, episodes, histories))

    def compute_reward(
        self, histories: Sequence[TextHistory], **reward_kwargs: Any
    ) -> list[TextHistory]:
        """Write the reward of each episode into its history.

        A reward that is no finite number is NaN, with the reason in ``reward_error``; so is that of
        an episode that failed or in which the model said nothing, which is not scored.

        Raises:
            ValueError: the function does not return one reward per episode.
            RuntimeError: the function raised, or missed its deadline.
        """
        episodes = [episode_of(history) for history in histories]
        _set_examples(episodes, reward_kwargs)
        self._runner.finish(episodes)
        return list(map(show, episodes, histories))

    # For trainers -------------------------------------------------------------------------------

    def rollouts(self, histories: Sequence[TextHistory]) -> dict[str, list[Any]]:
        """Finished episodes as the result of a ``rollout_func``, with ``env_reward``.

        Args:
            histories: of :meth:`run`.
        """
        starts = [history.token_spans[0][1] for history in histories]
        pairs = list(zip(histories, starts, strict=True))
        return {
            PROMPT_IDS: [h.tokens[:start].tolist() for h, start in pairs],
            COMPLETION_IDS: [h.tokens[start:].tolist() for h, start in pairs],
            LOG_PROBS: [h.log_probs[start:].tolist() for h, start in pairs],
            ENV_MASK: [h.token_masks[start:].tolist() for h, start in pairs],
            TRUNCATED_ROWS: [history.truncated for history in histories],
            "env_reward": [history.reward for history in histories],
        }

    def close(self) -> None:
        """Stop the threads of the tools."""
        self._runner.calls.close()


def _running(episodes: Sequence[Episode]) -> list[Episode]:
    return [episode for episode in episodes if not episode.is_done]


def _set_examples(episodes: Sequence[Episode], arguments: Mapping[str, Any]) -> None:
    """Give each episode its arguments of the reward function."""
    size = len(episodes)
    for name, values in arguments.items():
        if not hasattr(values, "__len__") or len(values) != size:
            raise ValueError(
                f"TextEnvironment: {name!r} needs an item per query, {size}; got {values!r:.60}."
            )
    for i, episode in enumerate(episodes):
        episode.example = {name: values[i] for name, values in arguments.items()}
