"""A model of this process that plays the simulated user: ``task.user=smollm2``."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.settings.schema import PolicyConfig
from torchrl_data import ConversationEncoder, ToolsNotShownError
from torchrl_data.messages import Message
from torchrl_envs import PolicyAnswers, SimulatedUser
from torchrl_envs.datasets import MODEL_FILES, check_source
from torchrl_envs.tasks.task import TaskEnv
from torchrl_envs.tasks.users import names_model
from torchrl_modules import SamplingParameters, TransformersWrapper, local_model
from torchrl_modules.policies.loading import load_causal_lm

from .loading import load_model
from .outline import outline

_TOOL: Final = {"type": "function", "function": {"name": "a_tool", "parameters": {}}}


class UserModel:
    """A model that answers for simulated users: loaded once, and never trained.

    Its draws follow from the run's seed, the episode and what was said in it: a run that goes on
    after a checkpoint hears the same.

    Args:
        source: a hub id, a folder, that of a run, or the name of a package's model.
        policy: device, dtype and attention, as the policy's.
        seed: of the run.
        temperature: of its answers.
        max_new_tokens: of an answer; one that is cut is none.

    Raises:
        SettingsError: there is no such file or folder, or a number is out of range.
    """

    def __init__(
        self,
        source: str,
        policy: PolicyConfig,
        *,
        seed: int,
        temperature: float = 0.0,
        max_new_tokens: int = 512,
    ) -> None:
        bounds = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        with refusing(f"task.user={source}"):
            check_source(source, MODEL_FILES)
            self.sampling = SamplingParameters(seed=seed, **bounds)
        self.source = source
        self.policy = policy
        self.__name__ = source
        self._lock = threading.Lock()
        self._answers: PolicyAnswers | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process loads the model itself."""
        return {**self.__dict__, "_lock": None, "_answers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_lock": threading.Lock()})

    def load(self, *, has_tools: bool = False) -> PolicyAnswers:
        """Load the model, the first time.

        Args:
            has_tools: the user may call some.

        Raises:
            SettingsError: it can't be loaded, or its chat template shows no tools.
        """
        with self._lock:
            if self._answers is None:
                model, tokenizer = self._loaded(load_causal_lm)
                wrapper = TransformersWrapper(
                    model.eval().requires_grad_(False),
                    tokenizer=tokenizer,
                    generate_kwargs=self.sampling,
                )
                self._check_tools(wrapper.encoder, has_tools)
                self._answers = PolicyAnswers(wrapper)
            return self._answers

    def check(self, *, has_tools: bool = False) -> None:
        """Check that the model can be loaded, without its weights.

        Args:
            has_tools: the user may call some.

        Raises:
            SettingsError: it can't, or its chat template shows no tools.
        """
        _, tokenizer = self._loaded(outline, device="meta")
        self._check_tools(ConversationEncoder(tokenizer), has_tools)

    def _check_tools(self, encoder: ConversationEncoder, has_tools: bool) -> None:
        try:
            encoder.check_tools([_TOOL] if has_tools else None)
        except ToolsNotShownError as error:
            raise SettingsError(
                f"task.user={self.source}: this user has tools, and the chat template of the model "
                "does not show any. Take a model whose template does, or a server."
            ) from error

    def __call__(
        self,
        questions: Sequence[Sequence[Message]],
        *,
        tools: Sequence[Sequence[dict[str, Any]]] | None = None,
        streams: Sequence[int | None] | None = None,
    ) -> Any:
        """Answer all in one batch, see :class:`~torchrl_envs.PolicyAnswers`.

        Args:
            questions: messages each.
            tools: JSON schemas of what each answer may call.
            streams: by which the random numbers of each are told apart.
        """
        return self.load()(questions, tools=tools, streams=streams)

    def _loaded(self, load: Any, **changed: Any) -> tuple[Any, Any]:
        # What the policy's template and training need is not the user's.
        own = {"gradient_checkpointing": False, "add_control_tokens": False, "quantization": None}
        own |= {"chat_template": None, "chat_template_name": None}
        with refusing(f"task.user={self.source}"):
            source = local_model(self.source)
        settings = replace(self.policy, **own, **changed)
        return load_model(settings, source, who="task.user", load=load)


def with_user_models(
    settings: Mapping[str, Any], policy: PolicyConfig, *, seed: int
) -> dict[str, Any]:
    """Settings of a task in which models stand for their names.

    Args:
        settings: of the task; of several, those of each are in ``tasks``.
        policy: see :class:`UserModel`.
        seed: of the run.
    """
    changed = dict(settings)
    if isinstance(parts := settings.get("tasks"), Mapping):
        changed["tasks"] = {
            name: with_user_models(own, policy, seed=seed) if isinstance(own, Mapping) else own
            for name, own in parts.items()
        }
    user = settings.get("user")
    if isinstance(user, str) and names_model(user):
        if settings.get("user_model") is not None:
            raise SettingsError(
                f"task.user_model={settings['user_model']} is for a server, and task.user={user} "
                "is a model of this process: leave it out."
            )
        given = {
            "temperature": changed.pop("user_temperature", None),
            "max_new_tokens": changed.pop("user_max_tokens", None),
        }
        own: Any = {name: value for name, value in given.items() if value is not None}
        changed["user"] = UserModel(user, policy, seed=seed, **own)
    return changed


def user_models(envs: Iterable[TaskEnv]) -> dict[UserModel, bool]:
    """Models that play the users of some environments, and which of these have tools.

    Args:
        envs: which.
    """
    found: dict[UserModel, bool] = {}
    for part in (part for env in envs for part in env.transforms_of(SimulatedUser)):
        if isinstance(user := part.user, UserModel):
            found[user] = found.get(user, False) or part.has_tools
    return found
