"""The measurements of engine_overhead.py as figures, and as the tables of docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

from overhead_arms import ARMS, PLAIN
from support_markdown import figure, header, line, three_digits, unique

from rollout.stats import percentiles

Row = dict[str, Any]
FIGURES = (
    "tokens_per_s",
    "support_size",
    "reply_bytes_per_token",
    "shard_bytes_per_token",
    "decode_s_per_million",
)


def summary(rows: Sequence[Row]) -> list[Row]:
    """One row per setting and arm: medians over its repetitions, and the ratio to the plain arm."""
    found = []
    for setting, arm in product(unique(row["setting"] for row in rows), [a.name for a in ARMS]):
        cell = [row for row in rows if (row["setting"], row["arm"]) == (setting, arm)]
        if not cell:  # left out
            continue
        medians = {
            name: statistics.median(values)
            for name in FIGURES
            if (values := [row[name] for row in cell if name in row])
        }
        found.append(
            {
                "setting": setting,
                "arm": arm,
                "repetitions": len(cell),
                **medians,
                "slowest": min(row["tokens_per_s"] for row in cell),
                "fastest": max(row["tokens_per_s"] for row in cell),
                "ratio": ratio_to_plain(cell, rows),
            }
        )
    return found


def ratio_to_plain(cell: Sequence[Row], rows: Sequence[Row]) -> float | None:
    """Median over the repetitions that have both; each is held against the plain one of its own
    repetition, so that a machine that slows down moves both."""
    plain = {
        row["repetition"]: row["tokens_per_s"]
        for row in rows
        if row["arm"] == PLAIN.name and row["setting"] == cell[0]["setting"]
    }
    ratios = [
        row["tokens_per_s"] / plain[row["repetition"]] for row in cell if row["repetition"] in plain
    ]
    return statistics.median(ratios) if ratios else None


def latencies(streams: Sequence[Row]) -> list[Row]:
    """One row per neighbour: percentiles over the gaps of all its streams."""
    found = []
    for beside in unique(row["beside"] for row in streams):
        of_it = [row for row in streams if row["beside"] == beside]
        gaps = [gap for row in of_it for gap in row["gaps_ms"]]
        found.append(
            {
                "beside": beside,
                "gaps": len(gaps),
                **percentiles(gaps),
                "max": max(gaps),
                "neighbour_replies": sum(row["neighbour_replies"] for row in of_it),
            }
        )
    return found


def tables(report: dict[str, Any]) -> str:
    server, load, figures = report["server"], report["load"], summary(report["rows"])
    fewest, most = (pick((row["repetitions"] for row in figures), default=0) for pick in (min, max))
    parts = [
        f"{report['device']}, SGLang {server['version']}, sampling backend "
        f"{server['sampling_backend']}, {report['model']}; {load['in_flight']} in flight, "
        f"{load['prompt_tokens']} tokens in and {load['num_tokens']} out, {load['requests']} "
        f"requests a cell, medians of {f'{fewest} to ' if fewest < most else ''}{most}.",
        costs(figures),
        f"A streamed plain request of {load['stream_tokens']} tokens, ms between its tokens:",
        waits(latencies(report["streams"])),
        first_requests(report["warm_up"]),
    ]
    if report["left_out"]:
        parts.append(f"Left out for lack of time: {', '.join(report['left_out'])}.")
    return "\n\n".join(parts)


def costs(rows: Sequence[Row]) -> str:
    names = ["top_k", "way", "tokens/s", "of plain", "slowest to fastest", "ids/token"]
    lines = header([*names, "reply bytes/token", "shard bytes/token", "decoding, s/million"])
    for row in rows:
        lines.append(
            line(
                [
                    row["setting"],
                    row["arm"],
                    f"{row['tokens_per_s']:,.0f}",
                    figure(row, "ratio", "{:.2f}"),
                    f"{row['slowest']:,.0f} to {row['fastest']:,.0f}",
                    figure(row, "support_size", "{:.1f}"),
                    figure(row, "reply_bytes_per_token", "{:,.0f}"),
                    figure(row, "shard_bytes_per_token", "{:,.0f}"),
                    figure(row, "decode_s_per_million", "{:.1f}"),
                ]
            )
        )
    return "\n".join(lines)


def waits(rows: Sequence[Row]) -> str:
    quantiles = ("p50", "p95", "p99", "max")
    lines = header(["", *quantiles, "gaps", "replies of the neighbour"])
    for row in rows:
        times = [three_digits(row[name]) for name in quantiles]
        counts = [f"{row['gaps']:,}", f"{row['neighbour_replies']}"]
        lines.append(line([row["beside"], *times, *counts]))
    return "\n".join(lines)


def first_requests(warm_up: Sequence[Row]) -> str:
    """Kernels are compiled when they are first needed: not in the tables, so told beside them."""
    lines = header(["", "first request, s", "the same again, s"])
    for row in warm_up:
        lines.append(
            line([row["what"], three_digits(row["first_s"]), three_digits(row["again_s"])])
        )
    return "Before anything is measured, each kind of request alone:\n\n" + "\n".join(lines)
