"""A reward model's score of a conversation does not depend on what it is batched with."""

import pickle

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions, RewardModel


@pytest.fixture
def classifier(chatml_tokenizer):
    def make(num_labels=1, pad=chatml_tokenizer.pad_token_id):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=len(chatml_tokenizer), hidden_size=16, intermediate_size=16,
                num_hidden_layers=1, num_attention_heads=2, num_labels=num_labels,
                pad_token_id=pad, initializer_range=0.3,
            )  # fmt: skip
            return LlamaForSequenceClassification(config).eval()

    return make


@pytest.mark.parametrize("pad", ["the tokenizer's", "another one", "none"])
def test_conversations_are_scored_as_alone(classifier, chatml_tokenizer, scripted, play, pad):
    used = {"the tokenizer's": chatml_tokenizer.pad_token_id, "another one": 65, "none": None}
    assert used["the tokenizer's"] != 65
    model = classifier(pad=used[pad])
    rows = [{"prompt": f"<{i}>"} for i in range(3)]
    script = {"<0>": ["a"], "<1>": ["a much longer reply, say it again"], "<2>": ["it is 4"]}
    env = ChatEnv(batch_size=3).append_transform(DataLoadingPrimer(rows))
    env.append_transform(RewardFunctions(RewardModel(model, chatml_tokenizer, batch_size=2)))
    end = play(env, scripted(script))[0]
    env.close()
    encoder = ConversationEncoder(chatml_tokenizer)
    expected = []
    for i in range(3):
        chat = [{"role": "user", "content": f"<{i}>"}]
        chat.append({"role": "assistant", "content": script[f"<{i}>"][0]})
        ids = torch.tensor([encoder.encode_chats([chat])[0].ids])
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state[0, -1]
            expected.append(model.score(hidden).item())
    assert end["rewards", "RewardModel"].view(-1).tolist() == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == 3


def test_a_conversation_without_a_position_for_each_token_is_an_error_of_its_own(
    classifier, chatml_tokenizer
):
    model = classifier()
    prompts = [[{"role": "user", "content": "a"}]] * 2
    said = [[{"role": "assistant", "content": "7" * length}] for length in (9, 10)]
    short, long = RewardModel(model, chatml_tokenizer)(prompts, said)
    chats = [[*a, *b] for a, b in zip(prompts, said, strict=True)]
    most, more = [len(it.ids) for it in ConversationEncoder(chatml_tokenizer).encode_chats(chats)]
    assert more > most
    model.config.max_position_embeddings = most
    held, failed = RewardModel(model, chatml_tokenizer)(prompts, said)
    assert held == pytest.approx(short, abs=1e-6)
    assert isinstance(long, float)
    assert str(failed) == f"it has {more} tokens, and the reward model takes {most}"


def test_wrong_models_are_named(classifier, chatml_tokenizer):
    with pytest.raises(ValueError, match="got 2 labels"):
        RewardModel(classifier(2), chatml_tokenizer)
    with pytest.raises(TypeError, match="needs the tokenizer"):
        RewardModel(classifier())
    with pytest.raises(TypeError, match="load=False is for a model that is loaded here"):
        RewardModel(classifier(), chatml_tokenizer, load=False)


def test_weights_are_read_when_they_score_and_by_each_copy_for_itself(
    classifier, chatml_tokenizer, tmp_path
):
    model = classifier()
    model.save_pretrained(tmp_path)
    chatml_tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    later = RewardModel(str(tmp_path), load=False)  # nothing of the file is needed
    chat = [[{"role": "user", "content": "2 + 2?"}]], [[{"role": "assistant", "content": "4"}]]
    with pytest.raises(OSError, match=r"model\.safetensors"):
        later(*chat)
    (tmp_path / "elsewhere").rename(weights)
    expected = RewardModel(model, chatml_tokenizer)(*chat)
    assert later(*chat) == pytest.approx(expected, abs=1e-6)
    sent = pickle.dumps(later)
    assert len(sent) < len(pickle.dumps(model))  # without the weights, which `later` has by now
    assert pickle.loads(sent)(*chat) == pytest.approx(expected, abs=1e-6)


def test_a_model_that_was_not_trained_to_classify_is_refused(chatml_tokenizer, tmp_path):
    config = LlamaConfig(
        vocab_size=len(chatml_tokenizer), hidden_size=16, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_labels=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    chatml_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lack the weights \['score.weight'\]"):
        RewardModel(str(tmp_path))
