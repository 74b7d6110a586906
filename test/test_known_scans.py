"""What an interpreter of the tests finds of an earlier one's scans is what it would scan itself."""

import importlib.metadata
import os
import sys
from types import SimpleNamespace

import known_scans
import pytest


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(known_scans, "KEPT", str(tmp_path / "kept"))


@pytest.fixture
def scanning(tmp_path):
    """Makes what stands for the module of Transformers that scans; it tells what it has scanned."""
    package = tmp_path / "transformers"
    (package / "utils").mkdir(parents=True)
    for model in ("bert", "gemma"):
        (package / "models" / model).mkdir(parents=True)
        (package / "models" / model / f"modeling_{model}.py").touch()
    file = package / "utils/import_utils.py"
    file.touch()

    def make():
        def scan(path):
            module.scanned.append(os.path.basename(path))
            folders = [each for each in os.scandir(path) if each.is_dir()]
            found = {
                each.name: module.create_import_structure_from_path(each.path) for each in folders
            }
            files = {each.name for each in os.scandir(path) if each.is_file()}
            return {frozenset({"torch"}): files, **found}

        module = SimpleNamespace(
            __file__=str(file), create_import_structure_from_path=scan, scanned=[]
        )
        known_scans._keep_exports(module)
        return module

    return make


def test_models_are_scanned_once_and_again_when_their_folder_changes(tmp_path, scanning):
    models = tmp_path / "transformers/models"
    gemma = {frozenset({"torch"}): {"modeling_gemma.py"}}
    whole = {frozenset({"torch"}): set(), "gemma": gemma}
    whole["bert"] = {frozenset({"torch"}): {"modeling_bert.py"}}
    for scanned in (["models", "bert", "gemma"], []):
        module = scanning()
        find = module.create_import_structure_from_path
        assert find(str(models)) == find(str(models / "__init__.py")) == whole
        assert find(str(models / "gemma")) == find(models / "gemma/__init__.py") == gemma
        assert sorted(module.scanned) == sorted(scanned)
    (models / "llama").mkdir()
    os.utime(models, ns=(1, 1))
    module = scanning()
    find = module.create_import_structure_from_path
    assert find(str(models))["llama"] == {frozenset({"torch"}): set()}
    assert len(module.scanned) == 4


def test_a_file_that_was_cut_off_is_scanned_again(tmp_path, scanning):
    whole = scanning().create_import_structure_from_path(str(tmp_path / "transformers/models"))
    (path,) = (tmp_path / "kept").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    module = scanning()
    find = module.create_import_structure_from_path
    assert find(str(tmp_path / "transformers/models")) == whole
    assert len(module.scanned) == 3


def test_distributions_are_scanned_again_when_one_comes(tmp_path, monkeypatch):
    def install(name, when):
        (tmp_path / f"site/{name}-1.0.dist-info").mkdir(parents=True)
        os.utime(tmp_path / "site", ns=(when, when))

    def scan():
        return {"one": [name.partition("-")[0] for name in sorted(os.listdir(tmp_path / "site"))]}

    monkeypatch.setattr(importlib.metadata, "packages_distributions", scan)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), str(tmp_path / "missing"), ""])
    install("a", 1)
    known_scans._keep_distributions()
    find = importlib.metadata.packages_distributions
    assert find() == {"one": ["a"]}
    install("b", 1)  # as if nothing had changed
    assert find() == {"one": ["a"]}
    install("c", 2)
    assert find() == {"one": ["a", "b", "c"]}
