"""Episodes in which a tool shows images, and the gap between what was drawn and what is scored."""

import copy

import torch
from tensordict import lazy_stack
from torchrl.envs.transforms import Compose, StepCounter
from vision_models import asked, picture

from objectives import GRPOLoss
from torchrl_data import Conversations, row_tensordicts
from torchrl_data.tool_calls.records import ParsedTurn, ToolCall
from torchrl_envs import ChatEnv, DataLoadingPrimer, FunctionTools
from torchrl_modules import TransformersWrapper

# Every other token ends a turn, so that none is cut, which would end its episode.
SAMPLING = {"max_new_tokens": 40, "temperature": 0.9, "stop_token_ids": tuple(range(0, 280, 2))}
GROUP = 2
CHATS = [
    asked("red"),
    asked("red"),
    asked("green"),  # the same tokens as red
    [{"role": "user", "content": "What?"}],
    asked("red", "blue", size=(48, 64)),
    asked("blue", text="And?", size=(64, 32)),
]


def look(colour: str):
    """Look at something.

    Args:
        colour: of what is seen.
    """
    return ["This is seen:", picture(colour, (64, 32))]


def always_looks(text):
    """A turn as a model writes it that has learnt to look."""
    return ParsedTurn(text, [ToolCall("look", {"colour": ("green", "blue")[len(text) % 2]})])


def make_env(num_prompts, *, groups=2, tools=None):
    """Three turns for each prompt, with an image of its own; the tool shows others between."""
    colours = ("red", "green", "blue")
    rows = [{"prompt": asked(colours[i % 3], text=f"What is {i}?")} for i in range(num_prompts)]
    return ChatEnv(batch_size=groups * GROUP, tool_call_format=always_looks).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=GROUP, num_epochs=1),
            tools or FunctionTools([look], show_schemas=False),
            StepCounter(max_steps=3),
        )
    )


def scorer_of(family):
    model, tokenizer, processor = family
    return TransformersWrapper(
        model, tokenizer=tokenizer, processor=processor, generate_kwargs=SAMPLING
    )


def rows_of(conversations):
    return lazy_stack(row_tensordicts(conversations))


def sampled(policy, chats=CHATS):
    _, full, reasons = policy.respond(Conversations.from_messages(chats))
    assert all(reason in ("stop", "length") for reason in reasons), reasons
    return rows_of(full)


@torch.no_grad()
def gap(rows, scorers):
    """The largest difference of a drawn token's log-prob to that of its version's scorer."""
    drawn, versions = (
        torch.cat([row[key][row["masks", "all_assistant_mask"]] for row in rows.unbind(0)])
        for key in (("log_probs", "full"), ("policy_versions", "full"))
    )
    assert {*versions.tolist()} <= {*scorers}
    rows["advantage"] = torch.ones(len(rows), 1, 1)
    gaps = [0.0]
    for version, scorer in scorers.items():
        loss = GRPOLoss(scorer, temperature=scorer.temperature)
        scored = loss._score(loss.pack(rows)).log_prob
        gaps += (scored - drawn).abs()[versions == version].tolist()
    return max(gaps)


def with_pushes(collector, family, scorers):
    """The batches of a streaming collector, which is given new weights after each of three.

    In turn those of a model that sees otherwise, and of the first one. `scorers` gets a scorer for
    each version.
    """
    seen, pushed = set(), [sees_otherwise(family), family]
    for step, batch in enumerate(collector):
        assert [len(row["images"]["data"]) for row in batch.unbind(0)] == [3] * GROUP
        assert [row["num_turns"].item() for row in batch.unbind(0)] == [3] * GROUP
        yield batch
        seen |= {*batch[0]["policy_versions", "full"].tolist()}
        if step < 3:
            new = pushed[step % 2]
            version = collector.update_policy_weights_(new[0], wait=True)
            scorers[version] = scorer_of(new)
    assert len(seen - {-1}) > 1


def sees_otherwise(family):
    """The same language model, whose vision tower and connector are others."""
    model, *rest = family
    model = copy.deepcopy(model)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision" in name or "connector" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return (model, *rest)
