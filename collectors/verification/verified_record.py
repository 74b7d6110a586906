"""The record of a run with what was found of its tokens, for who shows it."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collectors.record.run_record import RunRecord
from collectors.record.samples import RolloutSample

from .certificate import Certificate
from .sampled_row import place_of_sample


class VerifiedRecord(RunRecord):
    """A record whose samples have the gaps that a certificate tells.

    A page of it (:func:`~collectors.record.write_html`) colours tokens by their gap::

        write_html([VerifiedRecord(folder, certificate)], "page")

    Args:
        path: folder of the run.
        certificate: of its rows; samples that are not in it are as they are recorded.

    Raises:
        FileNotFoundError: there is no record.
    """

    def __init__(self, path: str | Path, certificate: Certificate) -> None:
        super().__init__(path)
        self._verdicts = {row.name: row for row in certificate.checked}

    def samples(self, step: int) -> Iterator[RolloutSample]:
        """The samples of a step, see :meth:`RunRecord.samples`."""
        for sample in super().samples(step):
            verdict = self._verdicts.get(place_of_sample(sample))
            if verdict is not None:
                gaps: list[Any] = [None] * len(sample.tokens.ids)
                causes: list[Any] = [None] * len(sample.tokens.ids)
                found = zip(verdict.places, verdict.gaps, verdict.causes, strict=True)
                for place, gap, cause in found:
                    gaps[place] = round(gap, 7) if math.isfinite(gap) else None
                    causes[place] = cause
                sample.tokens.gaps, sample.tokens.causes = gaps, causes
            yield sample
