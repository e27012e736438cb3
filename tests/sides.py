"""Both sides' numbers made by hand: an engine with given logits, and a policy with others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from builders import make_rollout
from numpy.typing import NDArray

from replay.evidence import Evidence, make_evidence
from rollout.record import Rollout
from rollout.support import Support

Array = NDArray[np.float64]
VOCABULARY, LENGTH, ROLLOUTS = 60, 32, 10
GRAIN = 1 / 16  # of logits in the other precision
ERROR = 12**-0.5  # of rounding, root mean square, in grains


def lse(z: Array) -> Array:
    return np.logaddexp.reduce(z, axis=-1)


def sides(
    policy: Array,  # [n, R, V] logits
    engine: Array,  # [n, R, V] logits, temperature and all
    supports: list[list[list[int]]],  # per rollout and token
    outputs: NDArray[np.int32],  # [n, R]
    temperature: float = 1.0,
    softcap: float | None = None,
    grain: float = GRAIN,
) -> tuple[list[Rollout], Evidence]:
    """What an engine with logits `engine` records, and what a policy says about it."""
    rollouts, parts = [], []
    for n, rows in enumerate(supports):
        length = len(rows)
        of_engine = [engine[n, t][ids] for t, ids in enumerate(rows)]
        per_id = np.concatenate([z - lse(z) for z in of_engine])
        at = [ids.index(y) for ids, y in zip(rows, outputs[n], strict=True)]
        sampling = [z[i] - lse(z) for z, i in zip(of_engine, at, strict=True)]
        full = [engine[n, t][y] - lse(engine[n, t]) for t, y in enumerate(outputs[n])]
        rollout = make_rollout(
            str(n),
            output_ids=outputs[n].astype(np.int32),
            loss_mask=np.ones(length, np.int8),
            support=Support.from_rows(rows),
            sampling_logprobs=np.array(sampling, np.float32),
            full_logprobs=np.array(full, np.float32),
            support_logprobs=per_id.astype(np.float32),
            temperature=temperature,
            weight_versions=(),
        )
        rollouts.append(rollout)
        parts.append(scored(rollout, policy[n], softcap, grain))
    return rollouts, Evidence.concatenate(parts)


def scored(
    rollout: Rollout, policy: Array, softcap: float | None = None, grain: float = GRAIN
) -> Evidence:
    """The policy's logits [R, V] for a rollout as it stands; the other precision rounds them."""
    z = policy / rollout.temperature
    rough = np.round(policy / grain) * grain / rollout.temperature
    rows = [rollout.support[t] for t in range(len(rollout.support))]
    sums = np.array([lse(z[t][ids]) for t, ids in enumerate(rows)])
    own = np.concatenate([z[t][ids] - sums[t] for t, ids in enumerate(rows)])
    return make_evidence(
        [rollout],
        own,
        own - np.concatenate([rough[t][ids] - lse(rough[t][ids]) for t, ids in enumerate(rows)]),
        z[np.arange(len(rows)), rollout.output_ids] - lse(z),
        sums,
        softcap,
    )


def some_logits() -> Array:
    """[n, R, V], the size of real ones: the largest about 20."""
    generator = np.random.default_rng(0)
    return generator.normal(12, 3, (ROLLOUTS, LENGTH, VOCABULARY))


def play(
    logits: Array,
    change: Callable[[Array], Array] = lambda z: z,
    policy: Callable[[Array], Array] = lambda z: z,
    noise: float = 0.02,
    **record: float,
) -> tuple[list[Rollout], Evidence]:
    """The eight largest logits are the support; engine logits are `change`d, with honest noise."""
    generator = np.random.default_rng(1)
    engine = change(logits + generator.normal(0, noise, logits.shape))
    supports = [[np.argsort(-z)[:8].tolist() for z in rows] for rows in logits]
    outputs = np.array([[generator.choice(s[:4]) for s in rows] for rows in supports])
    grain = max(GRAIN, noise / ERROR)
    return sides(policy(logits), engine, supports, outputs, grain=grain, **record)
