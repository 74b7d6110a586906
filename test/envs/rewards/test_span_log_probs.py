"""A teacher with another tokenizer: values by hand and from the bare models, wherever it stands."""

import itertools

import pytest
import torch
from tensordict import lazy_stack
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from objectives import PolicyDistillation
from torchrl_data import Conversations, SpanAligner, read_conversations
from torchrl_data.text_spans.spans import TextSpan
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    RetrieveLogProb,
    RetrieveSpanLogProb,
    RewardFunctions,
)
from torchrl_envs.rewards.span_log_probs import spread_gaps
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

TEACHER, SPANS = ("next", "teacher_log_probs", "full"), ("next", "span_lengths", "full")


@pytest.fixture(scope="module")
def teacher():
    tokenizer = train_tokenizer(["yes it is, I say again and again: four"] * 8, vocab_size=310)
    torch.manual_seed(3)
    model = tiny_qwen3(len(tokenizer), hidden_size=32, head_dim=16, initializer_range=0.2).eval()
    return TransformersWrapper(model, tokenizer=tokenizer, generate=False)


@pytest.fixture(scope="module")
def student(chatml_tokenizer, make_tiny_model):
    return TransformersWrapper(
        make_tiny_model(0), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 12}
    )


@pytest.fixture
def collect(scripted, student):
    def run(*transforms, postproc=None):
        script = {"<a>": ["yes it is"], "<b>": ["it is 4, I say again and again"]}
        rows = [{"prompt": "<a>"}, {"prompt": "<b> with a longer prompt than the other"}]
        reward = RewardFunctions([lambda completions: [1.0] * len(completions)])
        env = ChatEnv(batch_size=2).append_transform(
            Compose(DataLoadingPrimer(rows), *transforms, reward)
        )
        policy = scripted(script, model=student.model)
        collector = LLMCollector(env, policy, postproc=postproc)
        batch = collector.collect()
        collector.shutdown()
        return batch

    return run


@pytest.mark.parametrize("place", ["environment", "postproc", "by hand"])
def test_values_of_the_bare_models(place, collect, student, teacher, reference_log_probs):
    transform = RetrieveSpanLogProb(teacher, student=student.encoder)
    if place == "environment":
        batch = collect(transform)
    elif place == "postproc":
        batch = collect(postproc=transform)
    else:
        batch = transform(collect())
    aligned = SpanAligner(student.encoder, teacher.encoder).align(
        read_conversations(batch, "full", who="test")
    )
    several = 0
    for row, its in zip(batch.unbind(0), aligned, strict=True):
        mask = row["masks", "all_assistant_mask"]
        own = reference_log_probs(student.model, row["tokens", "full"].tolist())
        theirs = reference_log_probs(teacher.model, its.ids)
        expected, lengths = torch.zeros(len(mask)), torch.zeros(len(mask))
        for span in its.spans:
            gap = theirs[span.teacher].sum() - own[span.student].sum()
            expected[span.student] = own[span.student] + gap
            lengths[span.student] = len(own[span.student])
            several += len(own[span.student]) > 1
        assert torch.equal(lengths > 0, mask), "all that was sampled is taught"
        torch.testing.assert_close(row[TEACHER], expected)
        assert torch.equal(row[SPANS], lengths)
    assert several, "some spans are of several tokens"


def test_values_by_hand():
    """Log-probs -1, -2 against -2 (a gap of 1), and -3 against -0.5, -0.5 (a gap of 2)."""
    spans = [TextSpan(slice(0, 2), slice(0, 1)), TextSpan(slice(3, 4), slice(1, 3))]
    student, teacher = torch.tensor([-1.0, -2, -9, -3]), torch.tensor([-2.0, -0.5, -0.5])
    log_prob, lengths = spread_gaps(student, teacher, spans)
    assert log_prob.tolist() == [0.0, -1.0, -9.0, -1.0], "no span, no gap"
    assert lengths.tolist() == [2.0, 2.0, 0.0, 1.0]


def test_the_gap_of_a_span_at_each_of_its_tokens_is_the_gradient_of_the_kl():
    """All texts of two letters are drawn; each is one token of the teacher, two of the student."""
    torch.manual_seed(0)
    first, second = torch.randn(3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    q = torch.randn(9).log_softmax(0)
    log_p = first.log_softmax(0)[:, None] + second.log_softmax(1)
    kl = (log_p.exp() * (log_p - q.view(3, 3))).sum()
    expected = torch.autograd.grad(kl, (first, second))

    surrogate = torch.zeros(())
    for a, b in itertools.product(range(3), repeat=2):
        own = torch.stack([first.log_softmax(0)[a], second[a].log_softmax(0)[b]])
        span = TextSpan(slice(0, 2), slice(0, 1))
        told, _ = spread_gaps(own.detach(), q[3 * a + b].view(1), [span])
        advantage = told - own.detach()
        surrogate = surrogate - own.sum().exp().detach() * (advantage * own).sum()
    found = torch.autograd.grad(surrogate, (first, second))
    torch.testing.assert_close(found, expected)


def test_a_loss_takes_it_as_it_is(collect, student, teacher):
    """With the weights that sampled, the loss of a token is its log-prob times minus the gap."""
    batch = RetrieveSpanLogProb(teacher, student=student.encoder)(collect())
    loss = PolicyDistillation(student)(batch).total()
    student.model.zero_grad()
    loss.backward()
    found = {n: p.grad.clone() for n, p in student.model.named_parameters() if p.grad is not None}
    student.model.zero_grad()
    total, count = 0.0, 0
    for row in batch.unbind(0):
        mask, ids = row["masks", "all_assistant_mask"], row["tokens", "full"]
        logits = student.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        log_prob = logits.gather(1, ids[1:, None]).squeeze(1)[mask[1:]]
        gap = (row[TEACHER] - row["log_probs", "full"])[mask]
        total, count = total - (gap * log_prob).sum(), count + len(gap)
    (total / count).backward()
    for name, parameter in student.model.named_parameters():
        # Sums of float32 in another order, of a norm of 10 and more.
        torch.testing.assert_close(found[name], parameter.grad, msg=name, rtol=1e-4, atol=1e-4)
    student.model.zero_grad()


def test_a_row_that_is_too_long_for_the_teacher_is_not_taught(collect, student, teacher):
    short, long = collect().unbind(0)
    most = len(
        SpanAligner(student.encoder, teacher.encoder)
        .align(Conversations.cat([read_conversations(short, "full", who="test")]))[0]
        .ids
    )
    transform = RetrieveSpanLogProb(teacher, student=student.encoder, max_model_len=most)
    batch = transform(lazy_stack([short, long]))
    assert [bool(row[SPANS].any()) for row in batch.unbind(0)] == [True, False]
    row = batch[1]
    own = row["log_probs", "full"].masked_fill(~row["masks", "all_assistant_mask"], 0)
    assert torch.equal(row[TEACHER], own)


def test_what_can_not_be_compared_is_refused(chatml_tokenizer, student, teacher):
    with pytest.raises(ValueError, match=r"have the same vocabulary.*Use RetrieveLogProb"):
        RetrieveSpanLogProb(student, student=student.encoder)

    class Scorer:
        def score_packed(self, ids, lengths, target_mask, *, temperature=1.0, entropy=False):
            raise AssertionError

    with pytest.raises(TypeError, match=r"Scorer has no encoder.*Give teacher=ConversationEnc"):
        RetrieveSpanLogProb(Scorer(), student=student.encoder)
    with pytest.raises(TypeError, match="score_packed"):
        RetrieveSpanLogProb(None, student=student.encoder)
    transform = RetrieveSpanLogProb(Scorer(), student=student.encoder, teacher=teacher.encoder)
    transform.check_policy(student)
    warm = TransformersWrapper(
        student.model,
        tokenizer=chatml_tokenizer,
        generate_kwargs={"temperature": 0.7, "min_p": 0.1},
    )
    with pytest.raises(ValueError, match=r"samples with temperature=0\.7, min_p=0\.1"):
        transform.check_policy(warm)
    with pytest.raises(ValueError, match="another tokenizer than student="):
        transform.check_policy(teacher)


def test_rows_that_were_changed_are_refused(collect, student, teacher):
    batch = collect()
    transform = RetrieveSpanLogProb(teacher, student=student.encoder)
    batch[0]["tokens", "full"][-1] += 1
    with pytest.raises(ValueError, match="not those of its conversation"):
        transform(batch)
    assert RetrieveLogProb(student, log_probs_full_key=TEACHER[1:]).entry == transform.entry
