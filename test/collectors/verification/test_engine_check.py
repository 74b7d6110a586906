"""Tokens computed by an engine beside Transformers: by which weights, what it closes, what not."""

import math
from functools import partial

import pytest
import torch

from collectors.verification import Recomputation, SampledRow, verify_rows
from collectors.verification.engine_check import EngineCheck
from torchrl_modules import TransformersWrapper

IDS = [[3, 5, 7, 9, 11, 13], [2, 4, 6, 8]]


class PromptEngine:
    """Computes prompts as vLLM does, with the weights that it was given, and a little beside."""

    def __init__(self, model, beside=0.0):
        self.model, self.beside, self.updates = model, beside, 0

    def update_weights(self, state_dict):
        self.model.load_state_dict(state_dict)
        self.updates += 1

    @torch.no_grad()
    def prompt_log_probs(self, rows):
        found = []
        for ids in rows:
            log_p = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            own = [float(log_p[t - 1, ids[t]]) + self.beside for t in range(1, len(ids))]
            found.append(torch.tensor([math.nan, *own], dtype=torch.float64))
        return found


@pytest.fixture
def computed(make_tiny_model, chatml_tokenizer):
    """A recomputation with two versions, their models, and a maker of its policy's sampling."""
    models = {version: make_tiny_model(version) for version in (1, 2)}

    def build(**sampling):
        policy = TransformersWrapper(
            make_tiny_model(0),
            tokenizer=chatml_tokenizer,
            generate=False,
            generate_kwargs=sampling,
        )
        load = {v: partial(_load, model.state_dict()) for v, model in models.items()}
        return Recomputation(policy, load)

    return models, build


def _load(weights, model):
    model.load_state_dict(weights)


def rows_of(models, beside=0.0):
    """Rows of which the first tokens are of version 1 and the last two of version 2."""
    rows = []
    for number, ids in enumerate(IDS):
        versions = [None, *[1] * (len(ids) - 3), 2, 2]
        values = {
            v: PromptEngine(model, beside).prompt_log_probs([ids])[0] for v, model in models.items()
        }
        log_probs = [math.nan if v is None else float(values[v][t]) for t, v in enumerate(versions)]
        rows.append(
            SampledRow(
                name=f"row {number}",
                ids=ids,
                sampled=[v is not None for v in versions],
                log_probs=log_probs,
                versions=versions,
            )
        )
    return rows


def test_each_token_is_computed_by_the_weights_of_its_version(computed, make_tiny_model):
    models, build = computed
    engine = PromptEngine(make_tiny_model(5))
    certificate = verify_rows(
        rows_of(models), recomputation := build(), engine=EngineCheck(engine, recomputation)
    )
    assert certificate.is_clean
    told = certificate.by_engine
    assert told is not None
    assert (told.num_tokens, told.num_only, engine.updates) == (8, 0, 2)
    assert told.largest < 1e-9
    assert 0 < told.apart < 1e-4
    assert any(line.startswith("by vllm: 8 tokens") for line in certificate.lines())


def test_what_the_engine_alone_gives_is_no_gap(computed, make_tiny_model):
    models, build = computed
    rows = rows_of(models, beside=-0.01)  # as an engine of other kernels
    recomputation = build()
    assert verify_rows(rows, recomputation).counts["unexplained"] > 0
    check = EngineCheck(PromptEngine(make_tiny_model(5), -0.01), recomputation)
    certificate = verify_rows(rows, recomputation, engine=check)
    assert certificate.is_clean
    assert certificate.by_engine is not None
    assert certificate.by_engine.num_only == 8
    # One that gives other numbers still closes nothing.
    check = EngineCheck(PromptEngine(make_tiny_model(5), 0.02), recomputation)
    assert not verify_rows(rows, recomputation, engine=check).is_clean


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 0.7}, "temperature=0.7"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"repetition_penalty": 1.1}, "penalties"),
    ],
)
def test_what_an_engine_can_not_compute_is_refused_by_name(sampling, words, computed):
    models, build = computed
    with pytest.raises(ValueError, match=f"--engine vllm: the run was drawn with .*{words}"):
        EngineCheck(PromptEngine(models[1]), build(**sampling))


def test_rows_with_sets_and_experts_are_refused(computed):
    models, build = computed
    check = EngineCheck(PromptEngine(models[1]), build())
    [row, _] = rows_of(models)
    sets = [b"\x02\x05\x00"] * len(row.ids)
    plain = {name: getattr(row, name) for name in ("ids", "sampled", "log_probs", "versions")}
    with pytest.raises(ValueError, match="row 0 has sampling_mask on record"):
        check.log_probs([SampledRow(name="row 0", sampling_masks=sets, **plain)])
    experts = [torch.zeros(len(row.ids), 2, dtype=torch.int64)]
    with pytest.raises(ValueError, match="row 0 has routed_experts on record"):
        check.log_probs([SampledRow(name="row 0", experts=experts, **plain)])
