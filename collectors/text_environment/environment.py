"""Tools that a model calls in plain text: few-shot prompts, no chat template.

Shape legend: T tokens of an episode.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collectors.rollout_checks import (
    COMPLETION_IDS,
    ENV_MASK,
    LOG_PROBS,
    PROMPT_IDS,
    TRUNCATED_ROWS,
)
from torchrl_data.display.text_history import TextHistory
from torchrl_envs.concurrency.calls import Call, ConcurrentCalls, Outcome
from torchrl_envs.entries.rewards import number_or_error, raised_text
from torchrl_envs.rewards.calls import scores_one_rollout
from torchrl_envs.tool_calls.results import result_text
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.protocol import Engine

from .parts import Tool, engine_of, named_tools, sampling_of, tokenizer_of
from .requests import RequestSyntax, StoppingSampler, TextEncoder, decode

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
            :meth:`run`; returns as many rewards. Marked with
            :func:`~torchrl_envs.rewards.calls.row_reward` it gets those of one episode.
        prompt: comes before every query: examples of how to call the tools.
        max_turns: most turns of the model.
        max_tool_response: most characters of a result; longer ones are cut and end with ``...``.
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
        limits = {
            "max_turns": max_turns,
            "max_tool_response": self.max_tool_response,
            "max_length": 1 if max_length is None else max_length,
        }
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"TextEnvironment: {name} must be at least 1, got {value}.")
        if not callable(reward_fn):
            raise TypeError(
                "TextEnvironment: reward_fn must be a function of the texts and the arguments of "
                f"run, got {reward_fn!r:.60}."
            )
        self.tokenizer = tokenizer_of(model, tokenizer)
        self.tools = named_tools(tools)
        self.reward_fn = reward_fn
        self.prompt = prompt
        self.max_turns = max_turns
        self.max_length = max_length
        self.syntax = syntax
        self._encoder = TextEncoder(self.tokenizer)
        sampling = sampling_of(model, self.tokenizer, generation_kwargs)
        stops = (syntax.call, syntax.submit)
        self._sampler = StoppingSampler(engine_of(model), self.tokenizer, sampling, stops)
        self._calls = ConcurrentCalls(timeout_s=timeout_s)

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
        """
        for name, values in rewards_kwargs.items():
            if not hasattr(values, "__len__") or len(values) != len(queries):
                raise ValueError(
                    f"TextEnvironment.run: {name!r} needs an item per query, {len(queries)}; got "
                    f"{values!r:.60}."
                )
        histories = [self.begin(query) for query in queries]
        for _ in range(self.max_turns):
            if all(history.completed for history in histories):
                break
            self.tasks_end_check(self.generate(histories))
            self._answer([history for history in histories if not history.completed])
            self.tasks_end_check(histories, model_turn=False)
        for history in histories:
            if not history.completed:
                history.complete(truncated=True, stop_reason="max_turns")
        self.compute_reward(histories, **rewards_kwargs)
        split = [history.split_query_response_tokens() for history in histories]
        return (
            [query for query, _, _ in split],
            [response for _, response, _ in split],
            [mask for _, _, mask in split],
            [history.reward for history in histories],
            histories,
        )

    def begin(self, query: str) -> TextHistory:
        """A history of the prompt and a query; no part of the query becomes a control token.

        Raises:
            ValueError: both are empty.
        """
        ids = self._encoder.encode(self.prompt, query, "", opens=True)
        if not ids:
            raise ValueError("TextEnvironment: the prompt and the query are empty.")
        return TextHistory(self.prompt + query, torch.tensor(ids), system=True)

    # One turn -----------------------------------------------------------------------------------

    def generate(self, histories: Sequence[TextHistory]) -> list[TextHistory]:
        """Append a turn of the model to the histories that are not completed.

        The turn is as long as ``max_new_tokens``, ``max_length`` and the model allow; a history
        without room for a token is truncated.
        """
        rooms = {id(history): self._room(history) for history in histories}
        for history in histories:
            if not history.completed and rooms[id(history)] < 1:
                history.complete(truncated=True, stop_reason="max_length")
        active = [history for history in histories if not history.completed]
        turns = self._sampler.sample(
            [history.tokens.tolist() for history in active],
            [min(self._sampler.max_new_tokens, rooms[id(history)]) for history in active],
        )
        for history, turn in zip(active, turns, strict=True):
            if turn.ids:
                text = decode(self.tokenizer, turn.ids)
                log_probs = torch.tensor(turn.log_probs)
                history.append_segment(
                    text, torch.tensor(turn.ids), system=False, log_probs=log_probs
                )
            if turn.error is not None:
                history.complete(truncated=True, stop_reason=f"error: {turn.error}")
        return list(histories)

    def _room(self, history: TextHistory) -> int:
        limits = [limit for limit in (self.max_length, self._sampler.max_model_len) if limit]
        return min(limits, default=1 << 62) - len(history.tokens)

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
        self._answer([history])
        return history

    def _answer(self, histories: Sequence[TextHistory]) -> None:
        """Run the tools that the last turns ask for, all at once, and append their results."""
        requests = [self._prepare(history.last_text_segment) for history in histories]
        chains = [[] if isinstance(request, str) else [request] for request in requests]
        outcomes = self._calls.run(chains)
        for history, request, outcome in zip(histories, requests, outcomes, strict=True):
            text = request if isinstance(request, str) else _tool_text(outcome[0])
            if len(text) > self.max_tool_response:
                text = f"{text[: self.max_tool_response]}..."
            self._append_response(history, text)

    def _prepare(self, turn: str) -> Call | str:
        """A call that is ready to run, or what is wrong with the request."""
        name, query = self.parse_tool_call(turn)
        if name is None or query is None:
            return f"Unknown tool call: {turn}"
        if name not in self.tools:
            return f"Unknown tool {name}."
        return functools.partial(self.tools[name], query)

    def _append_response(self, history: TextHistory, text: str) -> None:
        ids = self._encoder.encode("", text, self.syntax.response, opens=False)
        text += self.syntax.response
        room = len(ids) if self.max_length is None else self.max_length - len(history.tokens)
        if room < len(ids):
            ids = ids[: max(room, 0)]
            text = decode(self.tokenizer, ids) if ids else ""
        if ids:
            history.append_segment(text, torch.tensor(ids), system=True)

    # The end ------------------------------------------------------------------------------------

    def task_end_check(self, history: TextHistory, model_turn: bool = True) -> tuple[bool, bool]:
        """Whether an episode is over.

        Args:
            history: its history.
            model_turn: whether the model has just spoken, and not a tool.

        Returns:
            Whether it was truncated, and whether it has ended; ``False`` twice for one that was
            completed before.
        """
        truncated, reason = self._end(history, model_turn)
        return truncated, bool(reason)

    def tasks_end_check(
        self, histories: Sequence[TextHistory], model_turn: bool = True
    ) -> list[TextHistory]:
        """Complete the episodes that are over, see :meth:`task_end_check`."""
        for history in histories:
            truncated, reason = self._end(history, model_turn)
            if reason:
                history.complete(truncated=truncated, stop_reason=reason)
        return list(histories)

    def _end(self, history: TextHistory, model_turn: bool) -> tuple[bool, str]:
        if history.completed:
            return False, ""
        said = "" if history.system_spans[-1] else history.last_text_segment
        if self.syntax.submit in said:
            return False, "submitted"
        if model_turn and not self.syntax.is_request(said):
            if int(history.tokens[-1]) in self._sampler.end_ids:
                return False, "answered"
            return True, "max_length" if self._room(history) < 1 else "response_length"
        if self._room(history) < 1:
            return True, "max_length"
        return False, ""

    def compute_reward(
        self, histories: Sequence[TextHistory], **reward_kwargs: Any
    ) -> list[TextHistory]:
        """Write the reward of each episode into its history.

        A reward that is no finite number is NaN, with the reason in ``reward_error``.

        Raises:
            ValueError: the function does not return one reward per episode.
            RuntimeError: the function raised, or missed its deadline.
        """
        texts = [history.last_text_segment for history in histories]
        if scores_one_rollout(self.reward_fn):
            rows = [{name: v[i] for name, v in reward_kwargs.items()} for i in range(len(texts))]
            chains = [
                [functools.partial(self.reward_fn, text, **row)]
                for text, row in zip(texts, rows, strict=True)
            ]
            outcomes = [chain[0] for chain in self._calls.run(chains)]
        else:
            outcomes = self._rewards_of_all(texts, reward_kwargs)
        for history, outcome in zip(histories, outcomes, strict=True):
            if outcome.error is not None:
                value, error = None, raised_text(outcome.error, "reward_fn")
            else:
                value, error = number_or_error(outcome.value, "reward_fn")
            history.reward = float("nan") if value is None else value
            history.reward_error = error
        return list(histories)

    def _rewards_of_all(
        self, texts: Sequence[str], reward_kwargs: Mapping[str, Any]
    ) -> list[Outcome]:
        call = functools.partial(self.reward_fn, list(texts), **reward_kwargs)
        outcome = self._calls.run([[call]])[0][0]
        if outcome.error is not None:
            raise RuntimeError("TextEnvironment: reward_fn failed") from outcome.error
        values = outcome.value
        if not hasattr(values, "__len__") or isinstance(values, str) or len(values) != len(texts):
            raise ValueError(
                f"TextEnvironment: reward_fn must return a list of {len(texts)} rewards, one per "
                f"text, got {values!r:.80}. Mark it with row_reward if it scores one text."
            )
        return [Outcome(value) for value in values]

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
        self._calls.close()


def _tool_text(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"Tool error: {outcome.error}"
    return result_text(outcome)
