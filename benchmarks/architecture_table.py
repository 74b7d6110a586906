"""The page that `architectures.py` writes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

READERS: Final = {
    "SlotReader": "one batch",
    "PaddedReader": "one batch",
    "OwnCacheReader": "by length",
    "OwnCachePositionsReader": "by length",
    "WholeRowReader": "whole rows again",
}
HEADER: Final = """# Architectures

Every decoder architecture of Transformers {version}, built small from its configuration with random
weights: `python benchmarks/architectures.py --output docs/architectures.md` writes this page.

- **scored**: `packed` rows lie beside each other without padding, and what they begin with in
  common is computed once; `padded` rows are padded on the right; `by length`: rows of one length at
  a time. *own logits*: the logits are more than the product with the head, so the model makes them.
- **difference**: between the scores of several rows together and the model's own eager forward of
  one row at a time, in nats, at worst; **gradient**: of all parameters, relative to the largest.
- **sampled**: `one batch` of prompts of any length, with a cache; `by length`: prompts of equal
  length together, with what the model keeps itself (recurrent states, convolutions); `whole rows
  again`: the cache does not give the model's own log-probs, so every token reads its whole row,
  which a warning says. **ratio**: between sampled log-probs and the model's own forward, in nats.

Models of the RoBERTa family skip the padding token when they count positions: where a sampled row
holds it, the ratio is off. Never let a policy over one draw it.

A scorer finds all that when it is built, on a few short rows; `scorer.reading` says what it found.

| | |
|---|---|
"""


def page(results: Sequence[Mapping[str, Any]], version: str) -> str:
    """Markdown of all results.

    Args:
        results: of `examine`.
        version: of Transformers.
    """
    built = [result for result in results if "not_built" not in result]
    scored = [result for result in built if "difference" in result]
    sampled = [result for result in built if "ratio" in result]
    refused = [result for result in built if "scored_error" in result or "sampled_error" in result]
    counts = {
        "built": len(built),
        "scored": len(scored),
        "of these packed": sum(result["scored"] == "packed" for result in scored),
        "largest difference, nats": f"{max(r['difference'] for r in scored):.1e}",
        "sampled": len(sampled),
        "largest ratio, nats": f"{max(r['ratio'] for r in sampled):.1e}",
    }
    lines = [HEADER.format(version=version).rstrip()]
    lines += [f"| {name} | {value} |" for name, value in counts.items()]
    lines += ["", "## Scored and sampled", ""]
    lines += ["| architecture | scored | difference | gradient | sampled | ratio |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [_row(result) for result in scored]
    lines += ["", "## Refused", "", *_reasons(refused, ("scored_error", "sampled_error"))]
    missing = [result for result in results if "not_built" in result]
    lines += ["", "## Not built", ""]
    lines += ["Their configuration is not that of a small decoder of text alone.", ""]
    lines += _reasons(missing, ("not_built",))
    return "\n".join(lines) + "\n"


def _row(result: Mapping[str, Any]) -> str:
    head = "" if result["head"] == "tiles" else ", *own logits*"
    drawn = READERS[result["sampled"]] if "ratio" in result else "refused, see below"
    ratio = f"{result['ratio']:.0e}" if "ratio" in result else ""
    return (
        f"| {result['name']} | {result['scored']}{head} | {result['difference']:.0e} "
        f"| {result['gradient']:.0e} | {drawn} | {ratio} |"
    )


def _reasons(results: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    lines = ["| architecture | why |", "|---|---|"]
    for result in results:
        said = next(result[key] for key in keys if key in result)
        lines.append(f"| {result['name']} | {said.replace('|', '/')} |")
    return lines
