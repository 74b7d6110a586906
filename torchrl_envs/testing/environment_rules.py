"""The conformance test of environments: run it on your own environment or transform.

Each rule is a function that raises with its name; an :class:`EnvironmentTrial` has what it needs.

Shape legend: B rows, in whatever batch shape.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import check_env_specs

from torchrl_data import keys
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import read_conversations

from .scripted_turns import ScriptedTurns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_FLAGS: Final = (keys.DONE, keys.TERMINATED, keys.TRUNCATED)
_THREADS_S: Final = 5.0
"""How long threads may take to end after an environment was closed."""


class EnvironmentRuleError(AssertionError):
    """An environment breaks a rule.

    Attributes:
        rule: which, one of those that :func:`check_env` lists.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"check_env, rule {rule!r}: {message}")
        self.rule = rule


def check_env(
    env: Any,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    turns: Sequence[str] = ("Let me think.", "It is 4.", ""),
    num_steps: int = 4,
    reset: Callable[[], TensorDictBase] | None = None,
) -> None:
    """Test that an environment keeps the contract of :class:`~torchrl_envs.ChatEnv`.

    A policy that follows a script plays a few steps. The rules, each the ``rule`` of its error:

    - ``"reset"``: a reset gives one prompt per row, and no row is done;
    - ``"specs"``: the specs are those of the data (TorchRL's ``check_env_specs``);
    - ``"step"``: done is bool ``[*B, 1]``, and terminated or truncated, nothing else;
    - ``"prefix"``: the tokens of the next prompt begin with those of ``full``;
    - ``"mask"``: the sampled tokens of a prompt are those that the policy sampled, in order;
    - ``"done rows"``: a row that takes no part in a step stays as it is;
    - ``"partial reset"``: a row that is not reset stays as it is, one that is starts anew;
    - ``"determinism"``: the same seed gives the same prompts, rewards and dones;
    - ``"close"``: closing works in the middle of an episode, and leaves no thread behind.

    Args:
        env: an environment, which is closed at the end; or a function without arguments that
            builds one, the same every time. ``"determinism"`` and threads that stay behind can be
            tested with a function only.
        tokenizer: the tokenizer with which the policy speaks.
        turns: what the policy says, in turn; the last one is repeated.
        num_steps: most steps of a trial.
        reset: gives the input of a reset, for an environment without data of its own.

    Raises:
        EnvironmentRuleError: a rule is broken; the message says how.

    Example:
        >>> def build():
        ...     env = ChatEnv(batch_size=(2,), tokenizer=tokenizer)
        ...     return env.append_transform(DataLoadingPrimer([{"prompt": "2 + 2?"}]))
        >>> check_env(build, tokenizer)  # raises EnvironmentRuleError where a rule is broken
    """
    make_env = env if not isinstance(env, EnvBase) else None
    trial = EnvironmentTrial(make_env or (lambda: env), tokenizer, turns, num_steps, reset)
    for rule in (_check_reset, _check_specs, _check_steps, _check_partial_reset):
        with _closing(trial.make_env(), make_env is not None) as built:
            rule(trial, built)
    if make_env is not None:
        _check_determinism(trial)
    _check_close(trial)


class EnvironmentTrial(NamedTuple):
    """A trial of an environment: it is built, reset and played."""

    make_env: Callable[[], Any]
    tokenizer: "PreTrainedTokenizerBase"
    turns: Sequence[str]
    num_steps: int
    given: Callable[[], TensorDictBase] | None

    def reset(self, env: Any) -> TensorDictBase:
        """The batch after a reset of all rows."""
        with _keeping("reset"):
            return env.reset() if self.given is None else env.reset(self.given())

    def policy(self) -> ScriptedTurns:
        """A policy at the beginning of its script."""
        return ScriptedTurns(self.tokenizer, self.turns)


@contextmanager
def _keeping(rule: str) -> Iterator[None]:
    """Whatever is raised inside breaks a rule."""
    try:
        yield
    except Exception as error:
        raise EnvironmentRuleError(rule, f"{type(error).__name__}: {error}") from error


def _require(holds: bool, rule: str, message: str) -> None:
    if not holds:
        raise EnvironmentRuleError(rule, message)


@contextmanager
def _closing(env: Any, is_own: bool) -> Iterator[Any]:
    try:
        yield env
    except BaseException:
        # What went wrong first is what is told.
        with suppress(Exception):
            env.close(raise_if_closed=False)
        raise
    if is_own:
        with _keeping("close"):
            env.close(raise_if_closed=False)


def _prompt(batch: TensorDictBase, rule: str) -> Conversations:
    try:
        return read_conversations(batch, keys.PROMPT, who="check_env")
    except KeyError as error:
        raise EnvironmentRuleError(rule, f"there is no prompt: {error}") from error


def _check_reset(trial: EnvironmentTrial, env: Any) -> None:
    batch = trial.reset(env)
    prompt = _prompt(batch, "reset")
    for row in range(batch.numel()):
        holds_something = bool(prompt.messages(row)) or prompt.num_tokens(row) > 0
        _require(holds_something, "reset", f"the prompt of row {row} is empty.")
    for key in _FLAGS:
        flag = batch.get(key, None)
        rows = [] if flag is None else flag.view(-1).nonzero().view(-1).tolist()
        _require(not rows, "reset", f"rows {rows} are {key} right after a reset.")


def _check_specs(trial: EnvironmentTrial, env: Any) -> None:
    start = None
    if trial.given is not None:
        start = trial.reset(env).select(*env.full_observation_spec.keys(True, True), *_FLAGS)
    with _keeping("specs"):
        check_env_specs(env, tensordict=start)


def _check_steps(trial: EnvironmentTrial, env: Any) -> None:
    """The rules of each step of an episode: step, prefix, mask, done rows."""
    batch, policy = trial.reset(env), trial.policy()
    size = batch.numel()
    over = torch.zeros(size, dtype=torch.bool)
    sampled: list[list[int]] = [[] for _ in range(size)]
    for _ in range(trial.num_steps):
        batch.set(keys.STEP_MASK, (~over).view(batch.batch_size))
        before = _prompt(batch, "step")
        batch = policy(batch)
        full = read_conversations(batch, keys.FULL, who="check_env")
        for row in (~over).nonzero().view(-1).tolist():
            sampled[row] += policy.sampled
        flags = {key: batch.get(key).clone() for key in _FLAGS if batch.get(key, None) is not None}
        following = env.step(batch).get("next")
        _check_flags(following, env)
        after = _prompt(following, "step")
        for row in range(size):
            if over[row]:
                _check_untouched(row, before, after, flags, following)
            else:
                _check_row(row, full, after, sampled[row])
        over |= following.get(keys.DONE).view(-1)
        batch = following
        if bool(over.all()):
            break


def _check_flags(batch: TensorDictBase, env: Any) -> None:
    shape = (*env.batch_size, 1)
    for key in _FLAGS:
        flag = batch.get(key, None)
        if flag is None or flag.dtype != torch.bool or tuple(flag.shape) != shape:
            found = "nothing" if flag is None else f"{flag.dtype} {tuple(flag.shape)}"
            raise EnvironmentRuleError("step", f"{key} must be bool {shape}, found {found}.")
    wrong = batch.get(keys.DONE) ^ (batch.get(keys.TERMINATED) | batch.get(keys.TRUNCATED))
    rows = wrong.view(-1).nonzero().view(-1).tolist()
    _require(not rows, "step", f"done must be terminated or truncated; rows {rows} are not.")


def _check_row(row: int, full: Conversations, after: Conversations, sampled: list[int]) -> None:
    ids, following = full.ids(row), after.ids(row)
    if following[: len(ids)] != ids:
        same = [one == other for one, other in zip(ids, following, strict=False)]
        at = same.index(False) if False in same else len(same)
        raise EnvironmentRuleError(
            "prefix",
            f"the next prompt of row {row} does not begin with the tokens of full: they part at "
            f"token {at} of {len(ids)}. Only append messages, with append_messages().",
        )
    marked = after.token_ids(row)[after.assistant_mask(row)].tolist()
    lengths = f"{len(marked)} tokens, the policy sampled {len(sampled)}"
    message = f"the assistant mask of row {row} has {lengths}, and they are not the same."
    _require(marked == sampled, "mask", message)


def _check_untouched(
    row: int,
    before: Conversations,
    after: Conversations,
    flags: dict[str, torch.Tensor],
    following: TensorDictBase,
) -> None:
    same = after.ids(row) == before.ids(row) and after.messages(row) == before.messages(row)
    pairs = {key: (value, following.get(key)) for key, value in flags.items()}
    changed = [] if same else ["prompt"]
    changed += [key for key, (a, b) in pairs.items() if bool(a.view(-1)[row] != b.view(-1)[row])]
    message = f"row {row} took no part in the step, but its {' and '.join(changed)} changed. "
    message += "Write to the rows of active_rows(tensordict) only."
    _require(not changed, "done rows", message)


def _check_partial_reset(trial: EnvironmentTrial, env: Any) -> None:
    batch = trial.reset(env)
    if batch.numel() < 2:
        return
    batch = env.step(trial.policy()(batch)).get("next")
    before = _prompt(batch, "partial reset")
    chosen = torch.zeros(batch.numel(), dtype=torch.bool)
    chosen[0] = True
    if trial.given is not None:
        batch.update(trial.given())
    batch.set("_reset", chosen.view(*batch.batch_size, 1))
    batch = env.reset(batch)
    after = _prompt(batch, "partial reset")
    for row in range(1, batch.numel()):
        message = f"row {row} was not reset, but its prompt changed. Reset those of '_reset' only."
        _require(after[row] == before[row], "partial reset", message)
    is_new, is_done = not after.assistant_mask(0).any(), bool(batch.get(keys.DONE).view(-1)[0])
    message = "row 0 was reset, but its prompt holds what the policy had said."
    _require(is_new, "partial reset", message)
    _require(not is_done, "partial reset", "row 0 is done right after it was reset.")


def _check_determinism(trial: EnvironmentTrial) -> None:
    first, second = _seeded_run(trial), _seeded_run(trial)
    for step, (one, other) in enumerate(zip(first, second, strict=False)):
        for name, value in one.items():
            found = f"{name} differs after {step} steps: {value!r:.200} and {other[name]!r:.200}"
            remedy = "Draw from the seed that set_seed or a reset gives."
            message = f"with the same seed, {found}. {remedy}"
            _require(other[name] == value, "determinism", message)


def _seeded_run(trial: EnvironmentTrial) -> list[dict[str, Any]]:
    """Return what happens in each step of an episode that starts from one seed."""
    states: list[dict[str, Any]] = []
    with torch.random.fork_rng(devices=()), _closing(trial.make_env(), True) as env:
        state = random.getstate()
        torch.manual_seed(0)
        random.seed(0)
        try:
            env.set_seed(0)
            batch, policy = trial.reset(env), trial.policy()
            states.append(_observed(batch))
            for _ in range(trial.num_steps):
                if bool(batch.get(keys.DONE).any()):
                    break
                batch = env.step(policy(batch)).get("next")
                states.append(_observed(batch))
        finally:
            random.setstate(state)
    return states


def _observed(batch: TensorDictBase) -> dict[str, Any]:
    prompt = _prompt(batch, "determinism")
    shown = [(prompt.messages(i), prompt.ids(i)) for i in range(len(prompt))]
    found = {key: batch.get(key, None) for key in (keys.REWARD, *_FLAGS)}
    return {"prompt": shown} | {k: v.tolist() for k, v in found.items() if v is not None}


def _check_close(trial: EnvironmentTrial) -> None:
    """Close in the middle of an episode."""
    threads = set(threading.enumerate())
    env = trial.make_env()
    try:
        batch = trial.reset(env)
        env.step(trial.policy()(batch))
    finally:
        with _keeping("close"):
            env.close(raise_if_closed=False)
    _require(env.is_closed, "close", "is_closed is False after close().")
    deadline = time.monotonic() + _THREADS_S
    while left := [t.name for t in set(threading.enumerate()) - threads if t.is_alive()]:
        is_early = time.monotonic() < deadline
        _require(is_early, "close", f"threads {left} run on after close().")
        time.sleep(0.01)
