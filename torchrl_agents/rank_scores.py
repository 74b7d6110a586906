"""Numbers of the trained tokens of rows, which ranks compute together.

Shape legend: N tokens of all rows, K trained ones.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from objectives import PackedBatch, Ranks


@torch.no_grad()
def target_scores(
    ranks: Ranks,
    batch: PackedBatch | None,
    compute: Callable[[PackedBatch], Tensor],
    *,
    max_tokens: int,
    count_shared_once: bool = False,
) -> Tensor | None:
    """Compute a number of each trained token, each rank those of its share; all ranks call it.

    Args:
        ranks: of the run.
        batch: all rows, which rank 0 has.
        compute: from some rows to the numbers of their trained tokens; with the model of a rank.
        max_tokens: most tokens that it is given at once.
        count_shared_once: see :meth:`objectives.PackedBatch.micro_batches`.

    Returns:
        float32 ``[K]``, on the CPU of rank 0; ``None`` on the others.
    """
    marked = batch and replace(batch, entries={"place": torch.arange(batch.num_targets)})
    parts = ranks.scatter(marked, max_tokens=max_tokens, count_shared_once=count_shared_once)
    places = [part.entries["place"].cpu() for part in parts]
    numbers = [compute(part).float().cpu() for part in parts]
    own = [torch.cat(each) if each else torch.zeros(0) for each in (places, numbers)]
    found = ranks.gather((own[0].long(), own[1].float()))
    if batch is None:
        return None
    scores = torch.zeros(batch.num_targets)
    for place, number in found:
        scores[place] = number
    return scores


def spread_to_rows(batch: PackedBatch, scores: Tensor) -> list[Tensor]:
    """Numbers of the trained tokens, beside all tokens of each row.

    Args:
        batch: packed.
        scores: ``[K]``.

    Returns:
        float32 ``[T]`` of each row, 0 where a token is not trained.
    """
    spread = torch.zeros(len(batch.ids)).masked_scatter(batch.target_mask, scores)
    return [*spread.split(batch.lengths.tolist())]
