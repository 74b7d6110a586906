#!/usr/bin/env bash
# Eight GPUs, rows of up to 131,072 tokens: four ranks train shards of one model and read a quarter
# of each row, on GPUs 0 to 3; on the others one server.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec torchrun --standalone --nproc-per-node=4 sota-implementations/grpo/grpo.py \
    profile=gpu task=gsm8k policy.model=Qwen/Qwen3-4B-Instruct-2507 policy.max_model_len=131072 \
    train.parallel=fsdp2 train.context_parallel_size=4 engine=vllm 'engine.devices=[4,5,6,7]' \
    collector=streaming collector.max_staleness=4 resume=auto "$@"
