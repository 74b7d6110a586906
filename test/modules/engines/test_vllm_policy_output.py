"""What a policy over vLLM writes on request: several responses a prompt, padding, metrics."""

import warnings

import pytest
import torch
from tensordict import TensorDict

from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import read_conversations, write_conversations
from torchrl_modules import TransformersWrapper, vLLMWrapper

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def chat_model(make_tiny_model):
    """A model with the vocabulary of the chat tokenizer."""
    return make_tiny_model(head_dim=32, max_position_embeddings=128)


@pytest.fixture(scope="module")
def chat_engine(chat_model, session_engine, tmp_path_factory):
    from torchrl_modules.vllm.engine import VLLMEngine

    directory = tmp_path_factory.mktemp("chat_model")
    chat_model.save_pretrained(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, while it is built
        engine = VLLMEngine(str(directory), kv_cache_memory_bytes=16 << 20, block_size=32)
    yield engine
    engine.close()


@pytest.fixture
def make_policy(chat_engine, chatml_tokenizer):
    def make(**kwargs):
        kwargs.setdefault("generate_kwargs", {"max_new_tokens": 5})
        return vLLMWrapper(chat_engine, tokenizer=chatml_tokenizer, **kwargs)

    return make


def make_batch():
    chats = [[{"role": "user", "content": text}] for text in ("hi", "xyz")]
    batch = TensorDict(batch_size=[2])
    write_conversations(batch, "prompt", Conversations.from_messages(chats))
    return batch


@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
def test_samples_of_a_group_and_their_scores_in_both_forms(
    make_policy, chat_model, chatml_tokenizer, pad_output
):
    torch.manual_seed(0)
    batch = make_policy(num_samples=3, pad_output=pad_output, untempered_log_probs=True)(
        make_batch()
    )
    assert batch.batch_size == torch.Size([2, 3])
    full = read_conversations(batch, "full", who="test")
    assert len({tuple(full.ids(i)) for i in range(3)}) > 1
    prompts = [full.ids(i)[: full.position(i).response_start] for i in range(6)]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3]
    scorer = TransformersWrapper(chat_model, tokenizer=chatml_tokenizer, generate=False)
    for i, row in enumerate(batch.reshape(-1).unbind(0)):
        mask = row["masks", "all_assistant_mask"]
        real = row["masks", "all_attention_mask"]
        assert row["tokens", "full"][real].tolist() == full.ids(i)
        sampled = row["log_probs", "full"][mask]
        assert torch.equal(row["untempered_log_probs", "full"][mask], sampled)
        ids = torch.tensor(full.ids(i))
        scored = scorer.score_packed(ids, torch.tensor([len(ids)]), mask[real]).log_prob
        torch.testing.assert_close(scored.detach(), sampled, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        pytest.param({"entropy": True}, r"can't report \['entropy'\]", id="entropy"),
        pytest.param(
            {"untempered_log_probs": True, "generate_kwargs": {"temperature": 0.7}},
            r"can't report \['untempered_log_probs'\].*TransformersWrapper",
            id="untempered",
        ),
    ],
)
def test_what_vllm_can_not_report_is_refused_before_an_engine_is_built(kwargs, words):
    with pytest.raises(ValueError, match=words):
        vLLMWrapper("no such model", **kwargs)
