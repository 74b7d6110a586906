"""Collector whose rollouts are made by a user's function, as TRL has it.

The loop::

    draw prompts -> rollout_func(prompts) -> rows -> rewards -> postproc -> replay buffer
                    the trainer waits for the whole batch

Shape legend: B rollouts, T tokens of a rollout (ragged).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from tensordict import TensorDictBase, lazy_stack
from torchrl.data import ReplayBuffer
from transformers import PreTrainedTokenizerBase

from torchrl_data.conversation import (
    ConversationRecord,
    Conversations,
    Position,
    Source,
    stream_number,
)
from torchrl_data.messages import Message
from torchrl_data.stop_reason import StopReason
from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.rewards import UnscoredWatch
from torchrl_envs.episode.chat_env import is_ids
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_entries import batch_of_ended
from torchrl_envs.episode.runner import EpisodeRunner
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_envs.rewards.scoring_call import RewardFunction
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.checked_generation import checked, seeded

from .collector import Collector, PostProcessing
from .composition_checks import reward_weights, weigh_sources
from .rollout_rows import RolloutRow, check_rollouts
from .trajectory_rows import trajectory_rows
from .weight_update.weight_updater import WeightUpdater

_FIELDS: Final = "rollout_func"
"""Where an episode keeps the further fields that the function returned."""
RolloutFunction = Callable[[list[Any], "RolloutFunctionCollector"], Mapping[str, Any]]


class RolloutFunctionCollector(Collector):
    """Collects what a user's own rollout function returns; TRL's ``rollout_func``.

    ``rollout_func(prompts, collector)`` gets one prompt per rollout (the rollouts of a group come
    one after the other) and this collector, whose ``policy`` and ``processing_class`` it may use,
    and returns a dictionary of lists: ``prompt_ids``, ``completion_ids``, ``logprobs`` (of the
    distribution that was sampled from), and if it likes ``env_mask`` (0 on tokens that the policy
    did not sample), ``truncated``, and further fields, which reward functions get by their names.
    ``collect()`` gives rows ``[B]`` as :meth:`~collectors.LLMCollector.collect` does, in which the
    response is everything after the prompt; it raises ``TypeError`` or ``ValueError``, with the key
    and the row, where the function returned something else.

    Args:
        rollout_func: the function.
        policy: whose weights are trained.
        data: where prompts come from, in groups.
        num_rollouts: rollouts of a batch; whole groups.
        reward_functions: score the rollouts, see
            :class:`~torchrl_envs.rewards.functions.RewardFunctions`.
        reward_field: a returned field that is a reward by itself, ``"env_reward"`` say.
        replay_buffer: extended with every batch.
        total_rollouts: stop after this many; ``None`` goes on while there is data.
        postproc: changes a batch before it goes into the buffer.
        weight_updater: how :meth:`update_policy_weights_` reaches the policy; in process when not
            given.

    Raises:
        ValueError: there is no reward, or ``num_rollouts`` does not hold whole groups.

    Example:
        >>> from torchrl_envs import DataLoadingPrimer
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> def rollout(prompts, collector):
        ...     said = generate_rollout_completions(collector, prompts)
        ...     names = "prompt_ids", "completion_ids", "logprobs"
        ...     lists = {name: [each[name] for each in said] for name in names}
        ...     return lists | {"env_reward": [1.0] * len(said)}
        >>> model, sampling = tiny_qwen3(len(tokenizer)), {"max_new_tokens": 4}
        >>> policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling)
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?"}], group_size=2)
        >>> collector = RolloutFunctionCollector(
        ...     rollout, policy, data, num_rollouts=2, reward_field="env_reward"
        ... )
        >>> rows = collector.collect()
        >>> rows.shape, rows["reward"].shape, rows["group_id"]
        (torch.Size([2]), torch.Size([2, 1, 1]), tensor([0, 0]))
    """

    def __init__(
        self,
        rollout_func: RolloutFunction,
        policy: Any,
        data: DataLoadingPrimer,
        *,
        num_rollouts: int,
        reward_functions: RewardFunctions | Sequence[RewardFunction] = (),
        reward_field: str | None = None,
        replay_buffer: ReplayBuffer | None = None,
        total_rollouts: int | None = None,
        postproc: PostProcessing | None = None,
        weight_updater: WeightUpdater | None = None,
    ) -> None:
        if num_rollouts < 1 or num_rollouts % data.group_size:
            raise ValueError(
                f"RolloutFunctionCollector: num_rollouts must hold whole groups of "
                f"{data.group_size}, got {num_rollouts}."
            )
        functions: RewardFunctions | None = None
        if reward_functions:
            made = isinstance(reward_functions, RewardFunctions)
            functions = reward_functions if made else RewardFunctions(reward_functions)
        if reward_field is None and functions is None:
            raise ValueError(
                "RolloutFunctionCollector: no reward. Give reward_functions=[...], or name with "
                "reward_field= the field of rollout_func's result that is the reward."
            )
        self.rollout_func = rollout_func
        self.data = data
        self.num_rollouts = num_rollouts
        self.reward_field = reward_field
        self.reward_functions = functions
        self._watch = UnscoredWatch()
        super().__init__(
            policy,
            [data],
            replay_buffer=replay_buffer,
            total_episodes=total_rollouts,
            postproc=postproc,
            weight_updater=weight_updater,
            reward_functions=[] if functions is None else [functions],
        )
        own = {} if reward_field is None else {reward_field: 1.0}
        weigh_sources(replay_buffer, own | reward_weights([functions]))
        self.total_rollouts = total_rollouts
        self._num_calls = 0
        self._runner = EpisodeRunner(ConcurrentCalls())
        self._runner.set_transforms([data])

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer, by the name that TRL's trainers have for it."""
        return self.policy.tokenizer

    def next_call(self) -> int:
        """Count a call of :func:`generate_rollout_completions` in this batch; from 0."""
        self._num_calls += 1
        return self._num_calls - 1

    def _run_batch(self) -> tuple[TensorDictBase, int]:
        self._num_calls = 0
        drawn = [Episode(row) for row in range(self.num_rollouts)]
        self._runner.begin(drawn)
        try:
            # Finite data may end inside a batch.
            episodes = [episode for episode in drawn if episode.stop_reason != StopReason.NO_DATA]
            version = self.policy_version  # before the function may push another one
            size = getattr(self.policy, "vocab_size", None)
            outputs = self.rollout_func([episode.query for episode in episodes], self)
            rollouts = check_rollouts(outputs, len(episodes), vocab_size=size)
            for episode, rollout in zip(episodes, rollouts, strict=True):
                episode.conversation = rollout_conversation(
                    rollout, episode.query, self.processing_class, version
                )
                if rollout.truncated:
                    episode.truncate(StopReason.TRUNCATED)
                else:
                    episode.terminate(StopReason.ANSWERED)
                episode.memory = {_FIELDS: rollout.extra}
            self._score(episodes)
        finally:
            self._runner.close(drawn)
        names = [] if self.reward_field is None else [self.reward_field]
        if self.reward_functions is not None:
            names += self.reward_functions.reward_names
        batch = batch_of_ended(episodes, names)
        rows = trajectory_rows(batch, range(len(episodes)))
        return lazy_stack([row for own in rows for row in own]), len(episodes)

    def _score(self, episodes: Sequence[Episode]) -> None:
        fields = [episode.memory[_FIELDS] for episode in episodes]
        if self.reward_field is not None:
            if self.reward_field not in fields[0]:
                raise ValueError(
                    f"rollout_func did not return {self.reward_field!r}, the reward field; it "
                    f"returned the fields {sorted(fields[0])}."
                )
            for episode, own in zip(episodes, fields, strict=True):
                outcome = Outcome(own[self.reward_field])
                episode.score.add_outcome(self.reward_field, outcome, who=self.reward_field)
        if self.reward_functions is not None:
            # Functions get the returned fields by their names, like columns of the data.
            scored = [episode.fork() for episode in episodes]
            for episode, own in zip(scored, fields, strict=True):
                episode.example = {**(episode.example or {}), **own}
            self.reward_functions.score(scored, self._runner.calls)
        self._watch.record([episode.score for episode in episodes])

    def shutdown(self) -> None:
        """Stop the threads of the reward functions."""
        self._runner.calls.close()


def generate_rollout_completions(owner: Any, prompts: Sequence[Any]) -> list[dict[str, Any]]:
    """Sample one completion per prompt with the policy of a collector.

    Args:
        owner: the collector that a rollout function is given, or anything with a ``policy``.
        prompts: a string or a list of messages each, or token ids: those of an earlier result with
            more after them go on exactly where it ended.

    Returns:
        One dictionary per prompt: ``prompt_ids``, ``completion_ids`` and ``logprobs`` (lists),
        ``text``, and ``finish_reason`` (``"stop"``, ``"length"`` or ``"error: ..."``, with an empty
        completion).

    Raises:
        TypeError: a prompt is neither.
        ValueError: a prompt holds images.

    Example:
        >>> from types import SimpleNamespace
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model, sampling = tiny_qwen3(len(tokenizer)), {"max_new_tokens": 4, "min_tokens": 4}
        >>> policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling)
        >>> [said] = generate_rollout_completions(SimpleNamespace(policy=policy), ["2 + 2?"])
        >>> len(said["completion_ids"]) == len(said["logprobs"]), said["finish_reason"]
        (True, 'length')
    """
    policy: LLMWrapperBase = owner.policy
    ids = {i: [int(t) for t in prompt] for i, prompt in enumerate(prompts) if is_ids(prompt)}
    by_messages = [i for i in range(len(prompts)) if i not in ids]
    if by_messages:
        chats = Conversations.from_messages([prompt_messages(prompts[i]) for i in by_messages])
        encoded = policy.encoder.encode_waiting(chats)
        if any(encoded.images(k) for k in range(len(encoded))):
            raise ValueError(
                "generate_rollout_completions: a prompt holds images, and what a rollout_func "
                "gives back has none. Use an environment (ChatEnv, EnvironmentTools) instead."
            )
        ids |= {i: encoded.ids(k) for k, i in enumerate(by_messages)}
    asked = [ids[i] for i in range(len(prompts))]
    params, own = policy.sampling, dict[str, Any]()
    if params.seed is not None and isinstance(owner, RolloutFunctionCollector):
        # Other numbers in each call of each batch, and the same ones in a resumed run.
        call = (params.seed, owner.num_collected, owner.next_call())
        seeds = [stream_number(*call, row) for row in range(len(asked))]
        params, own = seeded(policy.engine, params, seeds)
    given = policy.engine.generate(asked, params, **own)
    generations = checked(policy.engine, given, policy.sampling, len(prompts))
    texts = policy.encoder.decode_responses([g.ids for g in generations])
    return [
        {
            "prompt_ids": row,
            "completion_ids": list(drawn.ids),
            "logprobs": list(drawn.log_probs),
            "text": text,
            "finish_reason": f"error: {drawn.error}" if drawn.error else drawn.finish_reason,
        }
        for row, drawn, text in zip(asked, generations, texts, strict=True)
    ]


def prompt_messages(prompt: Any) -> list[Message]:
    """A prompt of a data set as messages.

    Args:
        prompt: a string (what the user says) or a list of messages.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt):
        return [dict(message) for message in prompt]
    raise TypeError(
        f"A prompt is a string or a list of messages, got {type(prompt).__name__}: {prompt!r:.60}."
    )


def rollout_conversation(
    rollout: RolloutRow, prompt: Any, tokenizer: PreTrainedTokenizerBase, policy_version: int
) -> Conversations:
    """A rollout as a finished conversation: its tokens as they are, its text decoded from them.

    Args:
        rollout: checked.
        prompt: a string or a list of messages.
        tokenizer: decodes the completion.
        policy_version: stamped on the sampled tokens.
    """
    record = ConversationRecord()
    record.messages.extend(prompt_messages(prompt))
    record.first_response = len(record.messages)
    record.extend_tokens(rollout.prompt_ids, [Source.CONTENT] * len(rollout.prompt_ids))
    start = 0
    for sampled, run in groupby(rollout.sampled):
        end = start + len(list(run))
        ids = rollout.completion_ids[start:end]
        more: Any = (rollout.log_probs[start:end], policy_version) if sampled else ()
        source = Source.MODEL if sampled else Source.CONTENT
        record.extend_tokens(ids, [source] * len(ids), *more)
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        role = "assistant" if sampled else "tool"
        record.messages.append({"role": role, "content": text})
        start = end
    size = len(record.messages)
    position = Position(len(record.ids), size, size, response_start=len(rollout.prompt_ids))
    return Conversations([record], [position])
