"""Float32 parameters, computed with in bfloat16; heads in float32; losses that are compiled."""

import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from objectives import SFTLoss
from torchrl_modules import SamplingParameters, TransformersWrapper, chunked_log_prob
from torchrl_modules.scoring import chunked_log_prob as chunked_head
from torchrl_modules.scoring import scorer

IDS = torch.arange(4, 27)
LENGTHS = torch.tensor([9, 14])


@pytest.fixture
def ids():
    ids = IDS.clone()
    ids[9:13] = ids[:4]  # the rows begin alike
    return ids


@pytest.fixture
def mask():
    mask = torch.ones(23, dtype=torch.bool)
    mask[[0, 9]] = False
    return mask


@pytest.fixture
def build(chatml_tokenizer, make_tiny_model):
    def build(dtype=torch.float32, **settings):
        return TransformersWrapper(
            make_tiny_model().to(dtype), tokenizer=chatml_tokenizer, **settings
        )

    return build


def gradient_of(policy, ids, mask):
    policy.zero_grad()
    scores = policy.score_packed(ids, LENGTHS, mask, entropy=True)
    (scores.log_prob.sum() + scores.entropy.sum()).backward()
    grads = torch.cat([p.grad.flatten() for p in policy.parameters()])
    return scores, grads


def test_autocast_computes_in_bfloat16_and_leaves_gradients_to_float32(build, ids, mask):
    exact, exact_grads = gradient_of(build(), ids, mask)
    for outside in (False, True):
        policy = build() if outside else build(autocast_dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            scores, grads = gradient_of(policy, ids, mask)
        assert scores.log_prob.dtype == grads.dtype == torch.float32
        difference = (scores.log_prob - exact.log_prob).abs().max()
        assert 1e-4 < difference < 0.2, "bfloat16 has 8 bits"
        assert torch.nn.functional.cosine_similarity(grads, exact_grads, 0) > 0.99


@pytest.mark.parametrize("truncation", [{}, {"top_k": 10_000}], ids=str)
def test_a_head_of_float32_gives_the_exact_log_probs_of_its_hidden_states(build, ids, truncation):
    sampling = SamplingParameters(**truncation)
    policy = build(torch.bfloat16, head_dtype=torch.float32, generate_kwargs=sampling)
    ids, mask = ids[:9], torch.arange(9) > 0
    found = policy.score_packed(ids, LENGTHS[:1], mask).log_prob
    hidden = policy.model.base_model(input_ids=ids[None]).last_hidden_state[0, :-1].double()
    exact = (hidden @ policy.model.lm_head.weight.double().T).log_softmax(-1)
    exact = exact.gather(1, ids[1:, None]).squeeze(1).float()
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-5)
    coarse = (
        build(torch.bfloat16, generate_kwargs=sampling)
        .score_packed(ids, LENGTHS[:1], mask)
        .log_prob
    )
    assert (coarse - exact).abs().max() > 1e-4
    found.sum().backward()
    assert policy.model.lm_head.weight.grad.dtype == torch.bfloat16


def test_a_head_of_float32_over_bfloat16_weights_has_their_exact_gradient():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(11, 8, generator=generator).bfloat16().requires_grad_()
    bias = torch.randn(11, generator=generator).bfloat16().requires_grad_()
    targets = torch.tensor([0, 3, 10, 7, 7])
    leaves = (hidden, weight, bias)
    found = chunked_log_prob(
        hidden, weight, targets, bias=bias, entropy=True, compute_dtype=torch.float32
    )
    grads = torch.autograd.grad(found.log_prob.sum() + found.entropy.sum(), leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    log_p = (exact[0] @ exact[1].T + exact[2]).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None]).sum() - (log_p.exp() * log_p).sum()
    torch.testing.assert_close(
        (found.log_prob.sum() + found.entropy.sum()), expected.float(), rtol=1e-5, atol=1e-5
    )
    for grad, wanted in zip(grads, torch.autograd.grad(expected, exact), strict=True):
        # rounded to bfloat16 twice where a target's own part is added
        torch.testing.assert_close(grad, wanted.bfloat16(), rtol=2e-2, atol=2e-2)


@pytest.fixture
def fused(monkeypatch):
    """What is compiled on a GPU is compiled for this CPU."""
    monkeypatch.setattr(chunked_head, "_FUSED", {"cpu"})
    chunked_head._kernel.cache_clear()
    yield
    chunked_head._kernel.cache_clear()
    torch._dynamo.reset()


def head_and_gradients(dtype, *, entropy):
    """Log-probs, entropies and three gradients, over tiles that the sizes do not divide."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator)
    weight, bias = (torch.randn(1500, *size, generator=generator) / 3 for size in ((16,), ()))
    bias[5:1100] = -torch.inf  # a tile in which most tokens are forbidden
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    targets = torch.randint(1200, 1500, (300,), generator=generator)
    found = chunked_log_prob(
        leaves[0], leaves[1], targets, bias=leaves[2], temperature=0.7, entropy=entropy
    )
    loss = (found.log_prob * torch.linspace(-1, 1, 300)).sum()
    if entropy:
        loss = loss + (found.entropy * torch.linspace(0, 1, 300)).sum()
    results = [x.detach() for x in found if x is not None]
    return [*results, *torch.autograd.grad(loss, leaves)]


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of PyTorch itself
@pytest.mark.parametrize(
    ("dtype", "gap", "entropy"),
    [
        (torch.float32, 3e-5, True),
        (torch.bfloat16, 1.6e-2, False),
        pytest.param(torch.float32, 3e-5, False, marks=pytest.mark.weekly),
        pytest.param(torch.bfloat16, 1.6e-2, True, marks=pytest.mark.weekly),
    ],
)
def test_a_head_that_is_compiled_computes_the_same(request, dtype, gap, entropy):
    wanted = head_and_gradients(dtype, entropy=entropy)
    request.getfixturevalue("fused")
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    found = head_and_gradients(dtype, entropy=entropy)
    assert counted["unique_graphs"] >= 2  # forward and backward
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=gap, atol=gap)


def test_sampling_in_bfloat16_stores_what_scoring_in_bfloat16_gives(build):
    policy = build(autocast_dtype=torch.bfloat16)
    params = SamplingParameters(max_new_tokens=6, stop_token_ids=())
    torch.manual_seed(0)
    (drawn,) = policy.engine.generate([[5, 6, 7]], params)
    ids = torch.tensor([5, 6, 7, *drawn.ids])
    scores = policy.score_packed(ids, torch.tensor([9]), torch.arange(9) > 2).log_prob
    torch.testing.assert_close(scores, torch.tensor(drawn.log_probs), rtol=0, atol=0.15)


def rows(num_rows=2):
    row = TensorDict(
        {
            "tokens": {"full": torch.arange(10, 30)},
            "masks": {"all_assistant_mask": torch.arange(20) > 4},
        }
    )
    return lazy_stack([row.clone() for _ in range(num_rows)])


def test_a_loss_can_be_taken_under_autocast(build):
    policy = build()
    exact = SFTLoss(policy)(rows()).total()
    with torch.autocast("cpu", torch.bfloat16):
        loss = SFTLoss(policy)(rows()).total()
    torch.testing.assert_close(loss, exact, rtol=0, atol=0.1)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters())


COMPILED = """
import warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict, lazy_stack
from objectives import GRPOLoss, SFTLoss
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

tokenizer = train_tokenizer(["hello"], vocab_size=263)
torch.manual_seed(0)
model = tiny_qwen3(len(tokenizer))
policy = TransformersWrapper(model, tokenizer=tokenizer, chat_template_name="chatml")
ids = torch.arange(10, 30)
row = TensorDict({
    "tokens": {"full": ids},
    "masks": {"all_assistant_mask": ids > 14},
    "log_probs": {"full": -torch.ones(20)},
    "advantage": torch.ones(1),
})
batch = lazy_stack([row, row.clone()])
for kind in (SFTLoss, GRPOLoss):
    loss = kind(policy)
    gradients = []
    for call in (loss, torch.compile(loss, backend="eager")):
        model.zero_grad()
        total = call(batch).total()
        total.backward()
        gradients.append((total.detach(), model.lm_head.weight.grad.clone()))
    torch.testing.assert_close(*gradients)
    assert gradients[0][1].abs().max() > 1e-4
print("the same")
"""


@pytest.mark.weekly
def test_a_loss_can_be_compiled():
    # In a process of its own: what checks shapes in tests can't be traced.
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False
    )
    assert "the same" in done.stdout, done.stderr[-3000:]


def test_a_trial_runs_the_compiled_head_and_goes_without_where_it_fails(
    make_tiny_model, monkeypatch
):
    def fails(*_):
        raise RuntimeError("no compiler")

    calls = []
    counted = lambda f, kind: lambda *a: calls.append(kind) or f(*a)  # noqa: E731
    monkeypatch.setattr(chunked_head, "_kernel", counted)
    reading = scorer.PackedScorer(make_tiny_model(1)).reading
    assert reading.has_plain_head
    assert set(calls) == {"cpu"}
    monkeypatch.setattr(chunked_head, "_kernel", lambda *_: fails)
    why = "read packed, by its own logits, which is slower, because .* no compiler"
    with pytest.warns(UserWarning, match=why):
        reading = scorer.PackedScorer(make_tiny_model(2)).reading
    assert not reading.has_plain_head
    assert reading.layout.value == "packed"
