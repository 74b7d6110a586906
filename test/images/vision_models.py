"""Tiny vision-language models built from configs, with their processors: nothing is downloaded."""

import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen3Config,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from torchrl_modules.tiny_model import train_tokenizer

TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}PLACE"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _tokenizer(place, tokens):
    tokenizer = train_tokenizer(["What colour is it? red green blue"], vocab_size=300)
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("PLACE", place)
    return tokenizer


def llava(seed=0):
    """LLaVA: CLIP's patches of 8x8 pixels of a 32x32 image, 16 tokens each."""
    tokenizer = _tokenizer("<image>", ["<image>"])
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=tokenizer.chat_template,
    )
    config = LlavaConfig(
        text_config=Qwen3Config(
            vocab_size=len(tokenizer), head_dim=32, tie_word_embeddings=True, **TEXT
        ),
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
        ),
        image_token_id=processor.image_token_id,
        image_token_index=processor.image_token_id,
        vision_feature_layer=-1,
        image_seq_length=16,
        tie_word_embeddings=True,
    )
    return _seeded(lambda: LlavaForConditionalGeneration(config), seed), tokenizer, processor


class ImagesOnly(Qwen2_5_VLProcessor):
    """Without the processor of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, name, argument):
        del name, argument


def qwen(seed=0):
    """Qwen2.5-VL: positions in three dimensions, images of any size."""
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer("<|vision_start|><|image_pad|><|vision_end|>", marks)
    size = {"shortest_edge": 256, "longest_edge": 4096}
    pixels = Qwen2VLImageProcessorPil(
        patch_size=8,
        merge_size=2,
        temporal_patch_size=2,
        size=size,
        min_pixels=256,
        max_pixels=4096,
    )
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    ids = dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            tokenizer.convert_tokens_to_ids(marks),
            strict=True,
        )
    )
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": len(tokenizer), "rope_parameters": rope, **TEXT},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        **ids,
    )
    model = _seeded(lambda: Qwen2_5_VLForConditionalGeneration(config), seed)
    return model, tokenizer, ImagesOnly(pixels, tokenizer, chat_template=tokenizer.chat_template)


FAMILIES = {"llava": llava, "qwen2.5-vl": qwen}


def idefics(seed=0):
    """Idefics3, which vLLM reads without torchvision: an image is tiles of 4 tokens, and marks."""
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokenizer = _tokenizer("<image>", marks)
    pixels = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    processor = Idefics3Processor(
        pixels, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template
    )
    heads = {"head_dim": 32, "num_attention_heads": 2}  # vLLM has no smaller ones on a CPU
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    config = Idefics3Config(
        text_config=TEXT | heads | size | {"model_type": "llama"},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    model = _seeded(lambda: Idefics3ForConditionalGeneration(config), seed)
    return model, tokenizer, processor


def _seeded(build, seed):
    """Distributions far from uniform, in which an image makes a difference."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = build()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data *= 3
    return model.eval()


def picture(colour, size=(32, 32)):
    """An image of one colour."""
    return Image.new("RGB", size, colour)


def asked(*colours, text="What colour is it?", size=(32, 32)):
    """A prompt with an image of each colour before the text."""
    images = [{"type": "image", "image": picture(colour, size)} for colour in colours]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]
