"""The page that `architectures.py` writes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

READERS: Final = {
    "PrefixSlotReader": "one batch, shared",
    "SlotReader": "one batch",
    "PaddedReader": "one batch",
    "OwnCacheReader": "by length",
    "OwnCachePositionsReader": "by length",
    "WholeRowReader": "whole rows again",
}
HEADER: Final = """# Architectures

Every decoder architecture of Transformers {version}, built small from its configuration with random
weights: `python benchmarks/architectures.py --output docs/architectures.md` writes this page.

The table says in which way [a policy](policies.md#which-models) computes with each architecture,
and how exact this is. The policy finds the way by itself, on a few short rows when it is built;
`policy.scorer.reading` says what it found.

- **scored** is how log-probabilities are computed. `packed` rows lie one after the other without
  padding, and a common beginning is computed once; `padded` rows are padded on the right; `by
  length` means rows of one length at a time. *own logits*: the logits are more than the product
  with the head, so that they are computed by the model itself, for the whole vocabulary.
- **difference**: between the scores of several rows together and the model's own eager forward of
  one row at a time, in nats, at worst; **gradient**: of all parameters, relative to the largest.
- **sampled** is how tokens are sampled. `one batch`: prompts of any length together, with a cache;
  `one batch, shared`: what rows begin with alike is there once, too;
  `by length`: prompts of equal length together, with the model's own cache (recurrent states,
  convolutions); `whole rows again`: no cache gives the model's own log-probabilities, so that the
  whole row is read for every token, and a warning says so. **ratio** is the largest difference
  between sampled log-probabilities and those of the model's own forward pass, in nats.

Models of the RoBERTa family do not count the padding token as a position. If such a model samples
it, the ratio is wrong; exclude it from sampling (`logit_bias`).

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
