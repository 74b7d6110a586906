#!/bin/sh
# Installs what lists of locked packages name, halves at the same time: to unpack all takes minutes of a core.
#
#     sh requirements/install.sh "python -m pip install --no-deps" LIST...
set -eu
pip=$1
shift
halves=$(mktemp -d)
trap 'rm -rf "$halves"' EXIT
grep -hv '^#' "$@" | sort -u > "$halves/all"
awk -v to="$halves/" '{ print > to (NR % 2 ? "odd" : "even") }' "$halves/all"
# shellcheck disable=SC2086
$pip --requirement "$halves/odd" &
odd=$!
# shellcheck disable=SC2086
$pip --requirement "$halves/even" || { wait "$odd"; exit 1; }
wait "$odd"
