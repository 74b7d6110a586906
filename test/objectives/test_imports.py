"""Importing a loss imports little, and the functions can be taken away in a copy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("vllm", "ray", "transformers", "datasets", "torchrl_modules", "torchrl_envs", "collectors")


def modules_after(code, cwd=ROOT, *, beside=""):
    """Names of the modules that a fresh interpreter loads for some code, beside those of others."""
    script = f"import json, sys\n{beside}\nothers = set(sys.modules)\n{code}\n"
    script += "print(json.dumps(sorted(set(sys.modules) - others)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"PYTHONPATH": f"{cwd}{os.pathsep}{ROOT / 'test/quick_imports'}", "PATH": ""},
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def tops(modules):
    return {name.split(".")[0] for name in modules}


def test_functional_loads_torch_and_jaxtyping_and_nothing_of_ours():
    added = modules_after("import objectives.functional", beside="import torch")
    own = {name for name in added if name.split(".")[0] == "objectives"}
    assert {name for name in own if not name.startswith("objectives.functional")} == {"objectives"}
    assert len(added) <= 50
    assert tops(added).isdisjoint({"tensordict", "torchrl", "torchrl_data", *HEAVY})
    others = {name for name in added - own if not name.startswith("jaxtyping")}
    assert len(others) <= 15, others


def test_a_loss_loads_no_engine_and_no_environment():
    loaded = modules_after("from objectives import GRPOLoss, SFTLoss, DistillationLoss, DAPO")
    assert tops(loaded).isdisjoint({"torchrl", *HEAVY})


def test_the_advantage_transform_loads_no_engine():
    # torchrl itself imports Ray where it is installed.
    peers = "import torchrl.data, torchrl.envs.transforms"
    code = "from objectives import MCAdvantage, RayMCAdvantage, TopKRewardSelector"
    loaded = modules_after(code, beside=peers)
    assert "objectives" in tops(loaded)
    assert tops(loaded).isdisjoint(HEAVY)


def test_a_copy_of_the_functions_works_in_an_empty_project(tmp_path):
    shutil.copytree(ROOT / "objectives" / "functional", tmp_path / "borrowed")
    code = """
import torch, borrowed as F
mask = torch.ones(1, 2, dtype=torch.bool)
term = F.clipped_surrogate(torch.zeros(1, 2), torch.ones(1, 2), mask)
assert F.token_mean(term.loss, mask).item() == -1
"""
    loaded = modules_after(code, cwd=tmp_path)
    assert tops(loaded).isdisjoint({"objectives", "tensordict", "torchrl", "torchrl_data"})


def test_every_public_name_resolves_and_a_wrong_one_says_so():
    import objectives

    for name in objectives.__all__:
        assert getattr(objectives, name) is not None
    assert dir(objectives) == sorted(objectives.__all__)
    with pytest.raises(AttributeError, match="GRPOLoss"):
        _ = objectives.GRPOLos
