#!/usr/bin/env bash
# Two GPUs: the trainer on the first; on the second a server that is started, and ended, with the
# run. Neither waits for the other.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec python sota-implementations/grpo/grpo.py \
    profile=gpu policy.model=Qwen/Qwen3-1.7B task=gsm8k \
    policy.device=cuda:0 engine=vllm 'engine.devices=[1]' \
    collector=streaming collector.max_staleness=2 resume=auto "$@"
