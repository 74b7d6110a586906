"""The help of a recipe: every choice and every setting, with its value and what it means."""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass

from omegaconf import DictConfig, OmegaConf

from torchrl_envs.tasks.registry import task_factory

from .recipe import Recipe
from .schema import EMBEDDED, PRETRAINED


def help_text(recipe: Recipe, cfg: DictConfig, groups: Mapping[str, Sequence[str]]) -> str:
    """All that a recipe can be told.

    Args:
        recipe: whose settings they are.
        cfg: the settings as chosen so far.
        groups: the choices of each group.
    """
    lines = [
        recipe.summary,
        "",
        f"  {recipe.name}.py {recipe.example}",
        "",
        "Choices (group=choice); --multirun takes several, with commas:",
    ]
    for group, choices in groups.items():
        more = ", textarena/<game>, any generator of reasoning-gym" if group == "task" else ""
        lines.append(f"  {group:<12}{', '.join(choices)}{more}")
    lines += ["", f"Settings (setting=value), with the values of task={cfg.task.id}:", ""]
    root = _described(recipe.config)
    for name in (n for n in cfg if not isinstance(cfg._get_node(n), DictConfig)):
        lines.append(_setting(recipe, cfg, str(name), root.get(str(name), "")))
    for name in (n for n in cfg if isinstance(cfg._get_node(n), DictConfig) and n != "task"):
        of_group = _described(OmegaConf.get_type(cfg, str(name)))
        lines += ["", f"{name}: {of_group['']}"]
        lines += [
            _setting(recipe, cfg, f"{name}.{key}", of_group.get(str(key), "")) for key in cfg[name]
        ]
    lines += ["", f"task: {cfg.task.id}"]
    factory = task_factory(cfg.task.id)
    said = _arguments(inspect.getdoc(getattr(factory, "func", factory)) or "")
    for key in (k for k in setting_names(cfg.task) if k not in ("id", "config")):
        lines.append(_setting(recipe, cfg, f"task.{key}", said.get(key, "")))
    return "\n".join(lines)


def _setting(recipe: Recipe, cfg: DictConfig, key: str, text: str) -> str:
    value = "???" if OmegaConf.is_missing(cfg, key) else OmegaConf.select(cfg, key)
    embedded, pretrained = {**EMBEDDED, **recipe.embedded}, {**PRETRAINED, **recipe.pretrained}
    if value is None and key in {**embedded, **pretrained}:
        own = [d.get(key, "the task's") for d in (embedded, pretrained)]
        text = f"{text} [embedded model: {own[0]}; given model: {own[1]}]".strip()
    plain = value is None or isinstance(value, bool)
    shown = {None: "null", True: "true", False: "false"}[value] if plain else str(value)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return f"  {f'{key}={shown}':<44} {text}".rstrip()


def _described(kind: type | None) -> dict[str, str]:
    """What the docstrings of a data class's fields say, and under ``""`` its own."""
    assert kind is not None
    found = {"": inspect.getdoc(kind) or ""}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        (node,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(node, ast.ClassDef)
        for line, after in zip(node.body, [*node.body[1:], None], strict=True):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[line.target.id] = " ".join(str(after.value.value).split())
    return found


def _arguments(docstring: str) -> dict[str, str]:
    """What the ``Args:`` section of a docstring says of each argument."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    if section is None:
        return {}
    pairs = re.findall(r"^    (\w+): (.*?)(?=^    \S|\Z)", section[1], re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in pairs}


def setting_names(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """The path of each setting."""
    for key in cfg:
        yield f"{prefix}{key}"
        inside = None if OmegaConf.is_missing(cfg, key) else cfg._get_node(key)
        if isinstance(inside, DictConfig) and not inside._is_none():
            yield from setting_names(inside, f"{prefix}{key}.")
