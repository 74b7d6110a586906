"""Every decoder architecture of Transformers, small: is it sampled and scored as it computes?

    python benchmarks/architectures.py --output docs/architectures.md
    python benchmarks/architectures.py qwen3 mamba  # some of them, printed

Each architecture is built from its configuration with random weights, in processes with a bound on
their memory and time. Scores of several rows, some of which begin alike, and the gradients of all
parameters are compared with the model's own eager forward of one row at a time; so are sampled
log-probs.
"""

import argparse
import inspect
import json
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tiny_architectures import architectures, build, class_name
from torch import Tensor

from torchrl_data.ragged.packed import pack
from torchrl_modules import SamplingParameters, TransformersEngine
from torchrl_modules.scoring.scorer import PackedScorer

MEMORY: Final = 10 << 30
"""Bytes of address space of a process."""
SECONDS: Final = 120
"""For an architecture."""
BATCH: Final = 12
LENGTHS: Final = (14, 9, 14, 1, 11, 20)
"""Of the rows: longer than windows and chunks of the small models."""
NUM_SHARED: Final = 6


def make_rows(size: int) -> list[Tensor]:
    """Rows of plain tokens, the first three and the last of which begin alike."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(4, size - 4, (n,), generator=generator) for n in LENGTHS]
    for i in (1, 2, 5):
        rows[i][:NUM_SHARED] = rows[0][:NUM_SHARED]
    return rows


def own_scores(model: Any, rows: Sequence[Tensor]) -> Tensor:
    """The model's log-probs, one row at a time."""
    parts = []
    for row in rows:
        logits = model(input_ids=row[None], **no_cache(model)).logits[0, :-1].float()
        parts.append(logits.log_softmax(-1).gather(1, row[1:, None]).squeeze(1))
    return torch.cat(parts)


def no_cache(model: Any) -> dict[str, bool]:
    """Tells a model that knows one to keep no cache."""
    known = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} if known else {}


def gradients(model: Any, scores: Tensor) -> dict[str, Tensor]:
    """Of all parameters, for an uneven sum of scores."""
    weights = torch.linspace(-1, 2, len(scores))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(scores @ weights, list(trained.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(trained.items(), found, strict=True)
    }


def eager(model_type: str) -> Any:
    """The reference, in the attention that leaves nothing out."""
    model = build(model_type)
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation("eager")
    return model


def try_scoring(model_type: str, rows: list[Tensor]) -> dict[str, Any]:
    """How an architecture is scored."""
    reference = eager(model_type)
    own = own_scores(reference, rows)
    expected = gradients(reference, own)
    model = build(model_type)
    scorer = PackedScorer(model)
    ids, lengths = pack(rows)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]] = False
    scores = scorer.score_packed(ids, lengths, mask).log_prob
    found = gradients(model, scores)
    scale = max(float(grad.abs().max()) for grad in expected.values())
    apart = max(float((found[name] - grad).abs().max()) for name, grad in expected.items())
    return {
        "scored": scorer.reading.layout.value,
        "head": "tiles" if scorer.reading.has_plain_head else "own logits",
        "difference": float((scores - own).detach().abs().max()),
        "gradient": apart / scale,
    }


def try_sampling(model_type: str, rows: list[Tensor]) -> dict[str, Any]:
    """How an architecture is sampled, and how far that is from its own forward."""
    model, reference = build(model_type), eager(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = TransformersEngine(model)
    prompts = [row[:-1].tolist() if len(row) > 1 else row.tolist() for row in rows]
    prompts += prompts[:2]
    # Some models take 0 in a row for padding, which no row goes on from.
    params = SamplingParameters(max_new_tokens=8, stop_token_ids=(0, 5, 6, 7, 8, 9, 10))
    torch.manual_seed(0)
    worst = 0.0
    for prompt, drawn in zip(prompts, engine.generate(prompts, params), strict=True):
        with torch.no_grad():
            own = own_scores(reference, [torch.tensor([*prompt, *drawn.ids])])[len(prompt) - 1 :]
        worst = max(worst, float((own - torch.tensor(drawn.log_probs)).abs().max()))
    return {"sampled": engine.reader.__name__, "ratio": worst}


def examine(model_type: str) -> dict[str, Any]:
    """What can be said of one architecture."""
    found: dict[str, Any] = {"type": model_type, "name": class_name(model_type)}
    try:
        model = build(model_type)
        rows = make_rows(model.config.get_text_config().vocab_size)
        model(input_ids=rows[0][None], **no_cache(model))
    except Exception as error:
        return found | {"not_built": one_line(error)}
    for name, examined in (("scored", try_scoring), ("sampled", try_sampling)):
        try:
            found |= examined(model_type, rows)
        except Exception as error:
            found[f"{name}_error"] = one_line(error)
    return found


def one_line(error: Exception) -> str:
    """An error as a cell of a table."""
    text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def work(types: Iterable[str]) -> None:
    """In a process of its own: one line of JSON per architecture."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for model_type in types:
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds()) + SECONDS, -1))
        print(json.dumps(examine(model_type)), flush=True)


def cpu_seconds() -> float:
    """Used by this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(types: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Architectures in batches, each in a process; what a process does not answer is said of it."""
    for start in range(0, len(types), BATCH):
        waiting = list(types[start : start + BATCH])
        while waiting:
            process = subprocess.run(
                [sys.executable, __file__, "--work", *waiting],
                capture_output=True,
                text=True,
                check=False,
            )
            lines = [json.loads(x) for x in process.stdout.splitlines() if x.startswith("{")]
            yield from lines
            waiting = waiting[len(lines) :]
            if waiting:
                died = waiting.pop(0)
                why = f"its process ended with {process.returncode}"
                yield {"type": died, "name": class_name(died), "not_built": why}


def main() -> None:
    """Examine architectures and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all when none is given")
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.types)
        return
    results = []
    for result in run(arguments.types or architectures()):
        print(json.dumps(result), file=sys.stderr, flush=True)
        results.append(result)
    if arguments.output:
        from architecture_table import page

        arguments.output.write_text(page(results, transformers.__version__))


if __name__ == "__main__":
    main()
