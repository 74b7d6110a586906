"""Training by the client of Tinker, against a plain loop over PEFT."""

import copy
import itertools
import warnings

import httpx2
import peft
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest
from transformers import GPT2Config, GPT2LMHeadModel

from torchrl_agents.training_service import http_server
from torchrl_agents.training_service.adapted_model import AdaptedModel, AdapterShape
from torchrl_agents.training_service.errors import RefusedRequest
from torchrl_agents.training_service.messages import read_first_fields

from .conftest import NAME

PROMPT = [5, 9, 33, 40, 12, 7]
ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)


def datum(ids, start, **inputs):
    """A row whose tokens from ``start`` on are trained; targets of its prompt are 0."""
    targets = [0] * (start - 1) + ids[start:]
    padded = {k: [0.0] * (start - 1) + list(v) for k, v in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": targets, **padded},
    )


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(3)
    return [
        PROMPT + torch.randint(4, 300, (n,), generator=generator).tolist() for n in (5, 3, 5, 8)
    ]


class PlainLoop:
    """The same training with PEFT and torch alone, one row after the other."""

    def __init__(self, model, rank, seed, layers):
        config = peft.LoraConfig(
            r=rank, lora_alpha=32, target_modules=layers, task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            self.model = peft.get_peft_model(copy.deepcopy(model), config)
        own = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            own, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1
        )

    def log_probs(self, ids, targets):
        logits = self.model(input_ids=torch.tensor([ids[:-1]])).logits[0].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None]).squeeze(1)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def test_steps_are_those_of_a_plain_loop(served, rows, make_tiny_model):
    """Log-probs, losses and weights after two steps, importance sampling then cross-entropy."""
    run = served.client.create_lora_training_client(NAME, rank=4, seed=11).result()
    plain = PlainLoop(make_tiny_model(), 4, 11, LAYERS)
    start = len(PROMPT)
    advantages = [1.0, -0.5, 0.25, 2.0]
    q = [[-2.0 - 0.1 * i for i in range(len(row) - start)] for row in rows]
    data = [
        datum(row, start, logprobs=old, advantages=[a] * len(old))
        for row, old, a in zip(rows, q, advantages, strict=True)
    ]
    for _ in range(2):
        passed = run.forward_backward(data, "importance_sampling")
        stepped = run.optim_step(ADAM)
        total = 0.0
        for row, old, a, told in zip(
            rows, q, advantages, passed.result().loss_fn_outputs, strict=True
        ):
            targets = [0] * (start - 1) + row[start:]
            now = plain.log_probs(row, targets)
            torch.testing.assert_close(
                told["logprobs"].to_torch(), now.detach(), atol=2e-5, rtol=1e-5
            )
            loss = -((now[start - 1 :] - torch.tensor(old)).exp() * a).sum()
            loss.backward()
            total += float(loss.detach())
        assert passed.result().metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
        norm = torch.stack([p.grad.norm() for p in plain.model.parameters() if p.requires_grad])
        assert stepped.result().metrics["grad_norm"] == pytest.approx(float(norm.norm()), rel=1e-4)
        plain.step()
    text = [datum(row, 1) for row in rows]  # without weights: all count
    told = run.forward(text, "cross_entropy").result()
    with torch.no_grad():
        expected = -sum(float(plain.log_probs(row, row[1:]).sum()) for row in rows)
    assert told.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_a_gradient_is_of_all_passes_since_the_last_step_and_forward_adds_none(served, rows):
    whole = served.client.create_lora_training_client(NAME, rank=2, seed=1).result()
    parts = served.client.create_lora_training_client(NAME, rank=2, seed=1).result()
    data = [datum(row, 1) for row in rows]
    whole.forward_backward(data, "cross_entropy")
    whole.forward(data, "cross_entropy")
    passes = [parts.forward_backward([one], "cross_entropy") for one in data]
    steps = [run.optim_step(ADAM).result() for run in (whole, parts)]
    assert all(each.result() for each in passes)
    norms = [step.metrics["grad_norm"] for step in steps]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_runs_beside_each_other_do_not_mix(served, rows):
    """Gradients of two runs of other shapes, taken in turns, are those of each alone."""
    data = [[datum(row, 1) for row in rows[:2]], [datum(row, 1) for row in rows[2:]]]
    shapes = [{"rank": 2, "seed": 5}, {"rank": 4, "seed": 6, "train_unembed": False}]

    def train(indices):
        runs = [
            served.client.create_lora_training_client(NAME, **shapes[i]).result() for i in indices
        ]
        for _ in range(2):
            for i, run in zip(indices, runs, strict=True):
                run.forward_backward(data[i][:1], "cross_entropy")
            for i, run in zip(indices, runs, strict=True):
                run.forward_backward(data[i][1:], "cross_entropy")
            for run in runs:
                run.optim_step(ADAM)
        return [
            run.forward(data[i], "cross_entropy").result().metrics["loss:sum"]
            for i, run in zip(indices, runs, strict=True)
        ]

    assert train([0, 1]) == pytest.approx(train([0]) + train([1]), rel=1e-6)


def test_adapters_come_and_go_in_whatever_order(adapted):
    """Another one, and the model as it is, go on when the active one, or the last one, is gone."""
    shapes = {"x": AdapterShape(2), "y": AdapterShape(2, train_mlp=False), "z": AdapterShape(3)}
    row = [torch.tensor(PROMPT)]

    def log_probs(name):
        return adapted.score(name, row, [1])[0][1:]

    plain, expected = log_probs(None), {}
    for order in itertools.permutations(shapes):
        for name, shape in shapes.items():
            with torch.no_grad():
                for value in adapted.add(name, shape, seed=ord(name)):
                    value.add_(0.05)
            expected[name] = expected.get(name, log_probs(name))
            assert not torch.equal(expected[name], plain)
        for i, name in enumerate(order):
            log_probs(name)  # so that it is active
            adapted.remove(name)
            torch.testing.assert_close(log_probs(None), plain)
            for left in order[i + 1 :]:
                torch.testing.assert_close(log_probs(left), expected[left])
                values = adapted.weights_of(left, shapes[left]).tensors
                ranks = {v.shape[0] for k, v in values.items() if "lora_A" in k}
                assert ranks == {shapes[left].rank}


def test_settings_of_a_step(served, rows):
    """Clipping bounds the norm, and the learning rate is that of this step."""
    run = served.client.create_lora_training_client(NAME, rank=2, seed=1).result()
    data = [datum(row, 1) for row in rows]
    before = run.forward(data, "cross_entropy").result().metrics["loss:sum"]
    run.forward_backward(data, "cross_entropy")
    clipped = types.AdamParams(learning_rate=1e-3, grad_clip_norm=1e-9, eps=1.0)
    told = run.optim_step(clipped).result().metrics["grad_norm"]
    assert told > 1.0  # before it was clipped
    after = run.forward(data, "cross_entropy").result().metrics["loss:sum"]
    assert after == pytest.approx(before, abs=1e-3)  # 1e-9 beside an eps of 1 moves nothing
    run.forward_backward(data, "cross_entropy")
    run.optim_step(types.AdamParams(learning_rate=0.0)).result()
    assert run.forward(data, "cross_entropy").result().metrics["loss:sum"] == after
    run.forward_backward(data, "cross_entropy")
    run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert run.forward(data, "cross_entropy").result().metrics["loss:sum"] < before - 1


def test_custom_losses_are_computed_beside_the_client(served, rows):
    run = served.client.create_lora_training_client(NAME, rank=2, seed=1).result()
    data = [datum(row, 1) for row in rows]

    def squared(data, log_probs):
        return sum(each.square().sum() for each in log_probs), {}

    told = run.forward_backward_custom(data, squared).result()
    log_probs = [each["logprobs"].to_torch() for each in told.loss_fn_outputs]
    expected = sum(float(each.square().sum()) for each in log_probs)
    assert told.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert run.optim_step(ADAM).result().metrics["grad_norm"] > 0


BAD = [
    ({"model_input": types.ModelInput.from_ints([])}, "has no token"),
    ({"loss_fn_inputs": {"target_tokens": [1, 2]}}, r"shape \[2\] for 3 positions"),
    ({"loss_fn_inputs": {"target_tokens": [1, 2, 999_999]}}, "outside the vocabulary"),
    ({"model_input": types.ModelInput.from_ints([1, 2, -1])}, "outside the vocabulary"),
    ({"model_input": types.ModelInput.from_ints([5] * 4000)}, "takes 1023 here"),
    ({"loss_fn_inputs": {"weights": [1.0] * 3}}, "lacks 'target_tokens'"),
    (
        {"loss_fn_inputs": {"target_tokens": [1, 2, 3], "weights": [1.0, float("nan"), 1.0]}},
        "NaN or infinity",
    ),
    (
        {"loss_fn_inputs": {"target_tokens": [1, 2, 3], "advantages": [1.0] * 3}},
        "which this loss does not read",
    ),
]


@pytest.mark.parametrize(("wrong", "words"), BAD)
def test_bad_data_is_told_and_no_step_is_made_with_the_rest(served, rows, wrong, words):
    run = served.client.create_lora_training_client(NAME, rank=2, seed=1).result()
    good = [datum(row, 1) for row in rows]
    before = run.forward(good, "cross_entropy").result().metrics["loss:sum"]
    fields = {
        "model_input": types.ModelInput.from_ints([4, 5, 6]),
        "loss_fn_inputs": {"target_tokens": [5, 6, 7]},
    }
    first = run.forward_backward(good, "cross_entropy")
    second = run.forward_backward([types.Datum(**{**fields, **wrong})], "cross_entropy")
    step = run.optim_step(ADAM)
    assert first.result()
    with pytest.raises(tinker.RequestFailedError, match=words):
        second.result()
    with pytest.raises(tinker.RequestFailedError, match="made no step"):
        step.result()
    assert run.forward(good, "cross_entropy").result().metrics["loss:sum"] == before
    # What comes next is whole.
    run.forward_backward(good, "cross_entropy")
    assert run.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_a_step_without_a_gradient_is_refused(served):
    run = served.client.create_lora_training_client(NAME, rank=2).result()
    with pytest.raises(tinker.RequestFailedError, match="there is no gradient"):
        run.optim_step(ADAM).result()


def test_what_is_not_served_is_refused_by_name(served):
    make = served.client.create_lora_training_client
    with pytest.raises(tinker.NotFoundError, match="there is mine/tiny"):
        make("other/model").result()
    with pytest.raises(tinker.RequestFailedError, match="rank must be at least 1, got 0"):
        make(NAME, rank=0).result()
    with pytest.raises(tinker.BadRequestError, match="dimuon"):
        make(NAME, optimizer=types.DimuonOptimizerConfig()).result()


def test_a_model_of_which_the_head_alone_can_have_an_adapter_is_told(chatml_tokenizer):
    config = GPT2Config(vocab_size=len(chatml_tokenizer), n_embd=16, n_layer=1, n_head=2)
    model = AdaptedModel("gpt", GPT2LMHeadModel(config), chatml_tokenizer, "")
    with pytest.raises(RefusedRequest, match=r"the layers of gpt can't have adapters.*train_attn="):
        model.add("whole", AdapterShape(2, True, True, True))
    down, up = model.add("head", AdapterShape(2, False, False, True))  # its layers are Conv1D
    assert (down.shape, up.shape) == ((2, 16), (len(chatml_tokenizer), 2))


def test_a_request_that_is_sent_twice_is_done_once(served, rows):
    """A client that did not hear the answer asks again with the same number."""
    run = served.client.create_lora_training_client(NAME, rank=2, seed=1).result()
    once = served.client.create_lora_training_client(NAME, rank=2, seed=1).result()
    asked = types.ForwardBackwardRequest(
        types.ForwardBackwardInput([datum(rows[0], 1)], "cross_entropy"), run.model_id, 1
    )
    body = forward_backward_request_to_proto(asked).SerializeToString()
    told = [
        httpx2.post(f"{served.url}/api/v1/forward_backward", content=body).json() for _ in range(2)
    ]
    assert told[0] == told[1] == {"request_id": f"{run.model_id}:1"}
    once.forward_backward([datum(rows[0], 1)], "cross_entropy")
    run._request_id_counter = run._turn_counter = 1
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (run, once)]
    assert norms[0] == norms[1]


@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_a_run_goes_on_after_a_request_that_was_refused_before_its_turn(served, rows):
    """Its number counts, and a step that is refused lets go of the gradient as one that fails."""
    first, second = ([datum(rows[at], 1)] for at in (0, 3))
    run, other = (
        served.client.create_lora_training_client(NAME, rank=2, seed=1).result() for _ in range(2)
    )
    run.forward_backward(first, "cross_entropy").result()
    with pytest.raises(tinker.UnprocessableEntityError, match="learning_rate: Input should be"):
        run.optim_step(types.AdamParams(learning_rate=float("nan"))).result()
    with pytest.raises(tinker.NotFoundError, match="nowhere"):
        run.load_state(f"tinker://{run.model_id}/weights/nowhere").result()
    told = []
    for each in (run, other):  # the gradient of `second` alone
        each.forward_backward(second, "cross_entropy").result(30)
        told.append(each.optim_step(ADAM).result(30).metrics["grad_norm"])
    assert told[0] == told[1]


def test_a_body_that_can_not_be_read_leaves_no_hole_and_no_step_without_its_gradient(served, rows):
    """What the client's own bytes begin with says whose it is; the rest of them was cut off."""
    run = served.client.create_lora_training_client(NAME, rank=2, seed=1).result()
    good = [datum(rows[0], 1)]
    whole = run.forward_backward(good, "cross_entropy").result(30)
    asked = types.ForwardBackwardRequest(
        types.ForwardBackwardInput(good, "cross_entropy"), run.model_id, 2
    )
    body = forward_backward_request_to_proto(asked).SerializeToString()
    told = httpx2.post(f"{served.url}/api/v1/forward_backward", content=body[:-1])
    assert told.status_code == 400
    run._request_id_counter = run._turn_counter = 2
    with pytest.raises(tinker.RequestFailedError, match=r"no step.*seq_id 2 was refused"):
        run.optim_step(ADAM).result(30)
    again = run.forward_backward(good, "cross_entropy").result(30)
    assert again.metrics == whole.metrics
    assert run.optim_step(ADAM).result(30).metrics["grad_norm"] > 0


def test_requests_that_never_come_are_given_up_and_no_step_is_made_without_them(
    serve, rows, monkeypatch
):
    monkeypatch.setattr(http_server, "_WAIT_S", 0.3)  # the client asks again so often
    run = serve(missing_timeout_s=0.5).client.create_lora_training_client(NAME, rank=2).result()
    good = [datum(rows[0], 1)]
    whole = run.forward_backward(good, "cross_entropy").result(30)
    run._request_id_counter = run._turn_counter = 3  # numbers 2 and 3 were lost on their way
    assert run.forward_backward(good, "cross_entropy").result(30).metrics == whole.metrics
    with pytest.raises(
        tinker.RequestFailedError, match=r"no step.*seq_id 3 .*did not come within 0\.5 s"
    ):
        run.optim_step(ADAM).result(30)
    run.forward_backward(good, "cross_entropy").result(30)
    assert run.optim_step(ADAM).result(30).metrics["grad_norm"] > 0


@given(st.text(min_size=1, max_size=200), st.integers(1, 2**31 - 1), st.data())
def test_whose_a_body_is_can_be_read_where_the_rest_is_missing(run, number, data):
    request = ForwardBackwardRequest(model_id=run, seq_id=number)
    head = len(request.SerializeToString())
    request.data.add()
    request.loss_fn = "cross_entropy"
    body = request.SerializeToString()
    cut = data.draw(st.integers(0, len(body)))
    assert read_first_fields(body[:cut])[1] == (number if cut >= head else None)
    assert read_first_fields(body)[0] == run
