"""Verification of recorded rollouts: each token is computed again, and each gap is explained."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .cause import Cause as Cause
    from .certificate import Certificate as Certificate
    from .conditions import Conditions as Conditions
    from .conditions import Numbers as Numbers
    from .explain import verify_rows as verify_rows
    from .foreign_rows import read_foreign_rows as read_foreign_rows
    from .foreign_rows import rows_of_batch as rows_of_batch
    from .recomputation import Recomputation as Recomputation
    from .row_verdict import RowVerdict as RowVerdict
    from .sampled_row import SampledRow as SampledRow
    from .verified_record import VerifiedRecord as VerifiedRecord


__getattr__ = lazy_names(__name__, __file__)
