"""How long a call takes and how much memory it needs, on the GPU or the CPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

INPUT_SETS = 3
FLUSH_BYTES, FLUSHES, MOST_FLUSHES = 2**29, 4, 100  # the L2 is 60 MB
COPY_BYTES = 2**32
SLOW_MS = 50
REPETITIONS, SLOW_BUDGET_MS, FEWEST = 21, 600, 3


def times(call: Callable[[int], Any], device: torch.device) -> dict[str, Any]:
    """Medians over rotating inputs; `call` has run before, so nothing is compiled in here."""
    if device.type != "cuda":
        first_ms = wall_ms(call, 0, device)
        walls = [first_ms] + [wall_ms(call, i, device) for i in range(1, repetitions(first_ms))]
        return {"time_ms": statistics.median(walls), "repetitions": len(walls)}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    [first_ms] = device_ms(call, flush, 1, FLUSHES)
    flushes = FLUSHES
    if first_ms < SLOW_MS:
        flushes = enough_flushes(call, flush)
        device_ms(call, flush, INPUT_SETS, flushes)
    measured = device_ms(call, flush, repetitions(first_ms), flushes)
    figures = {
        "time_ms": statistics.median(measured),
        "spread_ms": max(measured) - min(measured),
        "repetitions": len(measured),
    }
    if first_ms < SLOW_MS:  # else the host is never what takes the time
        figures["wall_ms"] = statistics.median(wall_ms(call, i, device) for i in range(5))
    return figures


def repetitions(first_ms: float) -> int:
    return REPETITIONS if first_ms < SLOW_MS else max(FEWEST, int(SLOW_BUDGET_MS / first_ms))


def enough_flushes(call: Callable[[int], Any], flush: torch.Tensor) -> int:
    """Writes that keep the device busy for twice the time in which the host launches the call."""
    [write_ms] = device_ms(lambda i: [flush.zero_() for _ in range(10)], flush, 1, FLUSHES)
    launch_ms = statistics.median(host_ms(call, i) for i in range(2 * INPUT_SETS))
    return min(MOST_FLUSHES, FLUSHES + math.ceil(2 * launch_ms / (write_ms / 10)))


def device_ms(
    call: Callable[[int], Any], flush: torch.Tensor, count: int, flushes: int
) -> list[float]:
    """The device's time of each call; the writes before it empty the L2 and hide the launches."""
    events = []
    for i in range(count):
        for _ in range(flushes):
            flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(i)
        end.record()
        torch.cuda.synchronize()
        events.append((begin, end))
    return [begin.elapsed_time(end) for begin, end in events]


def host_ms(call: Callable[[int], Any], i: int) -> float:
    """Until the call returns, its kernels still running."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call(i)
    return 1e3 * (time.perf_counter() - began)


def wall_ms(call: Callable[[int], Any], i: int, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    call(i)
    synchronize(device)
    return 1e3 * (time.perf_counter() - began)


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """What the call needs beside its inputs, its results included."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and bytes written of a large copy."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES // 16
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    measured = times(lambda i: target.copy_(source), device)
    return 2 * size / (measured["time_ms"] / 1e3)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
