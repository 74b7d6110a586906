"""Tokenizers for the tests of this folder, and how many examples hypothesis tries.

``HYPOTHESIS_PROFILE=thorough pytest test/data`` tries 2,000 conversations per template;
``quick`` tries 50.
"""

import importlib.util
import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

for profile, examples in {"quick": 50, "ci": 300, "thorough": 2000, "soak": 50_000}.items():
    settings.register_profile(
        f"data-{profile}",
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
EXAMPLES = settings.get_profile(f"data-{os.environ.get('HYPOTHESIS_PROFILE', 'ci')}")

# Tests are imported without a package, so what they share is found by name.
_path = Path(__file__).with_name("tokenizers_for_tests.py")
_spec = importlib.util.spec_from_file_location(_path.stem, _path)
assert _spec is not None
assert _spec.loader is not None
tokenizers_for_tests = importlib.util.module_from_spec(_spec)
tokenizers_for_tests.EXAMPLES = EXAMPLES
sys.modules[_path.stem] = tokenizers_for_tests
_spec.loader.exec_module(tokenizers_for_tests)
