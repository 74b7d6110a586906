"""Tools that a model calls in plain text: few-shot prompts, no chat template.

Shape legend: T tokens of an episode.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collectors.rollout_rows import COMPLETION_IDS, ENV_MASK, LOG_PROBS, PROMPT_IDS, TRUNCATED_ROWS
from torchrl_data.checks import check_counts
from torchrl_data.conversation import (
    Conversations,
    EncodedMessages,
    Source,
    Turn,
)
from torchrl_data.display.text_history import TextHistory
from torchrl_data.stop_reason import StopReason
from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.runner import EpisodeRunner
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.engine import Engine

from .events import RequestTools, TextReward
from .histories import episode_of, show
from .parts import Tool, engine_of, named_tools, text_sampling
from .requests import RequestSyntax, TextModel, decoded_text

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
        sampling = text_sampling(model, self.tokenizer, generation_kwargs, own_ends)
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
                said = {"role": "assistant", "content": decoded_text(self.tokenizer, drawn.ids)}
                turn = Turn(drawn.ids, drawn.log_probs, said)
                episode.conversation = episode.conversation.append_turns([turn])
            if drawn.error is not None:
                episode.truncate(f"{StopReason.ERROR}: {drawn.error}")

    def _answer(self, episodes: Sequence[Episode]) -> None:
        """Run the tools that the last turns ask for, all at once, and encode what they answer."""
        mark = self.syntax.response
        self._runner.run(self._runner.answer, episodes)
        for episode in _running(episodes):
            conversation = episode.conversation
            (answer,) = conversation.waiting_messages(0)
            ids = self._model.encode("", answer["content"].removesuffix(mark), mark, opens=False)
            num_left = len(ids)
            if self.max_length is not None:
                num_left = max(self.max_length - conversation.num_tokens(0), 0)
            if num_left < len(ids):  # as many as the episode has room for
                ids = ids[:num_left]
                kept = [{**answer, "content": decoded_text(self.tokenizer, ids)}] if ids else []
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
        """Return whether an episode is over.

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
