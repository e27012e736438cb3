"""make_storable(): text of an engine that no UTF-8, so no shard, can hold.

A character cut in half at the last token comes as half of a UTF-16 pair in some replies. The ids
are the record and the text is an aid, so the text is escaped, and `extra` says so.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from rollout.errors import BadValue
from rollout.record import Rollout
from rollout.sampling import canonical_json

AIDS = ("prompt_text", "output_text", "stop_match")
"""Text that stands beside ids. Nothing depends on it."""

JSON = ("sampling_params", "engine_meta", "extra")
"""In JSON the escape is the same value, written in another way."""

ESCAPED = "escaped"
"""Key of `extra`: the names of the texts that were escaped."""


def make_storable(rollout: Rollout) -> Rollout:
    """`rollout` itself, or with its texts escaped: a lone U+D83D becomes "\\ud83d".

    Raises `BadValue` for a lone surrogate in an id or another word that must stay what it is.
    """
    texts = {name: value for name, value in vars(rollout).items() if isinstance(value, str)}
    texts["weight_versions"] = "".join(span.version for span in rollout.weight_versions)
    broken = [name for name, value in texts.items() if not _is_utf8(value)]
    if not broken:
        return rollout
    for name in broken:
        if name not in AIDS + JSON:
            raise BadValue(
                f"{_escape(rollout.rollout_id)}: {name} holds half of a UTF-16 pair, must be text "
                "that UTF-8 can hold"
            )
    changes: dict[str, Any] = {name: _escape(texts[name]) for name in broken}
    if aids := sorted(set(broken) & set(AIDS)):
        changes["extra"] = _escape(canonical_json(json.loads(rollout.extra) | {ESCAPED: aids}))
    return replace(rollout, **changes)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escape(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
