#!/usr/bin/env bash
# The routers people put in front of SGLang, in a virtual environment of their own: about 280 MB.
# usage: install.sh VENV       A venv that is complete is left alone.
# Start them with `python -m sglang_router.launch_router` and `python -m smg launch`: both packages
# install a command named smg.
set -euo pipefail
venv=${1:?usage: install.sh VENV}
ready=$venv/.sglang-router-0.3.2-smg-1.13.0-ready
[[ -f $ready ]] && exit 0
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet sglang-router==0.3.2 smg==1.13.0
touch "$ready"
