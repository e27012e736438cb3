"""Record what the sampler really chose from: rollouts with their supports, in Arrow shards."""

from rollout.builder import RolloutBuilder
from rollout.collect import Outcome, Request, collect, make_requests
from rollout.conditions import finished, reward_within, sampled_at, sampled_by
from rollout.engines.base import Completion, Engine, EngineInfo
from rollout.engines.sglang.control import SGLangControl
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.vllm.engine import VLLMEngine
from rollout.errors import RolloutError
from rollout.prompts import Chat, Prompt
from rollout.reader import Run, View, open_run
from rollout.record import Rollout, WeightSpan
from rollout.sampling import SamplingParams
from rollout.support import Support
from rollout.writer import RunWriter

__all__ = [
    "Chat",
    "Completion",
    "Engine",
    "EngineInfo",
    "Outcome",
    "Prompt",
    "Request",
    "Rollout",
    "RolloutBuilder",
    "RolloutError",
    "Run",
    "RunWriter",
    "SGLangControl",
    "SGLangEngine",
    "SamplingParams",
    "Support",
    "VLLMEngine",
    "View",
    "WeightSpan",
    "collect",
    "finished",
    "make_requests",
    "open_run",
    "reward_within",
    "sampled_at",
    "sampled_by",
]
