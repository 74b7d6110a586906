"""The ranks of a run: rank 0 runs the recipe, the others do with it what takes all of them."""

from collections.abc import Callable
from typing import Any

from objectives import Ranks

Job = Callable[..., Any]


class Crew:
    """Jobs by name, each of which all ranks do at the same time, when rank 0 says so.

    Args:
        ranks: of the run.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._jobs: dict[str, Job] = {}

    def learn_job(self, name: str, job: Job) -> None:
        """Say what this rank does of a job.

        Args:
            name: of the job.
            job: is called with what rank 0 gives along.
        """
        self._jobs[name] = job

    def tell(self, name: str, *args: Any) -> None:
        """Let the other ranks do a job that this one, rank 0, is about to do.

        Args:
            name: of the job.
            *args: for theirs; can be pickled.
        """
        if self.ranks.size > 1:
            self.ranks.broadcast((name, args))

    def do(self, name: str, *args: Any) -> Any:
        """Do a job with the others; rank 0 calls it.

        Args:
            name: of the job.
            *args: for all.

        Returns:
            What this rank's job gave.
        """
        self.tell(name, *args)
        return self._jobs[name](*args)

    def follow(self) -> None:
        """Do what rank 0 says until it ends; the others call it."""
        while (order := self.ranks.broadcast()) is not None:
            name, args = order
            self._jobs[name](*args)

    def end(self) -> None:
        """Let the others end; rank 0 calls it."""
        if self.ranks.size > 1:
            self.ranks.broadcast(None)
