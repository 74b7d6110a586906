#!/usr/bin/env bash
# One GPU: the engine in the trainer's process, in two fifths of the memory; a batch, then a step.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec python sota-implementations/grpo/grpo.py \
    profile=gpu policy.model=Qwen/Qwen3-0.6B task=gsm8k \
    engine=vllm +engine.engine_kwargs.gpu_memory_utilization=0.4 \
    resume=auto "$@"
