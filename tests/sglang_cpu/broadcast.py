"""The trainer's side of a weight update: broadcasts tensors of a checkpoint, one after another.

usage: broadcast.py CHECKPOINT PORT NAME…     Run by the Python of install.sh: it needs SGLang.
"""

import sys

import torch
from safetensors import safe_open
from sglang.srt.utils import init_custom_process_group

checkpoint, port, *names = sys.argv[1:]
group = init_custom_process_group(
    backend="gloo",
    init_method=f"tcp://127.0.0.1:{port}",
    world_size=2,
    rank=0,
    group_name="weight_update_group",
)
with safe_open(checkpoint, "pt") as tensors:
    for name in names:
        torch.distributed.broadcast(tensors.get_tensor(name), src=0, group=group)
sys.stdin.read()  # the group lives as long as this process
