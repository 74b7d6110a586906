"""The command ``torchrl-agents verify``: whether a run trained on what was sampled.

    torchrl-agents verify RUN
    torchrl-agents verify RUN --step 11 --device cuda --json certificate.json
    torchrl-agents verify RUN --bits                 # of engine.batch_invariant=true
    torchrl-agents verify BATCH.pt --model MODEL     # rollouts of TRL or verl

Each recorded token is computed again with the weights of its version: those of a checkpoint, or of
the model that the run began with. Where a log-prob is another one than was recorded, the cause is
looked for and named.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
import yaml
from torch import nn
from transformers.utils.logging import disable_progress_bar

from collectors import CheckpointError, CheckpointStore, ShardedModel
from collectors.checkpoint.retention import stored
from collectors.record.html import write_html
from collectors.record.run_record import RunRecord
from collectors.resume.sharded import Load
from collectors.verification.certificate import Certificate
from collectors.verification.conditions import Numbers
from collectors.verification.engine_check import EngineCheck, check_engine_can
from collectors.verification.explain import verify_rows
from collectors.verification.foreign_rows import read_foreign_rows
from collectors.verification.recomputation import Recomputation
from collectors.verification.row_verdict import RowVerdict
from collectors.verification.sampled_row import SampledRow
from collectors.verification.verified_record import VerifiedRecord
from torchrl_data.output_file import output_file, output_folder
from torchrl_modules import TransformersWrapper
from torchrl_modules.policies.loading import load_causal_lm
from torchrl_modules.quantized_forward import forward_quantization

from .found_run import CHECKPOINTS
from .models.adapted_agents import load_adapter
from .models.adapters import frozen_weights, is_adapted
from .models.agents import saved_models
from .models.loading import load_model
from .models.policy_arguments import sampling_of
from .models.saved_agents import SavedAgents, saved_agents
from .models.sources import model_folder
from .settings.errors import SettingsError
from .settings.schema import PolicyConfig

_MOST_ROWS = 64


class _Weights(NamedTuple):
    """Model and weights to compute a run with."""

    policy: TransformersWrapper
    load: dict[int, Callable[[nn.Module], None]]
    """By version."""
    where: dict[int, str]
    """What each version is, in words."""
    numbers: Numbers


def main(arguments: Sequence[str]) -> int:
    """The command; gives 0 where all is explained, 1 where it is not, 2 where nothing can be."""
    description, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="torchrl-agents verify", description=description)
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="folder of a run, or a file of TRL's or verl's rollouts",
    )
    parser.add_argument("--step", type=int, action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--rows", type=int, default=_MOST_ROWS, help=f"most rows of a step ({_MOST_ROWS})"
    )
    parser.add_argument(
        "--agent", help="of a run of agents with weights of their own: whose rows are verified"
    )
    parser.add_argument("--device", default="cpu", help="to compute on: cpu, cuda, ... (cpu)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "autocast"),
        help="to compute in; autocast is bfloat16 over float32 (as the run's settings say)",
    )
    parser.add_argument("--tolerance", type=float, help="of a log-prob, in nats")
    parser.add_argument(
        "--engine",
        choices=("transformers", "vllm"),
        default="transformers",
        help="vllm: compute by vLLM in this process, too, beside Transformers (transformers)",
    )
    parser.add_argument(
        "--bits",
        action="store_true",
        help="every log-prob has to be the recorded one to the bit; of engine.batch_invariant=true",
    )
    parser.add_argument("--json", type=output_file, help="write all that was found into this file")
    page = "write a page with the gaps into this folder"
    parser.add_argument("--html", type=output_folder, help=page)
    foreign = parser.add_argument_group("of rollouts of TRL or verl, which are files")
    foreign.add_argument("--model", help="that drew them: a folder, or a hub id")
    for name, kind in {"temperature": float, "top-p": float, "top-k": int, "min-p": float}.items():
        foreign.add_argument(f"--{name}", type=kind, help="that they were drawn with")
    given = parser.parse_args(list(arguments))
    disable_progress_bar()
    names = ("temperature", "top_p", "top_k", "min_p")
    sampling = {n: getattr(given, n) for n in names if getattr(given, n) is not None}
    options = {n: getattr(given, n) for n in ("device", "dtype", "tolerance")}
    try:
        if given.run.is_file():
            if given.html is not None:
                raise SettingsError("--html shows the record of a run, not a file of rollouts.")
            if given.engine != "transformers":
                raise SettingsError(
                    "--engine is for a run of this library, not a file of rollouts."
                )
            for name in (each for each in ("bits", "agent") if getattr(given, each)):
                raise SettingsError(
                    f"--{name} is for a run of this library, not a file of rollouts."
                )
            certificate = verify_file(given.run, given.model, sampling=sampling, **options)
        else:
            _refuse_foreign(given.model, sampling)
            options |= {"most_rows": given.rows, "bits": given.bits, "engine": given.engine}
            options |= {"agent": given.agent}
            certificate = verify_run(given.run, steps=given.step, **options)
        if given.html is not None:
            write_html([VerifiedRecord(given.run, certificate)], given.html)
        if given.json is not None:
            given.json.write_text(json.dumps(certificate.to_json()), encoding="utf-8")
    except (CheckpointError, LookupError, ValueError, OSError) as error:
        told = error.args[0] if isinstance(error, LookupError) and error.args else error
        print(f"torchrl-agents verify: {told}", file=sys.stderr)
        return 2
    print("\n".join(certificate.lines()))
    if not certificate.num_tokens:
        return 2
    differs = given.bits and (certificate.bits is None or certificate.bits.num_differing > 0)
    return 0 if certificate.is_clean and not differs else 1


def _refuse_foreign(model: str | None, sampling: Mapping[str, Any]) -> None:
    """Refuse what the settings of a run say already."""
    given = [*(["model"] if model else []), *sampling]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise SettingsError(f"{names}: of a run its own settings say that. Leave it out.")


def verify_file(
    path: Path,
    model: str | None,
    *,
    sampling: Mapping[str, Any],
    device: str = "cpu",
    dtype: str | None = None,
    tolerance: float | None = None,
) -> Certificate:
    """Verify rollouts of TRL or verl with one model.

    Args:
        path: see :func:`~collectors.verification.read_foreign_rows`.
        model: folder or hub id.
        sampling: temperature, top_p, top_k and min_p that they were drawn with.
        device: to compute on.
        dtype: to compute in; float32 when not given.
        tolerance: see :func:`~collectors.verification.verify_rows`.

    Raises:
        SettingsError: no model was given, or it can't be loaded.
        ValueError: the file holds no rows, or a number is out of range.
    """
    if model is None:
        raise SettingsError(f"{path} is a file of rollouts: say which model drew them, --model=.")
    check_device(device)
    rows = read_foreign_rows(path)
    cfg = PolicyConfig(model=model, device=device, max_new_tokens=1, **sampling)
    numbers = _numbers({}, cfg, dtype)
    loaded, tokenizer = load_model(cfg, model_folder(model), who="--model")
    policy = TransformersWrapper(
        loaded,
        tokenizer=tokenizer,
        generate=False,
        generate_kwargs=sampling_of(cfg),
        autocast_dtype=numbers.autocast,
    )
    found = verify_rows(rows, Recomputation(policy, numbers=numbers), tolerance=tolerance)
    found.conditions = f"in {numbers} on {device}, with {model}"
    return found


def verify_run(
    folder: Path,
    *,
    steps: Sequence[int] | None = None,
    most_rows: int = _MOST_ROWS,
    device: str = "cpu",
    dtype: str | None = None,
    tolerance: float | None = None,
    engine: str = "transformers",
    bits: bool = False,
    agent: str | None = None,
) -> Certificate:
    """Verify the recorded rollouts of a run.

    Args:
        folder: of the run, with its record, ``config.yaml`` and ``model/``.
        steps: which are verified; all when not given.
        most_rows: of a step, the first ones.
        device: to compute on.
        dtype: to compute in: a type of torch, or ``"autocast"``; that of the settings when not
            given.
        tolerance: see :func:`~collectors.verification.verify_rows`.
        engine: ``"vllm"`` computes by vLLM, too.
        bits: refuse a run whose log-probs can't be had to the bit.
        agent: of agents with weights of their own the one whose rows are verified.

    Raises:
        FileNotFoundError: the folder holds no record.
        SettingsError: the settings or the model of the run can't be had.
        KeyError: there is no such step.
        ValueError: a number is out of range.
    """
    if most_rows < 1:
        raise ValueError(f"--rows must be positive, got {most_rows}.")
    record = RunRecord(folder)
    settings = read_settings(record.run_folder)
    saved = _agents_of(record.run_folder, agent)
    if bits:
        _check_bits(folder, settings, device=device, dtype=dtype)
    known = [summary.step for summary in record.steps]
    for step in steps or ():
        if step not in known:
            raise KeyError(
                f"there is no step {step} in {folder}; it has {min(known)} to {max(known)}"
            )
    rows: list[SampledRow] = []
    for step in steps or known:
        own = (x for x in record.samples(step) if saved is None or saved.owner(x.agent) == agent)
        samples = [*islice(own, most_rows)]
        rows += [SampledRow.of_sample(each) for each in samples if each.sampled_tokens]
    if not rows:
        whose = "" if agent is None else f" of {agent}"
        raise ValueError(
            f"{folder}: no sampled token{whose} is recorded in the steps {steps or known}."
        )
    weights = weights_of(record.run_folder, settings, device=device, dtype=dtype, agent=agent)
    coeff = (settings.get("loss") or {}).get("observation_coeff") or 0.0
    recomputation = Recomputation(
        weights.policy,
        weights.load,
        numbers=weights.numbers,
        keeps_cache=not (settings.get("collector") or {}).get("recompute", True),
    )
    checks = {"tolerance": tolerance, "check_trained": not coeff}
    if engine == "vllm":
        with _vllm_check(weights, recomputation, rows, device) as check:
            certificate = verify_rows(rows, recomputation, engine=check, **checks)
    else:
        certificate = verify_rows(rows, recomputation, **checks)
    for damage in dict.fromkeys(record.damage):
        why = "of the record this can't be read"
        certificate.rows.append(
            RowVerdict(name=damage, places=[], gaps=[], causes=[], not_checked=f"{why}: {damage}")
        )
    used = sorted({v for row in rows for v in row.versions if v in weights.where})
    have = "; ".join(f"version {v}: {weights.where[v]}" for v in used)
    certificate.conditions = f"in {weights.numbers} on {device}; {have or 'no weights of any row'}"
    return certificate


@contextmanager
def _vllm_check(
    weights: _Weights, recomputation: Recomputation, rows: Sequence[SampledRow], device: str
) -> Iterator[EngineCheck]:
    """An engine of vLLM over the run's model, while it is entered."""
    from torchrl_modules import VLLMEngine
    from torchrl_modules.vllm.runtime import import_vllm

    check_engine_can(recomputation)
    found = import_vllm().current_platform.device_type
    if torch.device(device).type != found:
        raise SettingsError(f"--engine vllm: the vLLM here runs on {found}, got --device {device}.")
    options: dict[str, Any] = {"dtype": str(weights.numbers.weights).removeprefix("torch.")}
    if (quantization := forward_quantization(weights.policy.model)) is not None:
        options["quantization"] = quantization
    longest = max(len(row.ids) for row in rows) + 1
    with TemporaryDirectory() as folder:
        model: Any = weights.policy.model
        model.save_pretrained(folder)
        with closing(VLLMEngine(folder, max_model_len=longest, **options)) as engine:
            yield EngineCheck(engine, recomputation)


def _check_bits(
    folder: Path, settings: Mapping[str, Any], *, device: str, dtype: str | None
) -> None:
    """Refuse what can't be computed to the bit."""
    engine = settings.get("engine") or {}
    if not _was_invariant(settings):
        raise SettingsError(
            f"--bits: {folder} was drawn by engine={engine.get('name')}, engine.batch_invariant="
            f"{str(bool(engine.get('batch_invariant'))).lower()}, so that the last bits of a "
            "log-prob depend on the rows beside it, and are not recorded. Run with "
            "engine=transformers engine.batch_invariant=true."
        )
    if device != "cpu" or dtype not in (None, "float32"):
        raise SettingsError(
            f"--bits: the run was drawn in float32 on a CPU, got --device {device} --dtype {dtype}."
        )


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a run.

    Raises:
        SettingsError: it left none.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise SettingsError(f"{folder} has no config.yaml, which a recipe leaves in its folder.")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def check_device(device: str) -> None:
    """Check that there is a device to compute on.

    Raises:
        SettingsError: there is not, or torch does not know it.
    """
    try:
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        told = str(error).partition("\n")[0]
        raise SettingsError(
            f"--device {device}: torch can't compute on it here ({told})."
        ) from error


def _agents_of(folder: Path, agent: str | None) -> SavedAgents | None:
    """The agents of a run, of which one is verified.

    Raises:
        SettingsError: it is none of them, or nobody says which.
    """
    saved = saved_agents(str(folder))
    if saved is None and agent is not None:
        raise SettingsError(
            f"--agent {agent}: {folder} has no agents with weights of their own. Leave it out."
        )
    if saved is not None and agent not in saved.settings.names:
        told = "say whose rows are verified, --agent=" if agent is None else f"got --agent {agent}"
        raise SettingsError(
            f"{folder}: the agents {saved.settings.names} have weights of their own; {told}."
        )
    return saved


def weights_of(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    device: str,
    dtype: str | None,
    agent: str | None = None,
) -> _Weights:
    """The model of a run, and how it gets the weights of each version that there still are.

    Args:
        folder: of the run.
        settings: of the run.
        device: to compute on.
        dtype: to compute in; that of the settings when not given.
        agent: whose model it is, of agents with weights of their own.

    Raises:
        SettingsError: there is no model.
    """
    known = {each.name for each in fields(PolicyConfig)}
    cfg = PolicyConfig(**{n: v for n, v in settings["policy"].items() if n in known})
    numbers = _numbers(settings, cfg, dtype)
    check_device(device)
    model, tokenizer, of_adapters = _model_of(folder, cfg, device)
    own = model if agent is None else model[agent]
    policy = TransformersWrapper(
        own,
        tokenizer=tokenizer,
        generate=False,
        generate_kwargs=sampling_of(cfg),
        chat_template_name=cfg.chat_template_name,
        max_model_len=cfg.max_model_len,
        autocast_dtype=numbers.autocast,
        batch_invariant=_is_batch_invariant(settings, numbers, device),
    )
    load: dict[int, Callable[[nn.Module], None]] = {}
    where: dict[int, str] = {}
    warmed = (settings.get("warm_start") or {}).get("num_steps") or 0
    # Adapters are put on after the demonstrations, so without them the first step's model is there.
    has_base = (folder / "base" / "config.json").is_file()
    begun = None if agent is None else saved_agents(cfg.model)
    if begun is not None and agent is not None:
        load[1] = partial(_load_saved, begun, agent, cfg, of_adapters)
        where[1] = f"{agent} of {cfg.model}, with which the run began"
    elif of_adapters and (has_base or not warmed):
        load[1], where[1] = _no_adapters, "the model before its adapters were trained"
    elif cfg.model is not None and not warmed and not of_adapters:
        load[1] = partial(_load_first, cfg, model_folder(cfg.model))
        where[1] = f"{cfg.model}, with which the run began"
    is_partial = of_adapters and not has_base
    store = CheckpointStore(folder / CHECKPOINTS)
    for one in stored(folder / CHECKPOINTS):  # the newest first
        checkpoint = store.load(one.path)
        pending = checkpoint.state.get("further", {}).get("pending")
        version = int(checkpoint.state["parts"]["collector"]["policy_version"])
        if pending is not None and pending["num_epochs"]:
            continue  # stopped amid its passes: these weights drew nothing
        if is_partial:
            saved = checkpoint.state["identity"].get("weights of policy.model")
            if saved != frozen_weights(model):
                raise SettingsError(
                    f"{folder}: its adapters were trained over other weights than {cfg.model} has "
                    "now, and these are nowhere. Put the model back."
                )
        if version not in load:
            fill = partial(checkpoint.load_sharded, "model")
            load[version] = partial(_load_checkpoint, fill, is_partial, model)
            where[version] = f"the checkpoint of step {one.step}"
    if not load:
        raise SettingsError(
            f"{folder} has no weights that drew recorded rollouts: no whole checkpoint, and the "
            "model that it began with was trained on demonstrations before step 1. Run with "
            "checkpoint.every=N checkpoint.keep_last=M, and verify the steps after a checkpoint."
        )
    return _Weights(policy, load, where, numbers)


def _was_invariant(settings: Mapping[str, Any]) -> bool:
    """Return whether Transformers drew a run so."""
    engine = settings.get("engine") or {}
    return engine.get("name") == "transformers" and bool(engine.get("batch_invariant"))


def _is_batch_invariant(settings: Mapping[str, Any], numbers: Numbers, device: str) -> bool:
    """Return whether a run was drawn so by Transformers, and is computed so."""
    is_plain = numbers == Numbers(torch.float32) and torch.device(device).type == "cpu"
    return is_plain and _was_invariant(settings)


def _numbers(settings: Mapping[str, Any], cfg: PolicyConfig, dtype: str | None) -> Numbers:
    """Numbers that the policy computed in, by the settings, or what is asked for."""
    own = getattr(torch, cfg.dtype)
    if dtype == "autocast":
        return Numbers(torch.float32, torch.bfloat16)
    if dtype is not None:
        return Numbers(getattr(torch, dtype))
    engine = settings.get("engine") or {}
    if engine.get("name") == "vllm":
        usual = "auto" if cfg.quantization is None else "bfloat16"
        said = (engine.get("engine_kwargs") or {}).get("dtype", usual)
        return Numbers(own if said == "auto" else getattr(torch, str(said)))
    autocast = (settings.get("train") or {}).get("autocast")
    return Numbers(own, torch.bfloat16 if autocast else None)


def _model_of(folder: Path, cfg: PolicyConfig, device: str) -> tuple[Any, Any, bool]:
    """The model of a run, or those of its agents; its tokenizer; and whether it has adapters."""
    if (saved := saved_agents(str(folder))) is not None:
        return saved_models(saved, replace(cfg, device=device, gradient_checkpointing=False))
    own = folder / "model"
    is_left = (own / "config.json").is_file()
    if not is_left and cfg.model is None:
        raise SettingsError(
            f"{folder} has no model/ yet, which a run leaves at its end, and the embedded model "
            "is nowhere else."
        )
    adapter = folder / "adapter"
    is_adapter = cfg.lora_rank is not None
    if is_adapter and not (adapter / "adapter_config.json").is_file():
        raise SettingsError(f"{folder} has no adapter/ yet, which a run with adapters leaves.")
    base = folder / "base"
    if is_adapter:
        source = str(base) if (base / "config.json").is_file() else model_folder(str(cfg.model))
    else:
        source = str(own) if is_left else model_folder(str(cfg.model))
    # A folder that a run left needs no template, tokens and revisions of the settings.
    plain = replace(cfg, device=device, gradient_checkpointing=False)
    if Path(source) in (own, base):
        plain = replace(plain, model_kwargs={}, add_control_tokens=False, chat_template=None)
    model, tokenizer = load_model(plain, source, who="the model of the run")
    if not is_adapter:
        return model, tokenizer, False
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(cast("Any", model), str(adapter), is_trainable=True)
    return adapted, tokenizer, True


def _load_checkpoint(fill: Load, is_partial: bool, whole: nn.Module, model: nn.Module) -> None:
    """Load what a checkpoint has: the model, or those of all agents, of which it is one."""
    del model
    with torch.no_grad():
        ShardedModel(whole, trained_only=is_partial).load_sharded(fill)


def _load_saved(
    saved: SavedAgents, agent: str, cfg: PolicyConfig, of_adapters: bool, model: nn.Module
) -> None:
    """Load what an earlier run left of an agent."""
    if not of_adapters:
        _load_first(cfg, saved.whole(agent), model)
    elif saved.adapter(agent).is_dir():
        load_adapter(model, saved.adapter(agent))
    elif is_adapted(model):
        _no_adapters(model)


def _load_first(cfg: PolicyConfig, source: str, model: nn.Module) -> None:
    first = load_causal_lm(source, dtype=getattr(torch, cfg.dtype), **dict(cfg.model_kwargs))
    model.load_state_dict(first.state_dict())


@torch.no_grad()
def _no_adapters(model: nn.Module) -> None:
    """As adapters are before the first step: what they add is zero. A model may have none."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.zero_()
