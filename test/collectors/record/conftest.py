"""Lets the tests of this folder import ``made_records``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
