"""A14, A19: files that somebody made to do harm run nothing, lead nowhere else, and are refused."""

import json
import os
import pickle
import shutil
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collectors import CheckpointError, CheckpointStore
from collectors.checkpoint import checkpoint, files
from collectors.checkpoint import manifest as manifest_file
from collectors.checkpoint.files import sha256
from collectors.checkpoint.manifest import MANIFEST, read_manifest, write_manifest

STATE = {"weights": torch.arange(3.0), "text": ["a", (1, b"x")]}
PROPERTY = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A checkpoint; nothing may be unpickled, and nothing opened outside of it."""
    path = CheckpointStore(tmp_path / "store").save(1, STATE, files={"more": lambda p: p.touch()})
    (tmp_path / "secret.txt").write_text("secret")

    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)

    def opened_by(real, opened, **settings):
        assert os.path.abspath(opened).startswith(f"{path}/"), f"{opened} was opened"
        return real(opened, **settings)

    for module, name in (
        (files, "open_file"),
        (manifest_file, "open_file"),
        (checkpoint, "open_file"),
        (checkpoint, "safe_open"),
    ):
        monkeypatch.setattr(module, name, partial(opened_by, getattr(module, name)))
    return path


def forge(path, name=None, data=b"", **listed):
    """Replace a file and write a manifest to which all is right; more files may be listed."""
    manifest = read_manifest(path)
    if name is not None:
        (path / name).unlink()
        (path / name).write_bytes(data)
    found = {
        name: {"bytes": count, "sha256": sha256(path / name)}
        for name, count in files.tree(path).items()
        if name != MANIFEST and count is not None
    }
    (path / MANIFEST).unlink()
    about = {key: value for key, value in manifest.items() if key not in ("files", "format")}
    write_manifest(path, about, found | listed)


def refused(path, match=""):
    with pytest.raises(CheckpointError, match=match) as caught:
        CheckpointStore(path.parent).load()
    assert str(path) in str(caught.value)
    assert not (path.parent.parent / "harm").exists()


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", MANIFEST])
def test_A14_a_pickle_in_the_place_of_a_file_runs_nothing(path, name):
    harm = pickle.dumps(Harm(path.parent.parent / "harm"))
    if name == MANIFEST:
        (path / name).unlink()
        (path / name).write_bytes(harm)
    else:
        forge(path, name, harm)
    refused(path, name)


def test_A14_a_pickle_among_the_files_is_a_file(path):
    forge(path, "more", pickle.dumps(Harm(path.parent.parent / "harm")))
    assert CheckpointStore(path.parent).load().step == 1
    assert not (path.parent.parent / "harm").exists()


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "more", MANIFEST])
def test_A14_a_link_or_a_pipe_in_the_place_of_a_file_is_refused(path, name):
    kept = path.parent.parent / "kept"
    shutil.move(path / name, kept)
    (path / name).symlink_to(kept)
    refused(path, name)
    (path / name).unlink()
    os.mkfifo(path / name)
    refused(path, name)


def test_A14_a_link_in_the_place_of_a_checkpoint_is_refused(path):
    elsewhere = path.parent.parent / path.name
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)
    refused(path, "is a link, not a checkpoint")


@pytest.mark.parametrize(
    "name",
    ["../../secret.txt", "/etc/passwd", "more/../../../secret.txt", "", ".", "a\0b", "\ud800"],
)
def test_A14_names_in_the_manifest_lead_nowhere(path, name):
    forge(path, **{name: {"bytes": 6, "sha256": "0" * 64}})
    refused(path, "is missing")


def test_A14_a_folder_of_links_is_not_followed(path):
    (path / "folder").symlink_to(path.parent.parent)
    refused(path, "folder: is no regular file")


def said(value):
    """The name of a case: what is said of it."""
    return value if isinstance(value, str) else ""


def header(entries, length=None, body=b"\0" * 12):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(**changes):
    return {"weights": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **changes}}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "tensors.safetensors: .*header too small"),
        (header({}, 2**63), "header too large"),
        (header({}, 10**8 + 1), "header too large"),
        (header(b"[" * 500_000), "invalid type: sequence"),
        (header(b"{" + b'"a":{' * 100_000), "recursion"),
        (header([]), "invalid type: sequence"),
        (header(b"\xff\xfe"), "invalid UTF-8"),
        (header(b"9" * 5000), "number out of range"),
        (header({}), "file not fully covered"),
        (header({}, body=b""), "does not contain tensor weights"),
        (header(entry(data_offsets=[0, 16])), "invalid shape, data type, or offset"),
        (header(entry(data_offsets=[-4, 8])), "invalid value: integer `-4`"),
        (header(entry(shape=[2**40])), "invalid shape, data type, or offset"),
        (header(entry(shape=[2**62, 2**62, 0])), "overflow computing buffer size"),
        (header(entry(shape=[-3])), "invalid value: integer `-3`"),
        (header(entry(shape=[True, 3])), "invalid type: boolean `true`"),
        (header(entry(dtype="PICKLE")), "unknown variant `PICKLE`"),
        (header(entry(dtype=[])), "invalid type: sequence"),
        (header({"weights": 3}), "expected struct TensorInfo"),
    ],
    ids=said,
)
def test_A14_a_header_that_lies_is_refused(path, data, match):
    forge(path, "tensors.safetensors", data)
    refused(path, match)


def tree(value):
    return json.dumps({"state": {"x": value}, "sharded": {}}).encode()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "state.json: "),
        (b"[" * 500_000, "recursion"),
        (b'{"state":' * 100_000 + b"1" + b"}" * 100_000, "recursion"),
        (tree(1).replace(b"1", b"[" * 300 + b"]" * 300), "more than 64 levels deep"),
        (tree(1).replace(b"1", b"9" * 5000), "digits"),
        (tree(float("nan")), "NaN is no JSON"),
        (b"[]", "holds no state"),
        (b'{"state": {}}', "holds no state"),
        (tree({"!": "os.system", "of": "touch harm"}), "unknown kind 'os.system'"),
        (tree({"!": ["tuple"]}), "unknown kind"),
        (tree({"!": "tuple", "of": "ab"}), "a str where a list belongs"),
        (tree({"!": "tensor", "at": "none"}), "does not contain tensor none"),
        (tree({"!": "tensor", "at": []}), r"unhashable"),
        (tree({"!": "tensor", "at": "weights", "dtype": "float32", "shape": [3]}), "float32"),
        (tree({"!": "ndarray", "at": "weights", "dtype": "|O", "shape": [3]}), "dtype '|O'"),
        (
            tree({"!": "ndarray", "at": "weights", "dtype": "<f8", "shape": [3]}),
            "its size must be a divisor",
        ),
        (tree({"!": "numpy", "hex": "00", "dtype": "object"}), "dtype 'object'"),
        (tree({"!": "dict", "of": [[{}, 1]]}), "a key of type dict"),
        (
            tree({"!": "tensorclass", "name": "Popen", "of": 1, "fields": {}}),
            "'Popen'.*not listed",
        ),
        (tree({"!": "tensorclass", "name": "os.system", "of": 1, "fields": {}}), "not listed"),
        (tree({"!": "TensorDict", "size": [2], "of": {"a": 1}}), "is a int of the shape None"),
        (
            tree({"!": "TensorDict", "size": [4], "of": {"a": {"!": "tensor", "at": "weights"}}}),
            r"of a TensorDict \[4\] is a Tensor of the shape torch.Size\(\[3\]\)",
        ),
    ],
    ids=said,
)
def test_A14_a_state_that_was_never_saved_is_refused(path, data, match):
    forge(path, "state.json", data)
    refused(path, match)


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.text(max_size=5),
        st.sampled_from(["weights", "F32", "<f4", "Conversations", "History", "full"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["!", "of", "at", "size", "dim", "name", "fields", "type", "view"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
kinds = st.sampled_from(
    [
        *(
            "int",
            "float",
            "bytes",
            "bytearray",
            "tuple",
            "dict",
            "OrderedDict",
            "Counter",
            "tensor",
        ),
        *("ndarray", "numpy", "TensorDict", "LazyStackedTensorDict", "NonTensorStack"),
        *("NonTensorData", "BatchedObject", "tensorclass"),
    ]
)
fields = st.dictionaries(
    st.sampled_from(
        ["of", "at", "size", "dim", "name", "names", "fields", "type", "view", "hex", "dtype"]
    ),
    anything,
    max_size=6,
)


@PROPERTY
@given(value=anything, kind=kinds, rest=fields)
def test_A14_any_other_tree_is_loaded_or_refused(path, value, kind, rest):
    forge(path, "state.json", tree([value, rest | {"!": kind}]))
    store = CheckpointStore(path.parent)
    try:
        store.load()
    except CheckpointError as error:
        assert "state.json" in str(error)  # noqa: PT017 (both ends are right)


@settings(PROPERTY, max_examples=2000)
@given(
    st.one_of(
        st.text(max_size=300),
        st.sampled_from(["..", ".", "", "/etc/x", "../x", "a/b", "a\0b", "\ud800", "x" * 256]),
        st.sampled_from(["state.json", "tensors.safetensors", "manifest.json", "sharded", "ü.txt"]),
        st.integers(),
    )
)
def test_A14_names_of_further_files_stay_in_the_checkpoint(name):
    from collectors.checkpoint.store import _check_name

    try:
        _check_name(name)
    except ValueError:
        return
    assert os.path.dirname(os.path.normpath(f"/checkpoint/{name}")) == "/checkpoint"
    assert len(os.fsencode(name)) <= 255
    assert "\0" not in name
    assert name not in ("state.json", "tensors.safetensors", "manifest.json", "sharded")


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a\0", "state.json", 3, "ü" * 200])
def test_A14_a_name_that_leads_elsewhere_is_refused_at_save(tmp_path, name):
    with pytest.raises(ValueError, match="which is no name of a file or folder in a checkpoint"):
        CheckpointStore(tmp_path / "store").save(1, {}, files={name: lambda path: path.touch()})
    assert not (tmp_path / "store").exists()


def test_A14_a_link_among_the_further_files_is_refused_at_save(tmp_path):
    def link(path):
        path.mkdir()
        (path / "there").symlink_to("/etc/passwd")

    with pytest.raises(CheckpointError, match=r"files made \['more/there'\], which are links"):
        CheckpointStore(tmp_path).save(1, {}, files={"more": link})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]
