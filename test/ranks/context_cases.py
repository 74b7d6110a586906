"""Runs over rows whose tokens ranks share out: losses, models, and how many ranks."""

from objectives import DPOLoss, GRPOLoss, SFTLoss

CASES = {
    "grpo": (GRPOLoss, {"kl_to_ref_coeff": 0.1, "entropy_bonus": True}, 11),
    "two tokens": (GRPOLoss, {"aggregation": "sequence_mean"}, 1),
    "sft": (SFTLoss, {}, 5),
    "preferences": (DPOLoss, {"sft_coeff": 0.5}, 6),
    "lora": (GRPOLoss, {}, 5),
    "activation checkpointing": (GRPOLoss, {}, 5),
    "mixture": (GRPOLoss, {}, 5),
    "capped scores, windows": (GRPOLoss, {}, 5),
}
RUNS = {
    "2 ranks, ddp": (2, 2, "ddp"),
    "4 ranks, fsdp2": (4, 4, "fsdp2"),
    "2 of 4 ranks, ddp": (4, 2, "ddp"),
}
"""Of each run the ranks, how many have the same rows, and the wrapper."""
