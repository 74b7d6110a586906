"""On a CPU rows share what they begin with where that saves time, in every type of its kernel."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_modules import SamplingParameters, TransformersEngine
from torchrl_modules.engines import shared_prefixes, slot_reader
from torchrl_modules.engines.readers import PrefixSlotReader
from torchrl_modules.engines.slot_reader import SlotReader
from torchrl_modules.scoring.packed_attention import use_packed_attention
from torchrl_modules.tiny_model import tiny_qwen3

PARAMS = SamplingParameters(max_new_tokens=12, seed=5, stop_token_ids=())
FIRST, SECOND = [*range(1, 30)], [*range(60, 80)]
PROMPTS = [FIRST] * 3 + [[*FIRST, 5, 6]] * 2 + [SECOND] * 2 + [[7, 8, 9]]


@pytest.fixture
def short_prefixes(monkeypatch):
    """Prefixes of a few tokens are shared, whatever that saves."""
    monkeypatch.setattr(shared_prefixes, "SHORTEST", 4)
    monkeypatch.setattr(slot_reader, "_PREFIX_PRICE", 0)


@pytest.fixture
def model():
    """Whose attention takes slots."""
    torch.manual_seed(0)
    built = tiny_qwen3(100)
    use_packed_attention(built)
    return built


class Operators(TorchDispatchMode):
    """Counts operators, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operators_of_a_step(cls, model, prompts):
    """Of the second token; and which reader it was."""
    reader = cls(model)
    with torch.no_grad():
        tokens = reader.advance(reader.read(prompts).argmax(-1)).argmax(-1)
        with Operators() as operators:
            reader.advance(tokens)
    return operators.counts, reader


def test_rows_that_share_nothing_are_read_as_if_none_ever_did(model):
    short, long = [*range(1, 80)], [*range(1, 90)] * 40
    for prompts in ([short, FIRST, [3, 4]], [short] * 4):  # which would save too little
        (found, reader), (expected, plain) = (
            operators_of_a_step(cls, model, prompts) for cls in (PrefixSlotReader, SlotReader)
        )
        assert found == expected
        assert reader.nbytes == plain.nbytes
    found, reader = operators_of_a_step(PrefixSlotReader, model, [long] * 5)
    flash = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert found[flash] == 2 * len(reader._layers)  # of what rows have, and of what they share
    _, plain = operators_of_a_step(SlotReader, model, [long] * 5)
    assert reader.nbytes < 0.4 * plain.nbytes


@pytest.mark.usefixtures("short_prefixes")
def test_rows_that_must_not_depend_on_each_other_share_nothing(model):
    assert TransformersEngine(model).reader is PrefixSlotReader
    engine = TransformersEngine(model, batch_invariant=True)
    assert engine.reader is SlotReader
    together = engine.generate(PROMPTS, PARAMS)
    for prompt, seed, one in zip(PROMPTS, PARAMS.row_seeds(len(PROMPTS)), together, strict=True):
        assert engine.generate([prompt], PARAMS, seeds=[seed]) == [one]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.usefixtures("short_prefixes")
def test_other_types_share_too(model, dtype):
    model.to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 0.05
    with torch.no_grad():
        readers = [PrefixSlotReader(model), SlotReader(model)]
        found, logits = (each.read(PROMPTS) for each in readers)
        for _ in range(4):
            found, logits = (each.advance(logits.argmax(-1)) for each in readers)
            assert found.dtype == dtype
            torch.testing.assert_close(found, logits, atol=tolerance, rtol=tolerance)
    assert readers[0]._prefixes.num_places > 0


@pytest.mark.usefixtures("short_prefixes")
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.bfloat16, 0.1), (None, 1e-5)])
def test_recorded_log_probs_are_the_models_own(model, kind, tolerance):
    found = TransformersEngine(model, autocast_dtype=kind).generate(PROMPTS, PARAMS)
    model.set_attn_implementation("eager")
    for prompt, one in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *one.ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        assert list(one.log_probs) == pytest.approx(expected.tolist(), abs=tolerance)
