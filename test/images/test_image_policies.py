"""Rows with images, sampled and scored: always as the model's own forward reads them."""

import asyncio
import copy
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from image_rollouts import GROUP, gap, make_env, scorer_of
from mcp.server import MCPServer
from mcp.types import ContentBlock, ImageContent
from tensordict import TensorDict, lazy_stack
from vision_models import asked, llava, picture, qwen

from collectors import LLMCollector
from collectors.record.row_values import recorded_prompt
from objectives import GRPOLoss, SFTLoss
from objectives.batching.equal_shares import equal_shares
from torchrl_agents.models.loading import load_model
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import PolicyConfig
from torchrl_data import Conversations, encode_demonstrations, row_tensordicts
from torchrl_data.conversation import continues
from torchrl_data.conversation_io import write_conversations
from torchrl_data.images import image_part
from torchrl_data.ragged.packed import pad
from torchrl_data.saved_rows import row_from_state, row_state
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_envs import MCPToolTransform
from torchrl_envs.rewards.kl import RetrieveLogProb
from torchrl_modules import EngineFleet, LLMWrapperBase, SamplingParameters, TransformersWrapper
from torchrl_modules.engines import image_readers
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.policies.async_policy import AsyncPolicy
from torchrl_modules.scoring.image_reading import RowPositions
from torchrl_modules.scoring.scorer import PackedScorer

CHATS = [
    asked("red"),
    asked("red"),
    asked("green"),
    [{"role": "user", "content": "What?"}],
    asked("blue", size=(48, 32)),
    asked("red", "green"),
    asked("blue", text="And?"),
]
PICTURES = [["red"], ["red"], ["green"], [], ["blue"], ["red", "green"], ["blue"]]


def reference(family, ids, row, temperature, never):
    """Log-probs of every token but the first: one row, with what the processor gives for it."""
    model, tokenizer, processor = family
    size = (48, 32) if row == 4 else (32, 32)
    images = [picture(colour, size) for colour in PICTURES[row]]
    given = {}
    if images:
        chat = CHATS[row][0]["content"]
        content = [part if part["type"] == "text" else {"type": "image"} for part in chat]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        given = dict(processor(text=text, images=images, return_tensors="pt"))
        prompt = given.pop("input_ids")[0]
        given.pop("attention_mask")
        assert ids[: len(prompt)].tolist() == prompt.tolist()
        kinds = given.get("mm_token_type_ids")
        if kinds is not None:  # what follows is text
            more = torch.zeros(1, len(ids) - len(prompt), dtype=kinds.dtype)
            given["mm_token_type_ids"] = torch.cat([kinds, more], 1)
    logits = model(input_ids=ids[None], use_cache=False, **given).logits[0, :-1].double()
    for holder in model.modules():
        if hasattr(holder, "rope_deltas"):
            holder.rope_deltas = None
    logits[:, list(never)] -= 100
    return (logits / temperature).log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)


def sampled(policy, chats=CHATS, seed=0):
    torch.manual_seed(seed)
    _, full, reasons = policy.respond(Conversations.from_messages(chats))
    assert all(reason in ("stop", "length") for reason in reasons)
    return lazy_stack(row_tensordicts(full)), full


@pytest.mark.parametrize("cached", [True, False])
def test_sampled_and_scored_as_the_models_own_forward(policy, family, monkeypatch, cached):
    """In one batch: with one image, two, another size, none; and the same image twice."""
    reader = image_readers.ImageReader if cached else image_readers.WholeImageReader
    found = image_readers.find_image_reader(family[0], policy.engine.images)
    assert found is image_readers.ImageReader
    state, _ = image_readers._found_with_images[family[0]]
    monkeypatch.setitem(image_readers._found_with_images, family[0], (state, reader))
    rows, _ = sampled(policy)
    loss = GRPOLoss(policy, temperature=0.9)
    rows["advantage"] = torch.ones(len(rows), 1, 1)
    scores = loss._score(loss.pack(rows)).log_prob.split(
        [int(row["masks", "all_assistant_mask"].sum()) for row in rows.unbind(0)]
    )
    never = policy.encoder.images.never_drawn
    for i, (row, scored) in enumerate(zip(rows.unbind(0), scores, strict=True)):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        with torch.no_grad():
            expected = reference(family, ids, i, 0.9, never)[mask[1:]].float()
        assert len(expected)
        torch.testing.assert_close(row["log_probs", "full"][mask], expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(scored.detach(), expected, atol=1e-4, rtol=0)
    output = loss(rows)
    torch.testing.assert_close(output.ratio_mean, torch.tensor(1.0), atol=1e-4, rtol=0)
    output.total().backward()
    tower = [p.grad for name, p in family[0].named_parameters() if "patch_embed" in name]
    assert tower
    assert all(bool(grad.abs().sum() > 0) for grad in tower if grad is not None)
    family[0].zero_grad()


def test_equal_tokens_with_other_images_are_other_rows(policy):
    """In a batch, and one after the other, where caches could be found by their tokens."""
    (red, green), _ = sampled(policy, [asked("red"), asked("green")])
    assert torch.equal(red["tokens", "prompt"], green["tokens", "prompt"])
    ids = torch.cat([red["tokens", "full"]] * 3)
    lengths = torch.tensor([len(ids) // 3] * 3)
    mask = torch.cat([red["masks", "all_assistant_mask"]] * 3)
    images = [red["images"]["data"], green["images"]["data"], red["images"]["data"]]
    with torch.no_grad():
        first, second, third = policy.score_packed(
            ids, lengths, mask, temperature=0.9, images=images
        ).log_prob.chunk(3)
    assert (first - second).abs().max() > 1e-3
    torch.testing.assert_close(first, third)
    own = red["log_probs", "full"][red["masks", "all_assistant_mask"]]
    torch.testing.assert_close(first, own, atol=1e-4, rtol=0)
    params = SamplingParameters(max_new_tokens=1, temperature=0.0, stop_token_ids=(0,))
    prompt = red["tokens", "prompt"].tolist()
    together = policy.engine.generate([prompt] * 2, params, images=images[:2])
    alone = [policy.engine.generate([prompt], params, images=[its])[0] for its in images[:2]]
    assert together[0].log_probs != together[1].log_probs
    for one, other in zip(together, alone, strict=True):
        assert one.ids == other.ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_the_past_with_another_image_is_another_past(policy):
    red, green = Conversations.from_messages([asked("red"), asked("green")]).split()
    encode = policy.encoder.encode_waiting
    assert encode(red).ids(0) == encode(green).ids(0)
    assert not continues(encode(green), encode(red))
    assert continues(encode(Conversations.from_messages([asked("red")])), encode(red))
    batch = TensorDict(batch_size=[3])
    write_conversations(batch, "full", encode(Conversations.cat([red, green, red])))
    digests = [recorded_prompt(row)[0] for row in batch.unbind(0)]
    assert digests[0] == digests[2] != digests[1]


def test_a_conversation_with_images_in_several_turns(policy, family):
    """An image that comes after the policy's first turn is read with the next one."""
    _, full = sampled(policy, [asked("red"), asked("green")])
    grown = full.append_messages([asked("blue", text="And now?"), asked(text="So?")])
    _, full, _ = policy.respond(grown)
    assert [len(full.images(i)) for i in range(2)] == [2, 1]
    batch = TensorDict(batch_size=[2])
    write_conversations(batch, "full", full)
    scorer = TransformersWrapper(
        family[0],
        tokenizer=family[1],
        processor=family[2],
        generate=False,
        generate_kwargs={"temperature": 0.9},
    )
    scored = scorer(batch)
    for row, own in zip(scored.unbind(0), row_tensordicts(full), strict=True):
        mask = own["masks", "all_assistant_mask"]
        torch.testing.assert_close(
            row["log_probs", "full"][mask], own["log_probs", "full"][mask], atol=1e-4, rtol=0
        )
    rows = lazy_stack(row_tensordicts(full))
    given = scorer(rows.select("tokens", "masks", "images"))  # tokens and images alone
    for row, own in zip(given.unbind(0), scored.unbind(0), strict=True):
        torch.testing.assert_close(row["log_probs", "full"], own["log_probs", "full"])
    dense, distribution = scorer.log_prob(rows), scorer.get_dist(rows)
    padded = pad([row["log_probs", "full"] for row in scored.unbind(0)], value=0)
    torch.testing.assert_close(dense, padded)
    masks = [row["masks", "all_assistant_mask"] for row in rows.unbind(0)]
    assert torch.equal(distribution.mask, pad(masks, value=False))


def test_micro_batches_and_saved_rows_keep_the_images(policy):
    rows, _ = sampled(policy)
    rows["advantage"] = torch.linspace(-1, 1, len(rows))[:, None, None]
    loss = GRPOLoss(policy, temperature=0.9)
    whole = loss(rows).total()
    packed = loss.pack(lazy_stack([row_from_state(row_state(row)) for row in rows.unbind(0)]))
    window = loss.measure_window(packed)
    parts = [loss(part, window=window).total() for part in packed.micro_batches(num_rows=2)]
    torch.testing.assert_close(sum(parts), whole)
    order = torch.tensor([5, 3, 0, 6, 1, 4, 2])
    torch.testing.assert_close(loss(packed.take_rows(order), window=window).total(), whole)


def test_reference_log_probs_are_of_the_rows_with_their_images(policy):
    rows, _ = sampled(policy)
    scored = RetrieveLogProb(policy, temperature=0.9)(rows)
    for row in scored.unbind(0):
        own = row["log_probs", "full"]
        torch.testing.assert_close(row["next", "ref_log_probs", "full"], own, atol=1e-4, rtol=0)


def test_demonstrations_are_learnt_with_their_images(policy, family):
    answer = {"role": "assistant", "content": "red"}
    chats = [[*asked("red"), answer], [*asked("green"), answer]]
    rows = lazy_stack(row_tensordicts(encode_demonstrations(policy.encoder, chats)))
    loss = SFTLoss(policy, temperature=1.0)(rows).total()
    sums, count = 0.0, 0
    for i, row in ((0, rows[0]), (2, rows[1])):
        mask = row["masks", "all_assistant_mask"]
        never = policy.encoder.images.never_drawn
        log_probs = reference(family, row["tokens", "full"], i, 1.0, never)[mask[1:]]
        sums, count = sums - log_probs.sum(), count + len(log_probs)
    torch.testing.assert_close(loss.double(), sums / count, atol=1e-4, rtol=0)


# What can't read images says so ------------------------------------------------------------------


def test_no_row_is_scored_without_its_images(policy):
    rows, _ = sampled(policy, CHATS[:4])
    rows["advantage"] = torch.ones(len(rows), 1, 1)
    loss = GRPOLoss(policy, temperature=0.9)
    with pytest.raises(ValueError, match=r"sequence 0 .* its images were lost, or changed"):
        loss(rows.exclude("images"))
    packed = loss.pack(rows)
    with pytest.raises(ValueError, match="sequence 3 can't be scored: it holds 0 tokens"):
        policy.score_packed(
            packed.ids,
            packed.lengths,
            packed.target_mask,
            images=[*packed.images[:3], packed.images[0]],
        )
    text_only = PackedScorer(policy.model)
    with pytest.raises(ValueError, match="have images, and the scorer reads none"):
        text_only.score_packed(packed.ids, packed.lengths, packed.target_mask, images=packed.images)

    def score_packed(ids, lengths, target_mask, *, temperature=1.0, entropy=False):
        raise AssertionError(ids, lengths, target_mask, temperature, entropy)

    other = SimpleNamespace(score_packed=score_packed)
    with pytest.raises(TypeError, match=r"3 of 4 rows have images, and score_packed of .* none"):
        GRPOLoss(other, temperature=0.9)(rows)
    with pytest.raises(ValueError, match="3 of 4 rows have images, which are not dealt out to"):
        equal_shares(packed, 2, max_tokens=1000)


def test_no_row_is_sampled_without_its_images(policy, family):
    prompt = policy.encoder.encode_waiting(Conversations.from_messages([asked("red")]))
    [result] = policy.engine.generate([prompt.ids(0)], policy.sampling)
    assert "its images were lost" in result.error
    bare = TransformersWrapper(family[0], tokenizer=family[1])
    _, _, reasons = bare.respond(Conversations.from_messages(CHATS[2:4]))
    assert reasons[0].startswith("error: The messages hold images, and nothing here reads images")
    assert reasons[1] in ("stop", "length")
    [result] = bare.engine.generate([prompt.ids(0)], bare.sampling, images=[prompt.images(0)])
    assert result.error == "the engine has no processor for its images"


class Sees(BatchingEngine):
    """An asynchronous engine that reads images, as those of vLLM do."""

    @property
    def images(self):
        return self._inside.images

    async def respond(self, prompt, params, *, max_new_tokens=None, session=None, images=()):
        del session
        budgets = None if max_new_tokens is None else [max_new_tokens]
        media = {"images": [images]} if images else {}
        [drawn] = self._inside.generate([prompt], params, max_new_tokens=budgets, **media)
        return drawn


def test_a_fleet_hands_images_on(policy):
    rows = policy.encoder.encode_waiting(Conversations.from_messages(CHATS[2:5]))
    prompts, images = ([of(i) for i in range(3)] for of in (rows.ids, rows.images))
    params = replace(policy.sampling, temperature=0.0)
    expected = policy.engine.generate(prompts, params, images=images)
    with closing(BlockingEngine(EngineFleet([Sees(policy.engine), Sees(policy.engine)]))) as fleet:
        assert fleet.images is policy.engine.images
        drawn = fleet.generate(prompts, params, images=images)
        assert [each.ids for each in drawn] == [each.ids for each in expected]
        assert not any(each.error for each in drawn)
        with pytest.raises(ValueError, match=r"3 prompts, but .* the images of 1"):
            fleet.generate(prompts, params, images=images[:1])
        turned = LLMWrapperBase(fleet, tokenizer=policy.tokenizer, generate_kwargs=params)
        assert sampled(turned, CHATS[2:5])[1].ids(0) == prompts[0] + expected[0].ids
    blind = BatchingEngine(policy.engine)
    assert getattr(blind, "images", None) is None
    with pytest.raises(ValueError, match="EngineFleet: some read images and others do not"):
        EngineFleet([Sees(policy.engine), blind])


def test_a_policy_sees_what_an_mcp_server_shows_it(family):
    server = MCPServer("eyes", log_level="CRITICAL")

    @server.tool()
    def look(colour: str) -> list[ContentBlock]:
        data = image_part(picture(colour, (64, 32)))["data"]
        return [ImageContent(type="image", data=data, mime_type="image/png")]

    policy = scorer_of(family)
    tools = MCPToolTransform({"eyes": server}, images=True, show_schemas=False)
    with LLMCollector(make_env(2, tools=tools), policy) as collector:
        rows = collector.collect()
    assert [len(row["images"]["data"]) for row in rows.unbind(0)] == [3] * (2 * GROUP)
    shown = {image for row in rows.unbind(0) for image in row["images"]["data"][1:]}
    assert shown <= {image_part(picture(colour, (64, 32)))["data"] for colour in ("green", "blue")}
    assert gap(rows, {0: policy}) < 1e-4


def test_an_engine_that_reads_no_images_refuses_the_row(policy):
    async def ask():
        asynchronous = AsyncPolicy(policy, SimpleNamespace(version=0))
        return await asynchronous.take_turn(Conversations.from_messages([asked("red")]))

    _, reason = asyncio.run(ask())
    assert reason.startswith("error: the prompt holds images, which SimpleNamespace does not read")


def test_models_of_several_ranks_refuse_a_processor(family, monkeypatch):
    monkeypatch.setattr(PackedScorer, "is_distributed", True)
    with pytest.raises(ValueError, match="rows with images take a pass for each of their shapes"):
        PackedScorer(family[0], images=ImageProcessor(family[2]))


def test_what_stands_for_an_image_is_never_drawn(family):
    model, tokenizer, processor = copy.deepcopy(family[0]), *family[1:]
    params = SamplingParameters(max_new_tokens=20, temperature=4.0, stop_token_ids=(0,))
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, processor=processor, generate_kwargs=params
    )
    rows, _ = sampled(policy, [asked("red")] * 40)
    drawn = torch.cat([row["tokens", "response"] for row in rows.unbind(0)])
    assert len(drawn.unique()) > 100, "nearly uniform"
    never = policy.encoder.images.never_drawn
    assert not torch.isin(drawn, torch.tensor(never)).any()
    forced = dict.fromkeys(never, 100.0)  # as a model may, that has learnt to
    policy._sampling = replace(policy.sampling, logit_bias=forced)  # which a setter would not take
    _, full, [reason, _] = policy.respond(Conversations.from_messages([asked("red"), CHATS[3]]))
    assert "which stand for images" in reason
    assert full.position(0).awaits_response


def test_a_cache_that_is_wrong_is_not_used(monkeypatch):
    model, _, processor = qwen(seed=3)
    monkeypatch.setattr(RowPositions, "take", lambda self, _: self.forget())
    images = ImageProcessor(processor)
    with pytest.warns(UserWarning, match="what Qwen2_5_VLForConditionalGeneration keeps of a row"):
        assert image_readers.find_image_reader(model, images) is image_readers.WholeImageReader


def test_loaded_from_a_folder_with_its_processor(tmp_path):
    model, tokenizer, processor = llava()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = {"generate_kwargs": {"max_new_tokens": 3}}
    loaded = TransformersWrapper(str(tmp_path), device="cpu", **settings)
    built = TransformersWrapper(model, tokenizer=tokenizer, processor=processor, **settings)
    with pytest.raises(SettingsError, match=r"policy\.model has to be a text model"):
        load_model(PolicyConfig(model=str(tmp_path)), str(tmp_path))
    rows, others = (sampled(policy, [asked("red")])[0] for policy in (loaded, built))
    assert torch.equal(rows[0]["tokens", "full"], others[0]["tokens", "full"])
    torch.testing.assert_close(rows[0]["log_probs", "full"], others[0]["log_probs", "full"])
