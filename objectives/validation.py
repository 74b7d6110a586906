"""Checks of single options, shared by the losses, their parts and the advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TypeVar

Choice = TypeVar("Choice", bound=str)


def one_of(
    name: str, value: str, choices: Sequence[Choice], aliases: Mapping[str, Choice]
) -> Choice:
    """Check an option that takes one of a few names.

    Args:
        name: of the option, for the message.
        value: what was given.
        choices: the names.
        aliases: other spellings, such as TorchRL's.

    Returns:
        The name.

    Raises:
        ValueError: there is no such choice; the message lists all.
    """
    value = aliases.get(value, value)
    for choice in choices:
        if value == choice:
            return choice
    raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}.")


def check_counts(**counts: int | None) -> None:
    """Check that options are whole numbers of at least 1.

    Args:
        **counts: by the name of the option; None is off.

    Raises:
        ValueError: one is not.
    """
    for name, value in counts.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}.")


def check_numbers(**numbers: float | None) -> None:
    """Check that options are finite numbers.

    Args:
        **numbers: by the name of the option; None is off.

    Raises:
        ValueError: one is not a number, or not finite.
    """
    for name, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}.")


def check_coefficients(**coefficients: float | None) -> None:
    """Check that options are finite numbers, none of them negative.

    Args:
        **coefficients: by the name of the option; None is off.

    Raises:
        ValueError: one is negative, or not a finite number.
    """
    check_numbers(**coefficients)
    for name, value in coefficients.items():
        if value is not None and value < 0:
            raise ValueError(f"{name} must not be negative, got {value}.")


def check_positive(**numbers: float | None) -> None:
    """Check that options are finite numbers above 0.

    Args:
        **numbers: by the name of the option; None is off.

    Raises:
        ValueError: one is not.
    """
    check_numbers(**numbers)
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}.")


def pair(name: str, value: object) -> tuple[float, float]:
    """Check an option that takes two numbers.

    Args:
        name: of the option, for the message.
        value: what was given.

    Returns:
        The two numbers.

    Raises:
        ValueError: it is no pair of numbers.
    """
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        low, high = value
        if isinstance(low, Real) and isinstance(high, Real):
            return float(low), float(high)
    raise ValueError(f"{name} takes a pair of numbers (low, high), got {value!r}.")


def check_type(name: str, value: object, kind: type) -> None:
    """Check an option that takes settings.

    Args:
        name: of the option, for the message.
        value: what was given; None is off.
        kind: the class of the settings.

    Raises:
        TypeError: it is something else.
    """
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} takes {kind.__name__}(...), got {value!r}.")
