"""What agents on ranks are tried with: by agent_scenarios.py, and looked at by the tests."""

KINDS = {"adapters": ("policy.lora_rank=4",), "models": ()}
NUM_STEPS = 3
TRAINED = ("writer", "critic")
