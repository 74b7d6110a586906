"""MLGym's research tasks: a container per rollout, and shell commands in code blocks.

Shape legend: B rows.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchrl.envs.transforms import Compose

from torchrl_data import import_package
from torchrl_data.pretrained import load_pretrained
from torchrl_data.stop_reason import StopReason
from torchrl_envs.code_blocks import code_blocks
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.rewards import RewardSource
from torchrl_envs.episode.chat_env import ChatEnv
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.episode.tool_source import Answer, Job, ToolSource
from torchrl_envs.tool_results import clean_text, environment_error
from torchrl_envs.tools.instances import Instance, start_instance

from .session import MLGymSession, ScoreOf, score_gain

NO_ACTION: Final = (
    "No command was run: put exactly one command into a code block, between two lines of ```."
)
REPOSITORY: Final = "https://github.com/facebookresearch/MLGym"


class MLGymActions(ToolSource, RewardSource):
    """Runs the last code block of each turn in the row's MLGym environment."""

    # The answer is a message of the user in MLGym's own words. A turn without a closed block is
    # answered with `NO_ACTION`. The episode ends when MLGym says so; a step that raises or misses
    # its deadline loses the environment, and the row alone is truncated and unscorable.
    # environments: make an `MLGymEnv` each, by task; see `MLGymSession`.

    def __init__(
        self,
        environments: Mapping[str, Callable[[], Any]],
        score: ScoreOf,
        reward_wrong_format: float,
        *,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self.reward_wrong_format = reward_wrong_format
        self.start_timeout_s = start_timeout_s
        session = functools.partial(functools.partial, MLGymSession, score=score)
        self._factories = {task: session(make) for task, make in environments.items()}

    @property
    def reward_names(self) -> list[str]:
        """One."""
        return ["MLGym"]

    async def begin(self, episode: Episode) -> None:
        """Start an environment; what it says is the query."""
        task = str((episode.example or {}).get("task"))
        instance = Instance(f"MLGym {task}", self._factories[task])
        episode.query = await start_instance(self, episode, instance, MLGymSession, {})

    def read_turn(self, episode: Episode, text: str) -> list[Job | Answer]:
        """The command of a turn."""
        instance: Instance | None = episode.resources.get(self)
        if instance is None:
            return []
        blocks = [block for block in code_blocks(text) if block.is_closed and block.code.strip()]
        if not blocks:
            num_wrong = episode.memory.get(self.key, 0) + 1
            episode.memory = {**episode.memory, self.key: num_wrong}
            return [Answer({"role": "user", "content": NO_ACTION}, is_error=True)]
        step = functools.partial(instance.environment.step, blocks[-1].code)
        position = blocks[-1].position
        return [Job(step, self._phrase, self.timeout_s, lane=episode.id, position=position)]

    def _phrase(self, outcome: Outcome) -> Answer:
        if outcome.error is not None:
            reason = environment_error(outcome.error, "MLGym")
            return Answer(None, is_error=True, stop_reason=reason, is_truncation=True)
        text, is_over = outcome.value
        message = {"role": "user", "content": clean_text(text, self.max_result_bytes)}
        return Answer(message, stop_reason=StopReason.ENVIRONMENT_DONE if is_over else "")

    async def finish(self, episode: Episode) -> None:
        """Score the episode by what the environment measured."""
        instance: Instance | None = episode.resources.get(self)
        if instance is None:
            return
        (outcome,) = await self.call(instance.environment.get_reward, timeout_s=self.timeout_s)
        if outcome.error is None:
            wrong = self.reward_wrong_format * episode.memory.get(self.key, 0)
            outcome = Outcome(outcome.value + wrong)
        episode.score.add_outcome(self.reward_names[0], outcome, who="MLGym")


class MLGymWrapper(EpisodeEnv):
    """Conversations with MLGym: each turn's code block is a command, its output the answer.

    A :class:`~torchrl_envs.ChatEnv` with data (one row per task), an MLGym environment per rollout
    and its reward: the steps' own, plus the score of the last evaluation (``validate`` or
    ``submit``) less that of the task's baseline. It was run against a stand-in with MLGym's
    interface, see :mod:`~torchrl_tasks.mlgym.session`.

    Args:
        environments: make an ``MLGymEnv`` each, by the task's name. Its attribute ``config`` must
            be the agent's configuration. Called once per episode; making one starts a container.
        num_envs: rows, B, each with its own container.
        repeats: rollouts of one draw, which form a group.
        shuffle: whether tasks are drawn in random order.
        seed: of that order.
        num_epochs: passes over the tasks; ``None`` goes on for ever.
        score: of what was measured and the baseline; the metric ``Score``, or the only one, less
            the baseline's when not given.
        reward_wrong_format: added for each turn without a code block.
        timeout_s: deadline of a step, in seconds; longer than MLGym's own of a training run.
        start_timeout_s: deadline of starting a container, and of setting up the task, in seconds.
        **kwargs: see :class:`~torchrl_envs.ChatEnv`.

    Raises:
        ValueError: there is no task, or a setting is out of range.
    """

    def __init__(
        self,
        environments: Mapping[str, Callable[[], Any]],
        *,
        num_envs: int = 1,
        repeats: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        num_epochs: int | None = None,
        score: ScoreOf = score_gain,
        reward_wrong_format: float = 0.0,
        timeout_s: float = 4000.0,
        start_timeout_s: float = 1800.0,
        **kwargs: Any,
    ) -> None:
        if not environments:
            raise ValueError("MLGymWrapper: no environment was given; give {task: factory}.")
        rows = [{"prompt": task, "task": task} for task in environments]
        how: Any = {"shuffle": shuffle, "seed": seed, "num_epochs": num_epochs}
        limits = {"timeout_s": timeout_s, "start_timeout_s": start_timeout_s}
        primer = DataLoadingPrimer(rows, group_size=repeats, **how)
        actions = MLGymActions(environments, score, reward_wrong_format, **limits)
        parts = Compose(primer, actions)  # type: ignore[call-arg]
        super().__init__(ChatEnv(batch_size=num_envs, **kwargs), parts)
        self.check()


def make_mlgym(
    *,
    task: str | None = None,
    tasks: Sequence[str] | None = None,
    tokenizer: Any = None,
    max_steps: int = 10,
    container_type: str = "docker",
    seed: int = 42,
    **kwargs: Any,
) -> MLGymWrapper:
    """MLGym's tasks by name. Nothing is started before the first reset.

    Args:
        task: one task, ``"prisonersDilemma"`` say.
        tasks: or several, of which each group draws one.
        tokenizer: the policy's, or the name of one.
        max_steps: most commands of an episode.
        container_type: ``"docker"`` or ``"podman"``.
        seed: MLGym's, and of the order of the tasks.
        **kwargs: see :class:`MLGymWrapper`.

    Raises:
        ValueError: not exactly one of ``task`` and ``tasks`` is given.
        ImportError: MLGym is not installed.
        RuntimeError: the working folder is not MLGym's, to which its configurations are relative.

    Example:
        >>> env = make_mlgym(task="prisonersDilemma", tokenizer="Qwen/Qwen3-0.6B")  # doctest: +SKIP
        >>> rows = LLMCollector(env, policy).collect()  # doctest: +SKIP
    """
    names = [task] if task is not None else list(tasks or ())
    if not names or (task is not None and tasks is not None):
        raise ValueError(
            f"make_mlgym takes exactly one of task and tasks, got {task!r}, {tasks!r}."
        )
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = load_pretrained(AutoTokenizer, tokenizer)
    install = (
        f"it is not on PyPI, so git clone {REPOSITORY}, then pip install -e MLGym, with docker or "
        "podman for its containers"
    )
    mlgym = import_package("mlgym", who="make_mlgym", install=install)
    folder = Path(str(mlgym.__file__)).parent.parent.resolve()
    if Path.cwd().resolve() != folder:
        raise RuntimeError(
            f"MLGym finds its tasks in its own folder: start the program in {folder}, "
            f"not in {Path.cwd()}."
        )
    devices = itertools.count()
    settings = {"max_steps": max_steps, "container_type": container_type, "seed": seed}
    settings |= {"verbose": False, "aliases_file": "docker/aliases.sh"}

    def make(task: str) -> Any:
        """An ``MLGymEnv`` and its agent's configuration. Starts a container."""
        environment: Any = importlib.import_module("mlgym.environment.env")
        agent: Any = importlib.import_module("mlgym.agent.base")
        backend: Any = importlib.import_module("mlgym.backend.base")
        path = f"tasks/{task}.yaml"
        arguments = environment.EnvironmentArguments(task_config_path=path, **settings)
        # A device's name is part of the container's: no two rows share one.
        env = environment.MLGymEnv(arguments, devices=[f"cpu_{next(devices)}"])
        path = mlgym.CONFIG_DIR / "agents" / "default.yaml"
        model = backend.ModelArguments("")
        env.config = agent.AgentArguments(model=model, agent_config_path=path).config
        return env

    environments = {name: functools.partial(make, name) for name in names}
    return MLGymWrapper(environments, tokenizer=tokenizer, seed=seed, **kwargs)
