"""The recipe of preferences: which rows it takes, in which order, and when it does not go on."""

import json
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

USER = {"role": "user", "content": "2 + 2?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "five"))


def test_rows_that_are_no_pairs_are_refused_by_their_number_or_left_out(run_script, tmp_path):
    good = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."} for n in range(9)]
    good[1]["prompt"] = [USER, FOUR, USER]
    same = {"prompt": "1?", "chosen": "Yes.", "rejected": "Yes."}
    long = {"prompt": "1?", "chosen": "Yes.", "rejected": "no " * 5000}
    nameless = {"prompt": "1?", "chosen": [FOUR | {"name": "Ann"}], "rejected": "No."}
    rows = tmp_path / "pairs.jsonl"
    own = ("debug=tiny", "logger=none", "dry_run=true", "task=spell_backward", "task.num_rows=64")
    own += ("data.dataset=pairs.jsonl", "data.num_held_out=4", "evaluate.num_prompts=4")

    def done(*bad, more=()):
        rows.write_text("\n".join(map(json.dumps, [*good[:5], *bad, *good[5:]])))
        return run_script(*own, *more, cwd=tmp_path, name="dpo")

    for bad, words in (
        (same, "row 5 of the preferences: 'chosen' and 'rejected' are the same"),
        (long, "1 of 10 pairs are longer than the 1024 tokens that the model takes"),
        (nameless, "row 5"),
    ):
        refused = done(bad)
        assert refused.returncode == 1
        assert words in refused.stderr.splitlines()[-1]
    left = done(same, long, nameless, more=("data.skip_bad_rows=true",))
    assert left.returncode == 0, left.stderr
    assert "1 of 12 rows (the first is row 0) hold no pairs, and are left out: [5]" in left.stderr
    assert "1 of 11 pairs are longer than the 1024 tokens" in left.stderr
    assert "1 of 11 pairs can't be encoded, and are left out" in left.stderr
    assert "5 pairs to train on, 4 held out" in left.stdout
    wrong = done(more=("loss.loss_function=ipo", "loss.label_smoothing=0.1"))
    assert "label_smoothing=0.1 goes with loss_function 'sigmoid', 'robust'" in wrong.stderr


def pair_rows(number, log_prob):
    """The two rows of a pair of which each answer has two tokens."""
    for chosen in (True, False):
        row = TensorDict({"pair_id": torch.tensor([number]), "chosen": torch.tensor([chosen])})
        row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        if log_prob is not None:
            row["next", "ref_log_probs", "full"] = torch.tensor([0.0, log_prob, log_prob])
        yield row


def sampler(script, log_prob=-1.0, *, seed=0, num_pairs=7):
    pairs = [[*pair_rows(number, log_prob)] for number in range(num_pairs)]
    return script("dpo").ReferencedRows(SimpleNamespace(), pairs, 3, seed)


def drawn(data):
    rows = data.draw(None)[1]
    assert rows["chosen"].squeeze(-1).tolist() == [True, False] * 3
    return rows["pair_id"].squeeze(-1).tolist()[::2]


def test_the_order_follows_from_the_seed_and_goes_on(script):
    data = sampler(script)
    needed = [pair[0]["pair_id"].item() for pair in data.first_units(2)]
    steps = [drawn(data) for _ in range(5)]
    assert steps[0] + steps[1] == needed
    told = [number for step in steps for number in step]
    assert sorted(told[:7]) == sorted(told[7:14]) == [*range(7)]
    assert told[:7] != told[7:14]
    assert len(data.first_units(5)) == 7
    assert [drawn(sampler(script, seed=1)) for _ in range(1)] != steps[:1]
    begun, again = sampler(script), sampler(script)
    assert [drawn(begun) for _ in range(3)] == steps[:3]
    again.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert [drawn(again) for _ in range(2)] == steps[3:]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"log_prob": -1.5}, "gave tokens of the first step's answers -1.0 nats, and gives -1.5"),
        ({"log_prob": None}, "and gives None: policy.model is not what it was"),
        ({"num_pairs": 6}, "there were 7 conversations, and are 6"),
    ],
)
def test_a_run_does_not_go_on_with_another_reference(script, now, words):
    state = sampler(script).state_dict()
    with pytest.raises(ValueError, match=words):
        sampler(script, **now).load_state_dict(state)
    sampler(script, -1.0001).load_state_dict(state)
