#!/usr/bin/env bash
# A trainer's real package in a virtual environment of its own.
# usage: install.sh trl|verl|skyrl VENV PYTHON
#   PYTHON is the project's interpreter, whose packages the trl and verl venvs see (30 and 320 MB);
#   skyrl wants Python 3.12 and pins much, so it gets everything anew (5 GB where torch brings CUDA).
#   SKYRL_PYTHON names that Python; the default is python3.12.
# A venv that is complete is left alone.
set -euo pipefail
usage="usage: install.sh trl|verl|skyrl VENV PYTHON"
name=${1:?$usage} venv=${2:?$usage} python=${3:?$usage}
root=$(cd "$(dirname "$0")/../.." && pwd)
[[ -f $venv/.ready ]] && exit 0

# the project's packages behind those of the venv
see_project() {
    "$python" -m venv "$venv"
    local site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    "$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$site/project.pth"
}

case $name in
trl)
    see_project
    "$venv/bin/pip" install --quiet --no-deps trl==1.16.0
    ;;
verl)
    see_project
    "$venv/bin/pip" install --quiet --no-deps verl==0.9.1
    # of what verl asks for: what its DataProto, agent loop and advantages import
    "$venv/bin/pip" install --quiet tensordict==0.10.0 ray==2.57.0 hydra-core==1.3.4 codetiming \
        peft cachetools pillow fastapi uvicorn
    ;;
skyrl)
    "${SKYRL_PYTHON:-python3.12}" -m venv "$venv"
    "$venv/bin/pip" install --quiet torch==2.13.0
    "$venv/bin/pip" install --quiet --no-deps skyrl==0.4.0 skyrl-gym==0.4.0 peft==0.18.1
    # of what SkyRL asks for: what its trainer imports (no flash-attn, vllm-router, wandb)
    "$venv/bin/pip" install --quiet ray==2.57.0 hydra-core==1.3.4 transformers==5.16.1 accelerate \
        aiohttp cloudpathlib fastapi func_timeout jaxtyping loguru orjson pybase64 tensorboard \
        tensordict torchdata
    # what the project itself and its tests need
    "$venv/bin/python" -c 'import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"], sep="\n")' \
        "$root/pyproject.toml" > "$venv/project.txt"
    "$venv/bin/pip" install --quiet -r "$venv/project.txt" hypothesis pytest
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
touch "$venv/.ready"
