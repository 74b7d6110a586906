"""Sharded weights reach an engine bucket by bucket, whole or not at all."""

import pytest


@pytest.mark.parametrize(("size", "case"), [(2, "grpo"), (2, "lora"), (4, "grpo")])
def test_an_update_is_taken_whole_or_refused_whole(found, size, case):
    """Beside the state dict of the same model (with adapters: PEFT's own merge) in one process."""
    everyone = found(f"push, {size} ranks, {case}")
    engine = everyone[0]
    assert engine["arrived"] == 0
    assert engine["largest"] == 64 * 64 * 8 < engine["all"] / 9, "no more than a layer is whole"
    for rank in everyone:
        taken, refused = rank["errors"]
        assert taken == ""
        assert "layers.1.mlp.up_proj.weight holds NaN or infinity" in refused
        assert "UpdateRefused: TransformersEngine refuses the weight update" in refused
        assert rank["model is as before"], "to the bit"
    assert engine["kept"] == 0
    assert engine["version"] == 1


@pytest.mark.parametrize("size", [2, 4])
def test_a_copy_for_a_streaming_engine_is_gathered_once_in_the_engines_type(found, size):
    first, *others = found(f"snapshot, {size} ranks")
    own = first["float64"] - first["tied"] - first["vectors"]
    assert first["names"] == {"lm_head.weight"}, "it is tied to the embedding"
    assert first["equal"]
    assert first["held"] == own / 4 + first["vectors"]
    assert first["gathered"] == first["held"] == others[-1]["gathered"]
    assert first["largest"] == 64 * 64 * 2, "no more than a layer is gathered at a time"


def test_weights_that_stop_coming_leave_no_engine_that_serves(found):
    (first, serving, second, again), other = found("broken")
    assert first == "RuntimeError: out of memory"
    assert "cannot serve: an update broke off in the middle" in serving
    assert (second, again) == ("", "")
    assert other[0] == "RuntimeError: The push of rank 0 broke off in the middle."


def test_each_rank_may_have_an_engine(found):
    assert found("everyone_pushes") == [(5, True), (5, True)]


def test_somebody_has_to_push(found):
    for error, whole in found("nobody_pushes"):
        assert "none of the 2 ranks pushes" in error
        assert whole is None, "weights that are whole need nobody's part"


def test_shards_go_through_the_transfer_to_vllms_workers(found):
    assert found("by_broadcast") == [({}, True, True), None]
