"""The table of `diagnose`: each cause with its predictor and its words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replay import predictors
from replay.evidence import Evidence
from replay.predictors import Prediction


@dataclass(frozen=True)
class Hypothesis:
    """`predict` returns None where the hypothesis says nothing other than "as recorded".

    `sentence` is filled with the scope in words (`where`) and the facts; `freedom` orders those
    that explain equally much: the fewer numbers fitted, the better.
    """

    code: str
    predict: Callable[[Evidence], Prediction | None]
    sentence: str
    advice: str
    freedom: int = 0
    same: tuple[str, ...] = ()  # other causes that predict the same numbers
    by_rollout: bool = True  # can be right for some rollouts only, with one fitted number


HYPOTHESES = (
    Hypothesis(
        "temperature_ignored",
        predictors.temperature_ignored,
        "{where}, the engine's logprobs are those of temperature 1, not of the recorded one",
        "divide the engine's logits by the temperature before its logprobs are taken, or record "
        "the temperature 1 that was used",
    ),
    Hypothesis(
        "temperature_doubled",
        predictors.temperature_doubled,
        "{where}, the engine's logprobs are those of logits divided by the temperature twice",
        "divide by the temperature once",
    ),
    Hypothesis(
        "full_logprobs_stored",
        predictors.full_logprobs_stored,
        "{where}, what is recorded as sampling_logprobs is normalised over the whole vocabulary: "
        "the support was not applied",
        "store the engine's sampling-mask logprobs (SGLang: output_token_sampling_logprobs), not "
        "output_token_logprobs",
    ),
    Hypothesis(
        "shifted_by_one",
        predictors.shifted,
        "{where}, each sampling logprob belongs to the neighbouring token",
        "align logprobs with output_ids: entry t is of output token t",
        by_rollout=True,
    ),
    Hypothesis(
        "temperature_other",
        predictors.temperature_other,
        "{where}, the engine sampled at temperature {temperature}, not at the recorded one "
        "(its logits are the policy's times {logit_factor})",
        "record the temperature that was used; a logit scale that only one side applies predicts "
        "the same numbers, so compare the models' logit scales too",
        freedom=1,
        same=("logit_scale",),
    ),
    Hypothesis(
        "support_truncated",
        predictors.support_short,
        "{where}, both sides agree over the whole vocabulary but not on the mass of the support: "
        "ids are missing from it, or added",
        "record every id that the sampler kept; a limit on the length of a support cuts it",
        freedom=1,
    ),
    Hypothesis(
        "softcap",
        predictors.softcap,
        "{where}, the logits of one side are softcapped and those of the other are not "
        "(engine {cap}, policy {policy_cap})",
        "use the same final_logit_softcapping on both sides",
        freedom=2,
        by_rollout=False,
    ),
    Hypothesis(
        "penalty",
        predictors.penalty,
        "{where}, ids that are in the output already are moved by {shift:+.3g}",
        "sample without repetition, presence or frequency penalties: replay cannot redo them",
        freedom=2,
    ),
    Hypothesis(
        "bias",
        predictors.bias,
        "{where}, the engine moves the logits of single ids: {ids}",
        "remove the logit bias; without one, compare these rows of the head on both sides "
        "(a head that is stale or cloned)",
        freedom=3,
        same=("other_weights",),
        by_rollout=False,
    ),
)
