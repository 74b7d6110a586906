"""The help of a recipe: every choice and every setting, with its value and what it means."""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import pairwise

from omegaconf import DictConfig, OmegaConf

from torchrl_envs.tasks import settings_of_task

from .arguments import setting_names
from .defaults import EMBEDDED, PRETRAINED
from .field_rules import FieldRule, rule_of
from .recipe import Recipe


def recipe_help(recipe: Recipe, cfg: DictConfig, choices: Mapping[str, Sequence[str]]) -> str:
    """All that a recipe can be told.

    Args:
        recipe: whose settings they are.
        cfg: the settings as chosen so far.
        choices: those of each group.
    """
    lines = [
        recipe.summary,
        "",
        f"  {recipe.program} {recipe.example}",
        "",
        "Choices (group=choice); --multirun takes several, with commas:",
    ]
    for group, names in choices.items():
        more = ", textarena/<game>, any generator of reasoning-gym" if group == "task" else ""
        lines.append(f"  {group:<12}{', '.join(names)}{more}")
    lines += ["", f"Settings (setting=value), with the values of task={cfg.task.id}:", ""]
    root = _described(recipe.config)
    for name in (n for n in cfg if not isinstance(cfg._get_node(n), DictConfig)):
        lines.append(_setting(recipe, cfg, str(name), root.get(str(name), "")))
    for name in (n for n in cfg if isinstance(cfg._get_node(n), DictConfig) and n != "task"):
        if recipe.why_unused(str(name)) is None:
            lines += ["", *_group(recipe, cfg, str(name))]
    lines += ["", f"task: {cfg.task.id}"]
    said = settings_of_task(cfg.task.id)
    for key in (k for k in setting_names(cfg.task) if k not in ("id", "config")):
        lines.append(_setting(recipe, cfg, f"task.{key}", said[key][2] if key in said else ""))
    return "\n".join(lines)


def _group(recipe: Recipe, cfg: DictConfig, path: str) -> Iterator[str]:
    """Write the settings of a group, and of the groups in it."""
    node = OmegaConf.select(cfg, path)
    kind = OmegaConf.get_type(node)
    described, own = _described(kind), vars(kind).get("__annotations__", {})
    if "." not in path:
        yield f"{path}: {described['']}"
    for key in sorted(node, key=lambda key: key not in own):  # what a group adds comes first
        if recipe.why_unused(f"{path}.{key}") is not None:
            continue
        inside = node._get_node(key)
        if isinstance(inside, DictConfig) and is_dataclass(OmegaConf.get_type(inside)):
            yield from _group(recipe, cfg, f"{path}.{key}")
        else:
            yield _setting(recipe, cfg, f"{path}.{key}", described.get(str(key), ""))


def _setting(recipe: Recipe, cfg: DictConfig, key: str, text: str) -> str:
    value = "???" if OmegaConf.is_missing(cfg, key) else OmegaConf.select(cfg, key)
    if key in recipe.rules:
        text = _with_rule(text, recipe.rules[key])
    embedded, pretrained = {**EMBEDDED, **recipe.embedded}, {**PRETRAINED, **recipe.pretrained}
    if value is None and key in {**embedded, **pretrained}:
        own = [d.get(key, "the task's") for d in (embedded, pretrained)]
        text = f"{text} [embedded model: {own[0]}; given model: {own[1]}]".strip()
    plain = value is None or isinstance(value, bool)
    shown = {None: "null", True: "true", False: "false"}[value] if plain else str(value)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return f"  {f'{key}={shown}':<44} {text}".rstrip()


def _described(kind: type | None) -> dict[str, str]:
    """Return what a data class's fields mean and may be, and under ``""`` its own docstring."""
    assert kind is not None
    found = {"": inspect.getdoc(kind) or ""}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        if (record := vars(base).get("described_in")) is not None:  # made of a library's options
            found = {**found, **_described(record), "": found[""]}
            continue
        (node,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(node, ast.ClassDef)
        for pair in pairwise(node.body):
            match pair:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(text)):
                    found[name] = _plain(str(text))
    for name in getattr(kind, "__dataclass_fields__", {}):
        if (rule := rule_of(kind, name)) is not None:
            found[name] = _with_rule(found.get(name, ""), rule)
    return found


def _plain(text: str) -> str:
    """A docstring as a line without markup: roles and double backticks stand for what they name."""
    return " ".join(re.sub(r"(?::\w+:`~?([^`]+)`)|``([^`]+)``", r"\1\2", text).split())


def _with_rule(text: str, rule: FieldRule) -> str:
    """Add to what a setting means what it must be, where the text does not name all values."""
    if rule.values and all(re.search(rf"\b{value}\b", text) for value in rule.values):
        return text
    return f"{text} {rule.words[0].upper()}{rule.words[1:]}.".strip()
