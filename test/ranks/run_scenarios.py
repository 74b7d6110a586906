"""Runs every scenario, once the imports are done: python run_scenarios.py results.pt"""

import sys
import traceback
import warnings
from itertools import chain
from pathlib import Path

import agent_scenarios
import context_scenarios
import critic_scenarios
import preference_scenarios
import recipe_scenarios
import reference_scenarios
import split_scenarios
import torch
import training_scenarios
import weight_scenarios

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    results = {}
    kinds = (
        *(training_scenarios, split_scenarios, context_scenarios),
        *(weight_scenarios, recipe_scenarios, critic_scenarios, preference_scenarios),
        *(reference_scenarios, agent_scenarios),
    )
    for name, run in chain(*(kind.scenarios() for kind in kinds)):
        if not any(word in name for word in sys.argv[2:] or [name]):
            continue
        try:
            results[name] = run()
        except BaseException:
            results[name] = traceback.format_exc()
    torch.save(results, Path(sys.argv[1]))
