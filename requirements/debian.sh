#!/bin/sh
# Installs what requirements/debian.txt names and the machine lacks.
set -eu
cd "$(dirname "$0")"
missing=$(grep -v '^#' debian.txt | while read -r package command; do
    command -v "$command" >/dev/null || echo "$package"
done)
[ -n "$missing" ] || exit 0
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
if ! command -v apt-get >/dev/null || { [ -n "$sudo" ] && ! command -v sudo >/dev/null; }; then
    echo "Install these first, with your system's package manager:" $missing >&2
    exit 1
fi
$sudo apt-get update -q
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -q --no-install-recommends $missing
