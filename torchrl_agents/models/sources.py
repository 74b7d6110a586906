"""Where a model is read from: a hub, a folder, the files of one made here, or the embedded one."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from collectors.weight_update.plain_weights import gathered_state_dict
from torchrl_agents.settings.errors import refusing
from torchrl_agents.settings.schema import RecipeConfig
from torchrl_data.templates.registry import builtin_template
from torchrl_envs.datasets import MODEL_FILES, check_source
from torchrl_envs.tasks.task import Task
from torchrl_modules import LLMWrapperBase, local_model
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

from .saved_agents import found_agents, takes_adapters

Source = str | Mapping[str, bytes]
"""Hub id or folder of a model, or the files of one that was made here, by name."""
_NUM_TEXTS = 1024


@contextmanager
def model_source(cfg: RecipeConfig, task: Task) -> Iterator[str]:
    """Yield the source of the model: as given, a run's, or a folder with the embedded one."""
    if (given := given_model(cfg)) is not None:
        yield given
        return
    with _folder_of_a_model() as folder:
        tokenizer = task_tokenizer(task)
        tokenizer.save_pretrained(folder)
        torch.manual_seed(cfg.seed)
        tiny_qwen3(len(tokenizer)).save_pretrained(folder)
        yield folder


def given_model(cfg: RecipeConfig) -> str | None:
    """Hub id or folder of the model that is loaded; ``None`` where it is made here.

    Of a run with several agents it is the one below their adapters, or the first agent's.

    Raises:
        SettingsError: it can't be had, or the run has other agents.
    """
    if (saved := found_agents(cfg)) is not None:
        return model_folder(saved.source(adapters=takes_adapters(cfg, saved)))
    return None if cfg.policy.model is None else model_folder(cfg.policy.model)


def name_of_model(cfg: RecipeConfig) -> str:
    """What a message calls the model of a run."""
    given = cfg.policy.model
    return "the embedded model" if given is None else f"policy.model={given!r}"


def task_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """A tokenizer of what the task's conversations are like: demonstrations, or else prompts."""
    chats: Sequence[Sequence[Any]] = task.demonstrations[:_NUM_TEXTS]
    if not chats:
        column = task.prompt_column or "prompt"
        prompts = [row[column] for row in task.held_out_rows[:_NUM_TEXTS]]
        chats = [[{"role": "user", "content": x}] for x in prompts if isinstance(x, str)]
    texts = [task.name]
    if chats:
        template = builtin_template("chatml")
        texts, _ = render_jinja_template([list(chat) for chat in chats], chat_template=template)
    return train_tokenizer(list(texts), isolated=task.isolated, phrases=task.phrases)


def model_folder(source: str) -> str:
    """Hub id or folder of a model: of a run's folder, a ``.gguf`` file, the name of a package's.

    Raises:
        SettingsError: the model of ``policy.model`` can't be had, or its file can't be converted.
    """
    with refusing(f"policy.model={source}"):
        check_source(source, MODEL_FILES)
        return local_model(source)


@contextmanager
def folder_of(source: Source) -> Iterator[str]:
    """Yield the folder to load a model from; one made for given files is deleted afterwards."""
    if isinstance(source, str):
        yield source
        return
    with _folder_of_a_model() as folder:
        for name, content in source.items():
            Path(folder, name).write_bytes(content)
        yield folder


@contextmanager
def _folder_of_a_model() -> Iterator[str]:
    """A folder that goes afterwards; its name, which may choose a template, is always the same."""
    with tempfile.TemporaryDirectory(prefix="torchrl-agents-") as above:
        folder = Path(above, "model")
        folder.mkdir()
        yield str(folder)


def model_files(policy: LLMWrapperBase, *, weights: bool = True) -> dict[str, bytes]:
    """A whole model as it is now, adapters merged, and its tokenizer: as files, by name.

    Args:
        policy: over Transformers.
        weights: ``False`` for its config and tokenizer alone.
    """
    engine = cast("TransformersEngine", policy.engine)
    with tempfile.TemporaryDirectory(prefix="torchrl-agents-") as folder:
        if weights:
            engine.inside.save_pretrained(folder, state_dict=gathered_state_dict(engine.model))
        else:
            engine.inside.config.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        return files_of(folder)


def files_of(folder: str) -> dict[str, bytes]:
    """The files in a folder, by name."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
