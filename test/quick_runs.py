"""What a run does for the eye and for settings that no test has, done in less time."""

from hydra._internal.hydra import Hydra
from matplotlib.figure import Figure


def quicken_runs() -> None:
    """Make runs of this process, and of its forks, cost a fifth less; for tests alone.

    Hydra composes all settings once more to find ``hydra.mode``, which no recipe sets: what it
    finds is none. Pictures are drawn, in few pixels and without a search for the best margins.
    """
    save = Figure.savefig

    def save_small(figure, *to, **options):
        figure.set_layout_engine("none")
        save(figure, *to, **options | {"dpi": 20})

    Hydra.get_mode = lambda *_, **__: None
    Figure.savefig = save_small
