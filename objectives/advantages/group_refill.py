"""How another group is asked for in the place of one without a signal."""

from dataclasses import dataclass
from typing import Final

from torchrl_data.checks import check_counts

MAX_DRAWS: Final = 16
"""Of a step, where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class GroupRefill:
    """Another group in the place of one without a signal: DAPO's dynamic sampling.

    ``MCAdvantage(8, zero_variance=GroupRefill(max_draws=4))`` asks for it, and a collector answers.
    ``LLMCollector`` samples the next prompts of the data in the rows of the refused groups until
    the batch is full; at the bound it goes on with what it has, and says so in the log.
    ``StreamingCollector`` and ``RayLLMCollector`` sample the same prompt again with another seed,
    and after three attempts the next one; at the bound they raise.

    Args:
        max_draws: the most groups that are drawn for a batch, in batches, the first one included.
            Of collection beside training: the most that are refused in a row.

    Raises:
        ValueError: it is no whole number of at least 1.

    See Also:
        Yu et al., 2025 (DAPO), arXiv:2503.14476, section 3.2.
    """

    max_draws: int = MAX_DRAWS

    def __post_init__(self) -> None:
        check_counts("GroupRefill", max_draws=self.max_draws)
