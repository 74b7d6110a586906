"""One MLGym environment, spoken to in the words of its own templates.

The interface is that of MLGym's first release, which TorchRL 0.14 wraps too. MLGym needs
containers and is not on PyPI: this was run against a stand-in with the same interface
(``test/envs/tasks/mlgym_stand_in``), never against MLGym itself.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchrl_data.messages import Message

Metrics = Mapping[str, float]
ScoreOf = Callable[[Metrics, Metrics], float]
"""From what an evaluation measured, and what the baseline reached (``{}`` if there is none)."""


def score_gain(metrics: Metrics, baseline: Metrics) -> float:
    """Gain over the baseline, by the metric ``Score``, or the only one that there is."""
    if "Score" not in metrics and len(metrics) != 1:
        raise ValueError(
            f"MLGym measured {sorted(metrics)}, and none is 'Score': say which counts with "
            "score=lambda metrics, baseline: ..."
        )
    name = "Score" if "Score" in metrics else next(iter(metrics))
    return float(metrics[name]) - float(baseline.get(name, 0.0))


class MLGymSession:
    """An ``MLGymEnv`` with its agent's commands and templates."""

    # Making it makes the environment, which starts a container.
    # make: makes an `MLGymEnv` whose attribute `config` is the agent's configuration (templates,
    # commands, environment variables).

    def __init__(self, make: Callable[[], Any], *, score: ScoreOf = score_gain) -> None:
        self._env = make()
        self._score = score
        self._config = self._env.config
        self._metrics: list[Metrics] = []
        self._reward = 0.0

    def reset(self) -> list[Message]:
        """Begin the task, install the agent's commands, and say what the task is."""
        env, config = self._env, self._config
        env.reset()
        variables = [f"{name}={value}" for name, value in config.env_variables.items()]
        output = env.communicate("\n".join([config.state_command.code, *variables]))
        if env.returncode != 0:
            raise RuntimeError(
                f"MLGym's shell refused the agent's variables (exit code {env.returncode}): "
                f"{output:.500}"
            )
        env.add_commands([command_file(Path(path)) for path in config.command_files])
        templates = [config.task_template, config.strategy_template]
        task = "\n".join(self._filled(each, "") for each in templates if each is not None)
        system = config.system_template.format(**self._constants())
        return [{"role": "system", "content": system}, {"role": "user", "content": task}]

    def step(self, action: str) -> tuple[str, bool]:
        """Run a command; what to tell the model, and whether the episode has ended."""
        observation, reward, is_over, info = self._env.step(action)
        self._reward += float(reward)
        self._metrics += info.get("score") or []
        text, config = observation or "", self._config
        if is_over:
            return text, True
        empty = config.next_step_no_output_template
        return self._filled(config.next_step_template if text.strip() else empty, text), False

    def get_reward(self) -> float:
        """The steps' own rewards, and the score of the last evaluation, if there was one."""
        if not self._metrics:
            return self._reward
        baselines: Sequence[Metrics] = self._env.task_args.baseline_scores
        return self._reward + self._score(self._metrics[-1], baselines[0] if baselines else {})

    def close(self) -> None:
        """Stop the container."""
        self._env.close()

    def _constants(self) -> dict[str, Any]:
        tools = self._config.tools_handler
        task = asdict(self._env.task_args)
        return {**task, "command_docs": tools.command_docs, **tools.env_variables}

    def _filled(self, template: str, observation: str) -> str:
        env = self._env
        state = json.loads(env.communicate(self._config.state_command.name))
        return template.format(
            **{**self._constants(), **state},
            current_step=env.current_step,
            remaining_steps=env.max_steps - env.current_step,
            observation=observation,
        )


def command_file(path: Path) -> dict[str, str]:
    """A file of commands as MLGym's ``add_commands`` takes it."""
    # path: a program that begins with `#!`, shell functions (`.sh`), or a helper whose name begins
    # with an underscore.
    contents = path.read_text(encoding="utf-8")
    if contents.lstrip().startswith("#!"):
        return {"name": path.stem, "contents": contents, "type": "script"}
    kind = "source_file" if path.suffix == ".sh" else "utility" if path.name[0] == "_" else None
    if kind is None:
        raise ValueError(
            f"MLGym's command file {path} is no program (no #! on its first line), no .sh file and "
            "no helper (a name with an underscore before it)."
        )
    return {"name": path.name, "contents": contents, "type": kind}
