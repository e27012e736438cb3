#!/bin/sh
# Prints the path of a Chromium that runs headless; where there is none, installs Debian's first
# (root, no questions asked). Downloads are kept in ~/.cache/rollout/chromium, 100 MB, and are not
# fetched again on the next machine that shares the folder. ROLLOUT_CHROMIUM names another browser.
set -eu

find_browser() {
    for name in "${ROLLOUT_CHROMIUM:-}" chromium-headless-shell chromium google-chrome; do
        [ -n "$name" ] && command -v "$name" && return 0
    done
    return 1
}

find_browser && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "$0: no Chromium here; install one, or name it in ROLLOUT_CHROMIUM" >&2
    exit 1
fi
cache="$HOME/.cache/rollout/chromium"
mkdir -p "$cache/partial"
export DEBIAN_FRONTEND=noninteractive
{
    apt-get update
    apt-get install --yes --no-install-recommends -o Dir::Cache::archives="$cache" \
        -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=300 \
        chromium-headless-shell fonts-liberation
} >&2
find_browser
