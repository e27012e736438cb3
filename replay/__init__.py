"""Replay rollouts under the trainer's policy, and say whether both sides agree."""

from replay.batch import PackedBatch, pack
from replay.config import GatesConfig, ReplayConfig
from replay.diagnose import diagnose
from replay.evidence import Evidence
from replay.job import replay_run
from replay.policy import Policy
from replay.reference import SupportScores
from replay.report import Report, make_report
from replay.score import FullScores, score_full, score_support
from replay.tokens import TokenTable
from replay.verify import Finding, Verified, verify

__all__ = [
    "Evidence",
    "Finding",
    "FullScores",
    "GatesConfig",
    "PackedBatch",
    "Policy",
    "ReplayConfig",
    "Report",
    "SupportScores",
    "TokenTable",
    "Verified",
    "diagnose",
    "make_report",
    "pack",
    "replay_run",
    "score_full",
    "score_support",
    "verify",
]
