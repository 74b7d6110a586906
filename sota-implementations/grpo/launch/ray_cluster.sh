#!/usr/bin/env bash
# A Ray cluster: `ray start --head` on this node, `ray start --address=<this node>:6379` on others.
# Sixteen collectors on its CPUs and GPUs, each with environments and a copy of the model; the
# trainer on a GPU of this node, which is Ray's own business no more.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec env RAY_ADDRESS="${RAY_ADDRESS:-auto}" python sota-implementations/grpo/grpo.py \
    profile=gpu policy.model=Qwen/Qwen3-0.6B task=gsm8k \
    collector=ray collector.num_collectors=16 collector.num_prompts=64 \
    +collector.remote_config.num_cpus=4 +collector.remote_config.num_gpus=1 "$@"
