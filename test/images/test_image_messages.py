"""Images in messages: read, kept as plain values, encoded, refused alone, and shown."""

import base64
import functools
import json
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tensordict import TensorDict
from vision_models import asked, idefics, llava, picture, qwen

from torchrl_data import (
    ConversationEncoder,
    Conversations,
    History,
    conversation_html,
    row_tensordicts,
)
from torchrl_data.content import ContentBase
from torchrl_data.conversation import Turn
from torchrl_data.conversation_state import conversation_states, conversations_from_states
from torchrl_data.images import (
    as_rgb_url,
    decoded,
    described,
    image_part,
    is_described_image,
    with_plain_images,
)
from torchrl_data.saved_rows import row_from_state, row_state
from torchrl_data.templates.image_processor import ImageProcessor

RED = (255, 0, 0)


def png(image):
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def said(part):
    return {"role": "user", "content": [part, {"type": "text", "text": "x"}]}


@settings(max_examples=25)
@given(
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    mode=st.sampled_from(["RGB", "RGBA", "L", "P", "1", "CMYK", "F"]),
    data=st.data(),
)
def test_an_image_in_memory_keeps_its_pixels(size, mode, data):
    pixels = data.draw(st.binary(min_size=size[0] * size[1] * 3, max_size=size[0] * size[1] * 3))
    image = Image.frombytes("RGB", size, pixels).convert(mode)
    part = image_part(image)
    assert list(part) == ["type", "data", "mime_type"]
    assert decoded(part["data"]).tobytes() == image.convert("RGB").tobytes()
    once = with_plain_images(said({"type": "image", "image": image}))
    assert once == said(part)
    assert with_plain_images(once) is once
    assert json.loads(json.dumps(once)) == once


def test_every_form_of_a_file_is_the_same_image(tmp_path):
    file = png(picture("red"))
    path = tmp_path / "a red one.png"
    path.write_bytes(file)
    text = base64.b64encode(file).decode()
    forms = [
        {"image": file},
        {"image": path},
        {"image": str(path)},
        {"image": {"bytes": file, "path": None}},
        {"data": text},
        {"data": text, "mime_type": "image/jpeg", "image": file},
        {"url": f"data:image/png;base64,{text}"},
        {"url": path.as_uri()},
    ]
    for form in forms:
        message = with_plain_images(said({"type": "image", **form}))
        assert message == said({"type": "image", "data": text, "mime_type": "image/png"})
    parts = [[ContentBase(type="image", data=text), ContentBase(type="text", text="x")]]
    history = History.from_chats([[{"role": "user", "content": parts[0]}]])
    assert history.to_chats()[0][0]["content"] == message["content"]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"url": "https://example.com/cat.jpg"}, "not fetched from the network"),
        ({"image": "/nowhere/cat.jpg"}, "can't be read from '/nowhere/cat.jpg'"),
        ({"image": b"no image"}, "8 bytes are no image"),
        ({"data": "???"}, "no base 64"),
        ({"image": 3}, "got int"),
        ({"alt": "x"}, r"holds no image, only \['alt', 'type'\]"),
    ],
)
def test_an_image_that_cant_be_read_costs_its_own_row(part, reason):
    _, tokenizer, processor = llava()
    encoder = ConversationEncoder(tokenizer, processor=processor)
    rows = Conversations.from_messages([asked("red"), [said({"type": "image", **part})]])
    encoded, errors = encoder.encode_rows(rows)
    assert encoded.position(0).awaits_response
    assert not encoded.position(1).awaits_response
    assert list(errors) == [1]
    with pytest.raises(type(errors[1]), match=reason):
        raise errors[1]


@pytest.mark.parametrize("build", [llava, qwen])
def test_tokens_are_those_of_the_processor(build):
    """Also where an image comes with a later message."""
    _, tokenizer, processor = build()
    encoder = ConversationEncoder(tokenizer, processor=processor)

    def reference(chat, images):
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return processor(text=text, images=images)["input_ids"][0]

    def shown(chat):
        return [described_place(message) for message in chat]

    def described_place(message):
        content = message["content"]
        if isinstance(content, str):
            return message
        return {
            **message,
            "content": [p if p["type"] == "text" else {"type": "image"} for p in content],
        }

    chat = asked("red", "blue", size=(48, 32))
    state = encoder.encode_waiting(Conversations.from_messages([chat]))
    pictures = [picture("red", (48, 32)), picture("blue", (48, 32))]
    assert state.ids(0) == list(reference(shown(chat), pictures))
    assert state.images(0) == [image_part(image)["data"] for image in pictures]
    ids, content = encoder.encode_turn("red", close=True)
    turn = Turn(ids, [0.0] * len(ids), {"role": "assistant", "content": content})
    later = asked("green", text="And now?")
    state = encoder.encode_waiting(state.append_turns([turn]).append_messages([later]))
    whole = [*shown(chat), turn.message, *shown(later)]
    assert state.ids(0) == list(reference(whole, [*pictures, picture("green")]))
    assert len(state.images(0)) == 3


@functools.cache
def model_of(build):
    return build()


@settings(max_examples=40, deadline=None)
@given(build=st.sampled_from([llava, qwen, idefics]), data=st.data())
def test_a_placeholder_an_image_is_the_inverse_of_its_tokens(build, data):
    """Whatever else a row holds: marks that a processor writes around images, too."""
    _, tokenizer, processor = model_of(build)
    images = ImageProcessor(processor)
    sizes = st.sampled_from([(32, 32), (64, 32), (32, 64), (48, 40)])
    colours = st.sampled_from(["red", "blue"])
    pictures = data.draw(st.lists(st.builds(picture, colours, sizes), max_size=3))
    others = set(range(len(tokenizer))) - {images.token_id, images.place_id}
    marks = set(images.process([image_part(picture("red"))["data"]]).ids) & others
    tokens = st.sampled_from(sorted(others)) | st.sampled_from(sorted(marks or others))
    row, collapsed, media = [], [], [image_part(each)["data"] for each in pictures]
    for image in [*media, None]:
        text = data.draw(st.lists(tokens, max_size=6))
        row += text + (images.process([image]).ids if image else [])
        collapsed += text + ([images.place_id] if image else [])
    assert images.collapse(row, media) == collapsed
    if not media:
        return
    for wrong in (media[:-1], [*media, media[0]]):
        with pytest.raises(ValueError, match="images were lost"):
            images.collapse(row, wrong)
    at = [i for i, token in enumerate(row) if token == images.token_id]
    cut = data.draw(st.sampled_from(at))
    with pytest.raises(ValueError, match="images were lost"):
        images.collapse(row[:cut] + row[cut + 1 :], media)


def test_an_image_for_others_is_as_it_is_read_here():
    """What is plain stays the file that it is; anything else is written anew."""

    def opened(url):
        head, _, body = url.partition(",")
        assert head.startswith("data:image/")
        image = Image.open(BytesIO(base64.b64decode(body)))
        assert image.mode == "RGB"
        return image

    plain = image_part(picture("red", (40, 24)))
    assert as_rgb_url(plain["data"]) == f"data:image/png;base64,{plain['data']}"
    half = picture("red", (40, 24)).convert("RGBA")
    half.putalpha(64)
    exif, file = Image.Exif(), BytesIO()
    exif[0x0112] = 6  # turned by a quarter
    picture("blue", (40, 24)).save(file, format="JPEG", exif=exif)
    for source, size in (
        (half, (40, 24)),
        (file.getvalue(), (24, 40)),
        (half.convert("L"), (40, 24)),
    ):
        data = image_part(source)["data"]
        image = opened(as_rgb_url(data))
        assert image.size == size
        assert image.tobytes() == decoded(data).tobytes()
    with pytest.raises(ValueError, match="no image that can be read"):
        as_rgb_url(base64.b64encode(b"no image").decode())


def test_no_text_spells_an_image():
    _, tokenizer, processor = qwen()
    encoder = ConversationEncoder(tokenizer, processor=processor)
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    state = encoder.encode_waiting(Conversations.from_messages([asked("red", text=text)]))
    assert state.ids(0).count(processor.image_token_id) == 4, "those of the image alone"
    assert encoder.images.fault(state.ids(0), state.images(0)) is None


def test_a_policy_without_a_processor_refuses_the_row_alone():
    _, tokenizer, processor = llava()
    rows = Conversations.from_messages([asked("red"), [{"role": "user", "content": "x"}]])
    encoded, errors = ConversationEncoder(tokenizer).encode_rows(rows)
    assert "nothing here reads images: give the policy the processor" in str(errors.pop(0))
    assert not errors
    assert encoded.position(1).awaits_response
    blind = tokenizer.chat_template.replace("<image>", "[image]")
    encoder = ConversationEncoder(tokenizer, processor=processor, chat_template=blind)
    assert "writes '<image>' 0 times for messages that hold 1" in str(
        encoder.encode_rows(rows).errors[0]
    )
    with pytest.raises(TypeError, match="takes the processor of a vision-language model"):
        ConversationEncoder(tokenizer, processor=tokenizer)


def test_saved_conversations_and_rows_keep_their_images():
    _, tokenizer, processor = llava()
    encoder = ConversationEncoder(tokenizer, processor=processor)
    state = encoder.encode_waiting(Conversations.from_messages([asked("red", "blue"), asked()]))
    assert conversations_from_states(conversation_states(state)) == state
    with_images, without = row_tensordicts(state)
    assert "images" not in without.keys()  # noqa: SIM118
    assert with_images["images"]["data"][0] is state.messages(0)[0]["content"][0]["data"], "shared"
    row = TensorDict({"of": with_images})
    assert row_from_state(row_state(row))["of", "images"] == with_images["images"]


def test_what_is_shown_is_the_size():
    state = Conversations.from_messages([asked(RED, size=(40, 24))])
    data = state.messages(0)[0]["content"][0]["data"]
    page = conversation_html(state)
    assert "[image 40x24]" in page
    assert data[:40] not in page
    told = described({"prompt": state.messages(0), "n": 1})
    part = told["prompt"][0]["content"][0]
    assert part == {"type": "text", "text": "[image 40x24]"}
    elsewhere = described({"type": "image", "url": "https://example.com/a.png"})
    assert is_described_image(part)
    assert is_described_image(elsewhere)
    for text in ("[image 40x24] of a cat", "[images]", ""):
        assert not is_described_image({"type": "text", "text": text})
    assert data[:40] not in json.dumps(told)
