"""Tasks to begin with and to copy: games, a search over a made-up world, IFEval, MLGym, a terminal.

Installed beside the library, which has their names in ``torchrl_envs.tasks`` and imports each when
it is asked for.
"""

from pathlib import Path

# The terminal is an example to copy: a wheel has it here, a checkout where examples are.
__path__.append(str(Path(__file__).parents[1] / "examples/terminal"))
