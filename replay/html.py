"""report.html: the report as one page that needs no network.

Template, style and script are package data in replay/page. Whatever comes from data is escaped:
by jinja in the page itself, as JSON in a script tag for the token strips.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from replay import bins, charts
from replay.audit_tables import audit_section
from replay.sections import (
    GATES_HEAD,
    NUMBERS_HEAD,
    facts_of,
    gate_rows,
    number_rows,
    reasons_of,
    run_facts,
    verdict_words,
)
from replay.strips import Strip, ids_shown, strip_data
from replay.verify import Verified
from rollout.inspection import Decode
from rollout.record import Rollout

CONTEXT = 8  # tokens before one of the worst
WORST_HEAD = (
    ("rollout", "text"),
    ("position", "number"),
    ("token, after what", ""),
    ("support", "number"),
    ("engine", "number"),
    ("trainer", "number"),
    ("log_ratio", "number"),
    ("whole vocabulary", "number"),
    ("finding", "text"),
)


def render_page(
    summary: Mapping[str, Any],
    verified: Verified,
    rollouts: Sequence[Rollout],
    strips: Sequence[Strip],
    decode: Decode | None = None,
    about: Mapping[str, Any] | None = None,
) -> str:
    """The page of one replay. `summary` is `Report.as_dict()`; its `diagnoses` and `audit` are
    shown where they are there. Without `decode` tokens are shown by their ids.

    `about` holds `name` and, if known, `run`, what the run says about itself.
    """
    about = about or {}
    badge, verdict = verdict_words(summary)
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    shown = [strip_data(strip, decode, verified.vocab_size) for strip in strips]
    texts = {i: _text(i, decode) for i in sorted(ids_shown(shown))}
    context = {
        "name": str(about.get("name", "run")),
        "badge": badge,
        "verdict": verdict,
        "reasons": reasons_of(summary),
        "numbers_head": NUMBERS_HEAD,
        "numbers": number_rows(summary),
        "gates_head": GATES_HEAD,
        "gates": gate_rows(summary),
        "failed_gates": summary["failed_gates"],
        "facts": [*facts_of(summary), *run_facts(about.get("run", {}))],
        "charts": _charts(verified, by_id),
        "audit": audit_section(summary.get("audit")),
        "tokens": f"{summary['tokens']:,}",
        "worst_head": WORST_HEAD,
        "worst": _worst(verified, by_id, strips, decode),
        "shown_words": f"{len(strips)} of {len(rollouts):,} rollouts: the worst, and a sample."
        + ("" if decode else " There are no texts for this model and run: # is an id."),
        "footer": "Units are nats where nothing else stands.",
        "data": _embedded({"texts": texts, "rollouts": shown, "vocab_size": verified.vocab_size}),
    }
    return _template(context)


def _template(context: Mapping[str, Any]) -> str:
    environment, css, js = _package_data()
    page = environment.get_template("report.html.j2").render(**context, css=css, js=js)
    # a lone surrogate, from a name or a text, is no UTF-8
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def _package_data() -> tuple[Environment, Markup, Markup]:
    loader = PackageLoader("replay", "page")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    css, js = (
        Markup(loader.get_source(environment, f"report.{kind}")[0]) for kind in ("css", "js")
    )
    return environment, css, js


def _embedded(data: Mapping[str, Any]) -> Markup:
    """JSON that cannot leave its script tag: no `<`, `>` or `&` in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _text(token: int, decode: Decode | None) -> str:
    text = decode(token) if decode else None
    return f"#{token}" if text is None else visible(text)


def visible(text: str) -> str:
    """`text` with line ends and tabs as signs and other characters without a shape escaped."""
    signs = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
    return "".join(
        signs.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode())
        for c in text
    )


def _charts(verified: Verified, by_id: Mapping[str, Rollout]) -> list[dict[str, Any]]:
    tokens = verified.tokens
    histogram, positions = bins.log_ratio_histogram(tokens), bins.by_position(tokens)
    sizes, versions = bins.by_support_size(tokens), bins.by_version(tokens, by_id)
    pairs = bins.density(tokens)
    drawn: list[dict[str, Any]] = [
        {
            "id": "histogram",
            "title": "With and without the recorded supports",
            "note": "|log_ratio| of every scored token. What the supports remove is bias.",
            "svg": charts.histogram(histogram),
            "head": ["from", "to", charts.SUPPORT, charts.WHOLE],
            "rows": [
                [f"{r['from']:.2g}", f"{r['to']:.2g}", f"{r['support']:.3%}", f"{r['whole']:.3%}"]
                for r in histogram
            ],
        },
        {
            "id": "density",
            "title": "Trainer against engine",
            "note": f"Logprobs of {pairs.tokens:,} tokens with a choice; the dashed line is "
            f"agreement. {pairs.singletons:,} singletons, 0 on both sides, are left out.",
            "svg": charts.density_map(pairs),
            "head": [],
            "rows": [],
        },
        _binned("position", "By position", "Mismatch that grows or begins somewhere shows here.")
        | {"svg": charts.position_lines(positions)}
        | _numbers("positions", positions),
        _binned("size", "By support size", "Tokens with one id agree by definition.")
        | {"svg": charts.size_bars(sizes)}
        | _numbers("ids", sizes),
    ]
    if len(versions) == 1:
        note = f"All tokens: {versions[0]['version']}."
        drawn.append(
            _binned("version", "By weight version", note)
            | {"svg": Markup()}
            | _numbers("version", versions)
        )
    elif versions:
        drawn.append(
            _binned("version", "By weight version", "Stale weights stand out here.")
            | {"svg": charts.version_bars(versions)}
            | _numbers("version", versions)
        )
    return drawn


def _binned(name: str, title: str, note: str) -> dict[str, Any]:
    return {"id": f"by-{name}", "title": title, "note": note}


def _numbers(label: str, rows: bins.Rows) -> dict[str, Any]:
    head = [label, "tokens", "mean |log_ratio|", "p90", "mismatch_kl", "mean, whole vocabulary"]
    keys = ("mean", "p90", "mismatch_kl", "whole")
    cells = [
        [row.get("version") or charts.span(row), f"{row['tokens']:,}"]
        + [f"{row[key]:.4g}" for key in keys]
        for row in rows
    ]
    return {"head": head, "rows": cells}


def _worst(
    verified: Verified,
    by_id: Mapping[str, Rollout],
    strips: Sequence[Strip],
    decode: Decode | None,
) -> list[dict[str, Any]]:
    tokens = verified.tokens
    places = {strip.rollout.rollout_id: (i, strip) for i, strip in enumerate(strips)}
    rows = []
    for row in bins.worst_tokens(tokens).tolist():
        rollout_id, position = tokens.rollout_id[row], int(tokens.position[row])
        index, strip = places.get(rollout_id, (None, None))
        if strip is not None and not strip.start <= position < strip.end:
            index = None
        before = by_id[rollout_id].output_ids[max(0, position - CONTEXT) : position]
        rows.append(
            {
                "rollout": rollout_id,
                "strip": index,
                "position": position,
                "before": "".join(_text(int(i), decode) for i in before),
                "text": _text(int(tokens.token_id[row]), decode),
                "size": int(tokens.support_size[row]),
                "engine": _cell(tokens.sampling_logprobs[row]),
                "trainer": _cell(tokens.replay_logprobs[row]),
                "ratio": _cell(tokens.log_ratio[row]),
                "whole": _cell(tokens.replay_full_logprobs[row]),
                "finding": "" if tokens.finding[row] == "ok" else tokens.finding[row],
            }
        )
    return rows


def _cell(value: np.float32) -> dict[str, Any]:
    """What stands in the table, and what it is sorted by."""
    number = float(value)
    if np.isnan(number):
        return {"text": "–", "sort": "-1e99"}
    if np.isinf(number):
        return {"text": "−∞" if number < 0 else "∞", "sort": "-1e98" if number < 0 else "1e98"}
    tiny = 0 < abs(number) < 1e-3
    return {"text": f"{number:.1e}" if tiny else f"{number:.4f}", "sort": f"{number:.7g}"}
