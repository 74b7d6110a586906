"""Settings of how data are read that most users leave as they are."""

from dataclasses import dataclass

from torchrl_data.checks import POSITIVE, check_counts, check_not_none, check_numbers


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of how a :class:`~torchrl_envs.DataLoadingPrimer` reads and checks its rows.

    Args:
        shuffle_buffer_size: rows that a stream draws from when it is shuffled.
        worker_timeout_s: how long a worker may take for its next rows.
        num_checked_rows: rows of a sequence that are checked before anything runs, spread evenly
            over it if it is longer. A row that is found bad later is skipped.
        skip_bad_rows: skip bad rows that are found before anything runs, too.

    Raises:
        ValueError: a number is out of range.
    """

    shuffle_buffer_size: int = 1000
    worker_timeout_s: float = 300.0
    num_checked_rows: int = 10_000
    skip_bad_rows: bool = False

    def __post_init__(self) -> None:
        check_not_none("DataOptions", **vars(self))
        check_counts("DataOptions", shuffle_buffer_size=self.shuffle_buffer_size)
        check_counts("DataOptions", 0, num_checked_rows=self.num_checked_rows)
        check_numbers("DataOptions", POSITIVE, worker_timeout_s=self.worker_timeout_s)
