"""Replay rollouts under the trainer's policy, and say whether both sides agree."""

from replay import losses
from replay.batch import PackedBatch, pack
from replay.config import GatesConfig, ReplayConfig
from replay.diagnose import diagnose
from replay.evidence import Evidence
from replay.from_logits import score_support_from_logits
from replay.full import FullScores, score_full
from replay.job import replay_run
from replay.loader import Batches, batches
from replay.padded import PaddedBatch
from replay.policy import Policy
from replay.reference import SupportScores
from replay.report import Report, make_report
from replay.score import score_support
from replay.support_plan import SupportPlan, plan
from replay.tokens import TokenTable
from replay.verify import Finding, Verified, verify
from replay.vocab_parallel import VocabShard

__all__ = [
    "Batches",
    "Evidence",
    "Finding",
    "FullScores",
    "GatesConfig",
    "PackedBatch",
    "PaddedBatch",
    "Policy",
    "ReplayConfig",
    "Report",
    "SupportPlan",
    "SupportScores",
    "TokenTable",
    "Verified",
    "VocabShard",
    "batches",
    "diagnose",
    "losses",
    "make_report",
    "pack",
    "plan",
    "replay_run",
    "score_full",
    "score_support",
    "score_support_from_logits",
    "verify",
]
