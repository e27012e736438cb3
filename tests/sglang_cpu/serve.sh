#!/usr/bin/env bash
# Serve MODEL on 127.0.0.1:PORT with the SGLang of install.sh, in the foreground.
# usage: serve.sh VENV MODEL PORT [SGLANG FLAG…]     Ready when GET /model_info answers 200.
set -euo pipefail
venv=$1 model=$2 port=$3
shift 3
export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1
exec "$venv/bin/python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" \
  --device cpu --attention-backend torch_native --sampling-backend pytorch \
  --sleep-on-idle --mem-fraction-static 0.2 --max-total-tokens 16384 --context-length 2048 "$@"
