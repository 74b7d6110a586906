"""Checks of arguments and entries, and the protocol of what scores tokens."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from . import page

# Checks of single settings, the same everywhere: who, what is wrong, what was found.
#
# Settings are given by name (``check_counts("Primer", group_size=size)``); None is off.

Choice = TypeVar("Choice", bound=str)
Thing = TypeVar("Thing")

POSITIVE: Final = "(0, inf)"
NOT_NEGATIVE: Final = "[0, inf)"


def _named(who: str, name: str) -> str:
    return f"{who}: {name}" if who else name


def one_of(
    name: str,
    value: object,
    choices: Sequence[Choice],
    aliases: Mapping[str, Choice] | None = None,
    *,
    who: str = "",
) -> Choice:
    """Check a setting that takes one of a few names."""
    known = (aliases or {}).get(value, value) if isinstance(value, str) else value
    for choice in choices:
        if known == choice:
            return choice
    raise ValueError(f"{_named(who, name)} must be one of {tuple(choices)}, got {value!r}.")


def check_not_none(who: str, /, **settings: object) -> None:
    """Check that settings which can't be off are not None."""
    for name, value in settings.items():
        if value is None:
            raise ValueError(f"{_named(who, name)} must be given, got None.")


def check_columns(who: str, columns: Collection[str], needed: Iterable[str], do: str = "") -> None:
    """Refuse data that lack columns.

    Args:
        who: needs them.
        columns: of the data.
        needed: their names.
        do: what may be done where the data lack some; a sentence after a space.

    Raises:
        ValueError: they lack some.
    """
    if missing := [column for column in needed if column not in columns]:
        raise ValueError(
            f"{who} needs the columns {missing}, which the data lack; they have "
            f"{sorted(columns)}.{do}"
        )


def check_counts(who: str = "", least: int = 1, /, **counts: int | None) -> None:
    """Check that settings are whole numbers of at least ``least``."""
    for name, value in counts.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(
                f"{_named(who, name)} must be a whole number, at least {least}, got {value!r}."
            )


def check_numbers(who: str = "", within: str = "(-inf, inf)", /, **numbers: float | None) -> None:
    """Check that settings are finite numbers within an interval, written as in ``"(0, 1]"``."""
    low, high = map(float, within[1:-1].split(","))
    for name, value in numbers.items():
        if value is None:
            continue
        holds = (
            isinstance(value, Real)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (low <= value if within[0] == "[" else low < value)
            and (value <= high if within[-1] == "]" else value < high)
        )
        if not holds:
            where = "" if within == "(-inf, inf)" else f" in {within}"
            raise ValueError(f"{_named(who, name)} must be a finite number{where}, got {value!r}.")


def pair(name: str, value: object, *, who: str = "") -> tuple[float, float]:
    """Check a setting that takes two numbers."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        low, high = value
        if isinstance(low, Real) and isinstance(high, Real):
            return float(low), float(high)
    raise ValueError(f"{_named(who, name)} takes a pair of numbers (low, high), got {value!r}.")


def check_type(name: str, value: object, kind: type, *, who: str = "") -> None:
    """Check a setting that takes an object of a class."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{_named(who, name)} takes {kind.__name__}(...), got {value!r}.")


def check_names(who: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check that settings given by name are known."""
    for name in names:
        if name not in known:
            hint = "".join(f" Did you mean {m!r}?" for m in get_close_matches(name, known, n=1))
            raise TypeError(f"{who} has no setting {name!r}.{hint} It has {sorted(known)}.")


# Settings of an object that exists: what is set later takes effect, or raises.


class ChecksAttributes:
    """Mixin of configurable objects: an attribute that is set later takes effect, or raises.

    Once an object is made, an argument of its constructor can be set only where the class has a
    property with a setter of that name, or lists it in :attr:`changeable`. A name that the object
    does not have can't be set at all, but for names with a leading underscore. A subclass that
    is written elsewhere may set further attributes; the arguments of its base stay fixed.

    Raises (when an attribute is set):
        AttributeError: the argument is fixed, or there is no such attribute.
    """

    changeable: ClassVar[frozenset[str]] = frozenset()
    """Arguments that are plain attributes, read whenever they are needed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (init := vars(cls).get("__init__")) is not None:
            cls.__init__ = _noting_its_end(init)

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("_is_made") and not name.startswith("_"):
            self._check_settable(name)
            if name in self.changeable:
                value = self._checked_change(name, value)
        super().__setattr__(name, value)

    def _checked_change(self, name: str, value: Any) -> Any:
        """What one of :attr:`changeable` is set to, checked as at construction.

        Raises:
            ValueError: it is out of range, or can't take effect with the others.
        """
        del name
        return value

    def _check_settable(self, name: str) -> None:
        cls, who = type(self), type(self).__name__
        if name in (can := changeable_of(cls)):
            return
        arguments = arguments_of(cls)
        if name in arguments:
            more = f" These can be changed: {', '.join(sorted(can))}." if can else ""
            raise AttributeError(
                f"{who}: {name} is fixed when it is made, and setting it later would have no "
                f"effect, or half of one. Make another one with {name}=...{more}"
            )
        found = inspect.getattr_static(cls, name, None)
        if isinstance(found, property) and found.fset is None:
            raise AttributeError(f"{who}: {name} can't be set; it follows from the others.")
        if _is_written_elsewhere(cls) or hasattr(self, name):
            return
        known = sorted({n for n in (*arguments, *can, *vars(self)) if not n.startswith("_")})
        hint = "".join(f" Did you mean {m!r}?" for m in get_close_matches(name, known, n=1))
        raise AttributeError(f"{who} has no attribute {name!r} to set.{hint} It has {known}.")


def _noting_its_end(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor after whose outermost call the object counts as made."""

    @functools.wraps(init)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        state = vars(self)
        state["_num_constructors"] = state.get("_num_constructors", 0) + 1
        try:
            init(self, *args, **kwargs)
        finally:
            state["_num_constructors"] -= 1
        if not state["_num_constructors"]:
            del state["_num_constructors"]
            state["_is_made"] = True

    return noting


@functools.cache
def changeable_of(cls: type[ChecksAttributes]) -> frozenset[str]:
    """Attributes that can be set later: plain ones, and own properties with a setter.

    Args:
        cls: the class; a property of TorchRL's may set what nothing here reads.
    """
    setters = {
        name
        for base in cls.__mro__
        if issubclass(base, ChecksAttributes)
        for name, value in vars(base).items()
        if isinstance(value, property) and value.fset is not None
    }
    return cls.changeable | setters


@functools.cache
def arguments_of(cls: type) -> frozenset[str]:
    """Names of the arguments of a class's own constructor and of those of its bases here.

    Args:
        cls: a subclass of :class:`ChecksAttributes`.
    """
    names: set[str] = set()
    for base in cls.__mro__:
        is_ours = issubclass(base, ChecksAttributes) and not _is_written_elsewhere(base)
        if is_ours and "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            names.update(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, _EITHER))
    return frozenset(names - {"self"})


def _is_written_elsewhere(cls: type) -> bool:
    """Whether a class is one of a user's."""
    return cls.__module__.partition(".")[0] not in _PACKAGES


_EITHER: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PACKAGES: Final = frozenset(
    {"collectors", "objectives", "torchrl_agents", "torchrl_data", "torchrl_envs"}
    | {"torchrl_modules"}
)


# Errors that say who, what is wrong, what was found and what to do.


class MissingEntryError(KeyError):
    """A batch lacks an entry that a component reads.

    ``KeyError`` prints its message through ``repr``; this class prints it as it is written.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


def require_entries(batch: TensorDictBase, keys: Iterable[NestedKey], who: str) -> None:
    """Check that a batch holds all of some entries.

    Args:
        batch: what is about to be read.
        keys: the entries that must be there.
        who: the component that reads, named in the message.

    Raises:
        MissingEntryError: one or more entries are missing; the message names them and what the
            batch holds instead.
    """
    present = set(batch.keys(include_nested=True))
    if missing := [key for key in keys if key not in present]:
        remedy = "Run the step that writes the entry first, or rename it."
        raise missing_entry(batch, missing, who, remedy=remedy)


_RESET: Final = (
    "Reset the environment (prompt) or run the policy (full) first, or choose another input_mode."
)


def missing_entry(
    batch: TensorDictBase,
    key: Any,
    who: str,
    *,
    instead: str = "which the batch lacks",
    remedy: str = _RESET,
) -> MissingEntryError:
    """The error for an entry that a batch lacks, such as a part of a mode."""
    held = entries_of(batch)
    return MissingEntryError(f"{who} reads {key}, {instead}. The batch holds {held}. {remedy}")


def entries_of(batch: TensorDictBase) -> list[str]:
    """Name the entries of a batch for an error: tensors, conversations and plain values."""
    found: list[Any] = list(batch.keys(include_nested=True))
    keys: list[tuple[str, ...]] = [(k,) if isinstance(k, str) else k for k in found]
    # A conversation is one entry, whatever it is made of.
    short: set[Any] = {key[: 3 if key[0] == "next" else 2] for key in keys}
    inner = {key[:end] for key in short for end in range(1, len(key))}
    return sorted(str(key if len(key) > 1 else key[0]) for key in short - inner)


# What packages ask of each other's objects, so that they need not import each other.
#
# Shape legend: N packed tokens, B sequences, K target tokens (the ``True`` entries of a mask).


class TokenScores(NamedTuple):
    """Per-target-token results of a scorer, in the order of the packed tokens."""

    log_prob: Tensor
    """float32 ``[K]``, in nats, differentiable in the model's parameters."""
    entropy: Tensor | None = None
    """float32 ``[K]``, in nats; only when asked for."""
    untempered_log_prob: Tensor | None = None
    """float32 ``[K]``, in nats, under the model's own softmax; only when asked for."""


@runtime_checkable
class TokenScorer(Protocol):
    """Something that gives the log-probability of tokens in packed sequences.

    ``TransformersWrapper`` is one; a loss takes any. For batches of which rows have images, one
    takes ``images=`` too: those of each sequence in order, in base 64.
    """

    def score_packed(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Score the masked tokens of packed sequences, each given the tokens before it.

        Args:
            ids: int64 ``[N]``, the sequences one after the other, without padding.
            lengths: int64 ``[B]``, tokens of each sequence; sums to N.
            target_mask: bool ``[N]``; the tokens to score. The first token of a sequence has
                nothing before it and cannot be a target.
            temperature: the logits are divided by it before the softmax.
            entropy: also give the entropy of the distribution that each target was drawn from.

        Returns:
            The K scores in packed order.
        """
        ...


def check_scorer(who: str, model: object) -> None:
    """Check that a model scores packed tokens."""
    if not isinstance(model, TokenScorer):
        raise TypeError(
            f"{who} needs a model with a score_packed method (torchrl_data.checks.TokenScorer), "
            f"such as torchrl_modules.TransformersWrapper, got {type(model)}."
        )


def image_arguments(
    scorer: TokenScorer, images: Sequence[Sequence[str]] | None, who: str
) -> dict[str, Any]:
    """What ``score_packed`` is told of the images of its sequences; nothing where there are none.

    Raises:
        TypeError: there are images, and the scorer takes none.
    """
    if not images or not any(images):
        return {}
    if "images" not in inspect.signature(scorer.score_packed).parameters:
        raise TypeError(
            f"{who}: {sum(map(bool, images))} of {len(images)} rows have images, and score_packed "
            f"of {type(scorer).__name__} takes none. Score with TransformersWrapper(processor=...)."
        )
    return {"images": images}


# Models and tokenizers that are loaded: nothing that comes with them is run unless it is asked for.


def load_pretrained(auto: Any, path: Any, **arguments: Any) -> Any:
    """What a class of Transformers loads, without a question on the terminal.

    Args:
        auto: ``AutoModelForCausalLM``, ``AutoTokenizer`` and the like.
        path: hub id or folder.
        **arguments: of its ``from_pretrained``; ``trust_remote_code`` is ``False`` where it is not
            given.

    Raises:
        ValueError: it comes with code of its own, and that is not trusted.
    """
    arguments.setdefault("trust_remote_code", False)
    try:
        return auto.from_pretrained(path, **arguments)
    except ValueError as error:
        if arguments["trust_remote_code"] or "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{str(path)!r} comes with code of its own, which is not run unless you trust it. Read "
            "it, and give trust_remote_code=True: TransformersWrapper(..., model_kwargs="
            "{'trust_remote_code': True}), in a recipe +policy.model_kwargs.trust_remote_code=true."
        ) from error


# What to write for arguments that TorchRL's classes of the same names have.


@functools.cache
def torchrl_arguments() -> Mapping[str, Mapping[str, str]]:
    """The tables of ``docs/torchrl-arguments.md``: by class and argument, what to write here."""
    packaged = Path(__file__).with_name("torchrl-arguments.md")
    there = Path(__file__).parents[1] / "docs/torchrl-arguments.md"  # of a checkout
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for line in (packaged if packaged.exists() else there).read_text(encoding="utf-8").splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if len(cells) == 3:
            classes, arguments = (re.findall(r"`([^`]+)`", cell) for cell in cells[:2])
            here = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", cells[2]).strip()
            for name in classes:
                found[name] |= dict.fromkeys(arguments, here)
    return found


def knows_torchrl(thing: Thing) -> Thing:
    """Let a class say what to write for an argument that it has in TorchRL alone."""
    init: Any = getattr(thing, "__init__", None)
    name = getattr(thing, "__name__", "")
    if not isinstance(thing, type) or name not in torchrl_arguments() or hasattr(init, "_telling"):
        return thing

    here = torchrl_arguments()[name]

    @functools.wraps(init)
    def told(self: Any, *args: Any, **kwargs: Any) -> None:
        for argument in kwargs.keys() & here.keys():
            words = f"{type(self).__name__}: {argument}= is an argument of TorchRL's. Here"
            more = page("docs/torchrl-arguments.md")
            raise TypeError(f"{words}: {here[argument]}. See {more}.")
        init(self, *args, **kwargs)

    # A mark, not the method: who wraps this one (Ray, for an actor's class) pickles what it holds.
    told._telling = True  # type: ignore[attr-defined]
    thing.__init__ = told  # type: ignore[misc]
    return thing
