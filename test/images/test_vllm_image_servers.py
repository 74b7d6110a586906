"""Images sent to a vLLM server by HTTP: drawn as the Transformers scorer reads the rows."""

import asyncio
from contextlib import closing
from dataclasses import replace
from io import BytesIO

import pytest
from image_rollouts import (
    CHATS,
    SAMPLING,
    gap,
    make_env,
    rows_of,
    sampled,
    scorer_of,
    sees_otherwise,
    with_pushes,
)
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from vision_models import asked, idefics, picture

from collectors import StreamingCollector, Wait
from torchrl_data import Conversations
from torchrl_modules import VLLMServerEngine, open_async, start_server, vLLMWrapper
from torchrl_modules.vllm.bridges import OwnServerEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module", name="family")
def family_fixture():
    return idefics()


@pytest.fixture(scope="module", name="url")
def url_fixture(folder):
    """A server like any other one: that its model reads images is seen by its config."""
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
    with start_server(folder, **options) as url:
        yield url


@pytest.fixture(name="policy")
def policy_fixture(url, family):
    _, tokenizer, processor = family
    policy = vLLMWrapper(url, tokenizer=tokenizer, generate_kwargs=SAMPLING, processor=processor)
    with closing(policy.engine):
        if policy.engine.version:
            policy.update_weights(family[0].state_dict())
        yield policy


def half_transparent(colour):
    image = picture(colour, (64, 32)).convert("RGBA")
    image.putalpha(64)
    return image


def turned(colour):
    """A file of a camera that lay on its side; half of the picture is black."""
    image = picture(colour, (64, 32))
    image.paste("black", (0, 0, 32, 32))
    exif, file = Image.Exif(), BytesIO()
    exif[0x0112] = 6
    image.save(file, format="JPEG", exif=exif, quality=100)
    return file.getvalue()


def shown(image):
    return [{"role": "user", "content": [{"type": "image", "image": image}]}]


def test_what_a_server_draws_is_what_is_scored(policy, family):
    version = policy.engine.version
    chats = [*CHATS, shown(half_transparent("red")), shown(turned("green"))]
    rows = sampled(policy, chats)
    assert gap(rows, {version: scorer_of(family)}) < 1e-4
    other = sees_otherwise(family)
    assert gap(sampled(policy), {version: scorer_of(other)}) > 0.1, "the old vision tower"
    policy.update_weights(other[0].state_dict())
    assert gap(sampled(policy), {version + 1: scorer_of(other)}) < 1e-4


def test_a_response_in_flight_sees_with_the_weights_that_come(policy, family):
    other, first = sees_otherwise(family), policy.engine.version
    prompt = policy.encoder.encode_waiting(Conversations.from_messages([asked("red", "blue")]))
    endless = replace(policy.sampling, stop_token_ids=(), max_new_tokens=400)

    async def main():
        async with open_async(policy.engine) as engine:
            # So that the next one begins with a cached prefix.
            await engine.respond(prompt.ids(0), policy.sampling, images=prompt.images(0))
            call = asyncio.create_task(
                engine.respond(prompt.ids(0), endless, images=prompt.images(0))
            )
            while (await engine.measure_load()).cache_use == 0.0:
                assert not call.done()
            await engine.update_weights(other[0].state_dict())
            return await call

    drawn = asyncio.run(main())
    rows = rows_of(policy.append_generations(prompt, [drawn], 0))
    assert {*rows[0]["policy_versions", "full"].tolist()} == {-1, first, first + 1}
    assert gap(rows, {first: scorer_of(family), first + 1: scorer_of(other)}) < 1e-4


def test_a_fleet_streams_episodes_in_which_tools_show_images(url, family):
    _, tokenizer, processor = family
    arguments = {"tokenizer": tokenizer, "generate_kwargs": SAMPLING, "processor": processor}
    with closing(vLLMWrapper([url], **arguments).engine) as engine:
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs=SAMPLING)
        policy.update_weights(family[0].state_dict())
        scorers = {policy.engine.version: scorer_of(family)}
        env = make_env(12, groups=1)
        with StreamingCollector(env, policy, staleness=Wait(4)) as collector:
            for batch in with_pushes(collector, family, scorers):
                assert gap(batch, scorers) < 1e-4


def test_what_a_server_would_read_otherwise_is_refused(url, family, policy):
    _, tokenizer, processor = family
    whole = Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
    )
    other = type(processor)(whole, tokenizer, image_seq_len=4)
    with pytest.raises(ValueError, match=r"takes no images: vLLM makes \d+ tokens .* has 7; "):
        VLLMServerEngine(url, processor=other)
    with pytest.raises(TypeError, match="takes the processor of a vision-language model"):
        VLLMServerEngine(url, processor=tokenizer)
    prompt = policy.encoder.encode_waiting(Conversations.from_messages([asked("red")]))
    [lost] = policy.engine.generate([prompt.ids(0)], policy.sampling)
    assert "its images were lost" in lost.error
    with closing(OwnServerEngine(url)) as blind:
        assert blind.images is None
        call = blind.respond(prompt.ids(0), policy.sampling, images=prompt.images(0))
        assert "the engine has no processor for them" in asyncio.run(call).error
    with pytest.raises(TypeError, match="processor= applies when the wrapper builds the engine"):
        vLLMWrapper(policy.engine, tokenizer=tokenizer, processor=processor)
