"""``python -m torchrl_agents`` is ``torchrl-agents``."""

import sys

from .command import main

sys.exit(main())
