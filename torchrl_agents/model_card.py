"""The card of a trained model, and the hub where it goes."""

import logging
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData

from collectors import Estimate
from torchrl_agents.settings.errors import refusing
from torchrl_agents.settings.schema import TrainingConfig

from .held_out import HeldOut
from .run import Run
from .saved_model import model_folders

_LOG: Final = logging.getLogger("torchrl_agents")


def leave_card(
    cfg: TrainingConfig,
    run: Run,
    steps: int,
    tests: Mapping[str, Mapping[str, Estimate]],
    held_out: HeldOut,
) -> None:
    """Write the card of a trained model, and the curve that it shows, into each model's folder.

    Args:
        cfg: the settings.
        run: has left its model and its learning curve.
        steps: that were made.
        tests: what the tests ``before`` and ``after`` training said, where they were made.
        held_out: made them.
    """
    base, last = cfg.policy.model, [*tests.values()][-1]
    settings = run.record["settings"]
    on_hub = base is not None and not Path(base).exists()
    kind = "text-classification" if run.recipe.gives_rewards else "text-generation"
    results = (kind, cfg.task.id, f"{held_out.labels[1]} of {cfg.task.id}")
    scores = {name: each.value for name, each in last.items() if each.num_prompts}
    metadata = ModelCardData(
        base_model=base if on_hub else None,
        library_name="transformers",
        pipeline_tag=kind,
        tags=["torchrl-agents", "reinforcement-learning", run.recipe.name],
        model_name=run.label,
        eval_results=[EvalResult(*results, *score) for score in scores.items()],
    )
    *_, newest = [run.record, *run.record.get("resumed", [])]  # whose command has all that is given
    given = [x for x in newest["command"][1:] if not x.startswith(("resume=", "push_to_hub="))]
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("card.md")),
        **{"cfg": cfg, "run": run, "steps": steps, "tests": tests, "last": last},
        held_out=held_out,
        base=base if on_hub or base is None else Path(base).name,
        dataset=settings.get("data.dataset") or settings.get("task.dataset"),
        settings=(run.folder / "config.yaml").read_text(encoding="utf-8"),
        command=shlex.join(["torchrl-agents", run.recipe.name.replace("_", "-"), *given]),
    )
    for folder in model_folders(run.folder):
        card.save(folder / "README.md")
        shutil.copy(run.folder / "learning_curve.png", folder)


def reach_hub(repository: str, *, create: bool) -> None:
    """Refuse a repository that could not be written; nothing is uploaded.

    Args:
        repository: of the Hugging Face Hub.
        create: whether to make it, where it is not there.

    Raises:
        SettingsError: no token, no right to write there, or no hub.
    """
    with refusing(f"push_to_hub={repository}", foreign=True):
        HfApi().whoami()
        if create:
            HfApi().create_repo(repository, exist_ok=True)


def push_to_hub(repository: str, folder: Path) -> str | None:
    """Upload the model of a run, with its card; gives the address, or says what to type later."""
    try:
        return str(HfApi().upload_folder(repo_id=repository, folder_path=folder))
    except Exception as error:
        again = shlex.join(["hf", "upload", repository, str(folder)])
        _LOG.error("the model could not be uploaded (%s). Again: %s", error, again)
        return None
