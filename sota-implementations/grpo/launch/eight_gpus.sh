#!/usr/bin/env bash
# Eight GPUs: four ranks train shards of one model, on GPUs 0 to 3; on the others two servers, each
# over two GPUs.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec torchrun --standalone --nproc-per-node=4 sota-implementations/grpo/grpo.py \
    profile=gpu policy.model=Qwen/Qwen3-8B task=gsm8k train.parallel=fsdp2 \
    engine=vllm engine.num_engines=2 'engine.devices=[4,5,6,7]' \
    collector=streaming collector.max_staleness=4 collector.num_prompts=64 resume=auto "$@"
