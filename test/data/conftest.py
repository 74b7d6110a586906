"""Tokenizers for the tests of this folder, and how many examples hypothesis tries.

Forged control tokens are tried in 150 conversations per template, other properties in 40 examples.
``HYPOTHESIS_PROFILE=thorough`` tries 2,000 of each, as ``make weekly-tests`` does, ``quick`` 20.
``quick`` and the default try the same examples each time, ``thorough`` and ``soak`` draw others.
"""

import importlib.util
import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

_NUM_EXAMPLES = {"quick": 20, "landing": 40, "forgery": 150, "thorough": 2000, "soak": 50_000}
for profile, examples in _NUM_EXAMPLES.items():
    settings.register_profile(
        f"data-{profile}",
        max_examples=examples,
        derandomize=profile not in ("thorough", "soak"),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "landing")
EXAMPLES = settings.get_profile(f"data-{_PROFILE}")
FORGERY_EXAMPLES = settings.get_profile(
    "data-forgery" if _PROFILE == "landing" else f"data-{_PROFILE}"
)

# Tests are imported without a package, so what they share is found by name.
_path = Path(__file__).with_name("tokenizers_for_tests.py")
_spec = importlib.util.spec_from_file_location(_path.stem, _path)
assert _spec is not None
assert _spec.loader is not None
tokenizers_for_tests = importlib.util.module_from_spec(_spec)
tokenizers_for_tests.EXAMPLES = EXAMPLES
tokenizers_for_tests.FORGERY_EXAMPLES = FORGERY_EXAMPLES
sys.modules[_path.stem] = tokenizers_for_tests
_spec.loader.exec_module(tokenizers_for_tests)
