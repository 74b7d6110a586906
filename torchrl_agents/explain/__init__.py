"""What holds a run back, read from the record that it left: ``torchrl-agents explain``."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .explanation import Explanation as Explanation
    from .explanation import explain_run as explain_run
    from .run_finding import RolloutId as RolloutId
    from .run_finding import RunFinding as RunFinding


__getattr__ = lazy_names(__name__, __file__)
