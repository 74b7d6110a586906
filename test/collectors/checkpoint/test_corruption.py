"""S04: whatever happens to a file is noticed and named, and the checkpoint before it is loaded."""

import random
import shutil

import pytest
import torch
from same_state import assert_same

from collectors import CheckpointError, CheckpointStore, CheckpointWarning

STATE = {"weights": torch.arange(300.0), "text": "a" * 200, "rows": [{"x": torch.tensor(1)}] * 3}


def write_more(path):
    path.mkdir()
    (path / "tokenizer.json").write_text("{}" * 40)


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "store")
    for step in (1, 2):
        store.save(step, STATE | {"step": step}, files={"model": write_more})
    store.close()
    return store


def spoil(path, chance):
    """Do something to a file; what it held."""
    before = path.read_bytes()
    how = chance.choice(["flip", "flip", "flip", "cut", "lengthen", "remove", "empty"])
    after = bytearray(before)
    if how == "flip":
        after[chance.randrange(len(before))] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del after[chance.randrange(len(before)) :]
    elif how == "lengthen":
        after += bytes(chance.randrange(1, 9))
    elif how == "empty":
        after.clear()
    path.unlink()
    if how != "remove":
        path.write_bytes(after)
    return before


def test_S04_500_flips_cuts_and_missing_files_are_all_named(store):
    chance = random.Random(0)
    newest = sorted(store.folder.glob("step-*"))[-1]
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) == 4
    for _ in range(500):
        path = chance.choice(files)
        before = spoil(path, chance)
        with pytest.warns(CheckpointWarning, match="^Step 1 is loaded instead: ") as caught:
            checkpoint = store.load()
        assert f"{path}: " in str(caught[0].message)
        assert len(caught) == 1
        assert checkpoint.step == 1
        with pytest.raises(CheckpointError, match="no checkpoint is whole"):
            store.load(2)
        path.unlink(missing_ok=True)
        path.write_bytes(before)
    assert store.load().step == 2
    assert_same(checkpoint.state, STATE | {"step": 1})


def test_S04_every_broken_file_of_every_newer_checkpoint_is_named(store):
    newer, older = sorted(store.folder.glob("step-*"))[::-1]
    (newer / "state.json").unlink()
    (newer / "model/tokenizer.json").unlink()
    (newer / "stray.safetensors").write_bytes(b"")
    with pytest.warns(CheckpointWarning) as caught:
        assert store.load().step == 1
    told = str(caught[0].message)
    assert f"{newer}/state.json: is missing" in told
    assert f"{newer}/model/tokenizer.json: is missing" in told
    assert f"{newer}/stray.safetensors: is not in the manifest" in told
    (older / "tensors.safetensors").unlink()
    (older / "tensors.safetensors").symlink_to(newer / "tensors.safetensors")
    with pytest.raises(CheckpointError) as error:
        store.load()
    assert f"{newer}/state.json: is missing" in str(error.value)
    assert f"{older}/tensors.safetensors: is no regular file" in str(error.value)
    with pytest.raises(CheckpointError, match=r"state.json: is missing"):
        store.load(newer)


def test_what_is_not_there_is_said(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    assert store.steps() == []
    assert not store.folder.exists()
    with pytest.raises(CheckpointError, match="none: holds no checkpoint"):
        store.load()
    store.save(3, {})
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of step 4 \(there are \[3\]\)"):
        store.load(4)
    with pytest.raises(CheckpointError, match=r"manifest.json: cannot be read \(No such file"):
        store.load(tmp_path / "elsewhere")
    path = store.save(5, {})
    path.rename(path.with_name("step-00000006.save-00009"))
    with pytest.warns(CheckpointWarning, match="is step 5, save 2, renamed"):
        assert store.load().step == 3


# What is kept -------------------------------------------------------------------------------------


def test_the_last_and_the_best_are_kept(tmp_path):
    metrics = {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.9, 5: 0.2, 6: 0.3}
    for best, expected in (("max", [2, 4, 5, 6]), ("min", [3, 5, 6])):
        with CheckpointStore(tmp_path / best, 2, keep_best=2, best=best) as store:
            for step, metric in metrics.items():
                store.save(step, {}, metric=metric)
            assert store.steps() == expected
    with pytest.raises(ValueError, match=r"step 7 has none. Give metric="):
        store.save(7, {})
    # Another process ranks what this one wrote.
    with CheckpointStore(tmp_path / "max", 2, keep_best=1) as store:
        store.save(7, {}, metric=0.95)
        assert store.steps() == [6, 7]


def test_the_newest_is_what_was_saved_last_whatever_its_step(tmp_path):
    """A run that went back to step 2 goes on from its own step 3, not from that of the old run."""
    with CheckpointStore(tmp_path) as store:
        for step in (2, 3, 4):
            store.save(step, {"run": 1})
        store.save(3, {"run": 2})
        checkpoint = store.load()
        assert (checkpoint.step, checkpoint.state) == (3, {"run": 2})
        assert store.steps() == [3, 4]
        assert store.load(3).state == {"run": 2}


@pytest.mark.parametrize("found", [True, False], ids=["found by load", "never read"])
def test_S04_what_is_broken_does_not_count_as_kept(tmp_path, found):
    with CheckpointStore(tmp_path) as store:
        store.save(1, {})
        path = store.save(2, {"x": torch.ones(3)})
        if found:
            file = path / "tensors.safetensors"
            data = file.read_bytes()
            file.unlink()
            file.write_bytes(data[:-1] + b"\1")
            with pytest.warns(CheckpointWarning, match="tensors.safetensors: its SHA-256"):
                assert store.load().step == 1
        else:
            (path / "state.json").unlink()
        store.save(3, {})
        assert store.steps() == [1, 2, 3]
        store.save(4, {})
        assert store.steps() == [3, 4]


def test_a_checkpoint_that_is_removed_while_it_is_looked_for_is_not_called_broken(
    tmp_path, monkeypatch
):
    import collectors.checkpoint.store as module

    writer, reader = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    writer.save(1, {})
    real = module.read_checkpoint

    def read(path, *rest):
        if "step-00000001" in path.name:
            for step in (2, 3):
                writer.save(step, {})
            assert not path.exists()
        return real(path, *rest)

    monkeypatch.setattr(module, "read_checkpoint", read)
    assert reader.load().step == 3
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_last": 1}, "keep_last is 1, and the only checkpoint may be the one that"),
        ({"keep_last": 2.0}, "keep_last must be a whole number"),
        ({"keep_best": -1}, "keep_best must be a whole number, at least 0, got -1"),
        ({"best": "most"}, "best must be one of"),
        ({"on_error": "ignore"}, "on_error must be one of"),
    ],
)
def test_settings_without_a_meaning_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        CheckpointStore(tmp_path, **settings)
