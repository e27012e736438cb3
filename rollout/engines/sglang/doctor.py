"""examine(): what an endpoint can do for rollouts, and the config block to use it with."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from rollout.engines.sglang.endpoint import Endpoint, check_sglang, read_endpoint
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.http import SGLangHttp
from rollout.engines.sglang.probes import (
    Probe,
    Sampled,
    full_logprobs,
    mask_on_chat,
    mask_on_generate,
    sample,
    sampling_fields,
    seeds,
    support_logprobs,
)
from rollout.engines.sglang.rules import ServerRules
from rollout.errors import ConfigError, EngineError
from rollout.sampling import SamplingParams


@dataclass(frozen=True)
class Examination:
    """What was found at `url`; `config` holds the blocks to collect from it, where that works."""

    url: str
    usable: bool
    reason: str
    probes: tuple[Probe, ...]
    config: dict[str, Any] | None
    top_k: int | None  # what `top_k: auto` becomes, where the rules are known

    def as_json(self) -> dict[str, Any]:
        """url, usable, reason, probes (name, value, detail, ok) and config."""
        return {
            "url": self.url,
            "usable": self.usable,
            "reason": self.reason,
            "probes": [asdict(probe) for probe in self.probes],
            "config": self.config,
        }

    def as_yaml(self) -> str:
        """`config` to paste into a config of `rollout collect`; empty without one."""
        if self.config is None:
            return ""
        text = yaml.safe_dump(self.config, sort_keys=False, width=1000)
        if self.top_k is None:
            return text
        return text.replace("top_k: auto", f"top_k: auto  # {self.top_k} here")


async def examine(url: str) -> Examination:
    """Ask everything that matters for rollouts, about ten requests of a few tokens each.

    Raises `EngineUnreachable` where nobody answers and `EngineRefused` where SGLang does not.
    """
    http = SGLangHttp(url)
    http.open()
    try:
        sampled = await sample(http)
        endpoint = await read_endpoint(http, sampled)
        check_sglang(http.url, endpoint, sampled)
        probes = [*_described(endpoint), *await _asked(http, endpoint, sampled)]
    finally:
        await http.close()
    wrong = await _why_not_usable(http.url, endpoint, sampled)
    config = None
    if not wrong:
        per_id = sampled.completion is not None and sampled.completion.support_logprobs is not None
        config = {
            "engine": {"kind": "sglang", "url": http.url, "support_logprobs": per_id},
            "sampling": {"top_k": "auto"},
        }
    return Examination(
        url=http.url,
        usable=not wrong,
        reason=wrong or "masks arrive, and rollouts can be collected",
        probes=tuple(probes),
        config=config,
        top_k=_auto_top_k(endpoint.rules) if endpoint.rules else None,
    )


async def _why_not_usable(url: str, endpoint: Endpoint, sampled: Sampled) -> str:
    """Empty where an engine can be entered: what `rollout collect` begins with."""
    if sampled.completion is None:
        mask = mask_on_generate(sampled, endpoint.dropped_by)
        return f"mask on /generate {mask.value}: {mask.detail}"
    try:
        async with SGLangEngine(url, vocab_size=2) as engine:
            engine.check(engine.resolve(SamplingParams(top_k="auto")))
            return ""
    except (ConfigError, EngineError) as error:
        instead = f"; or {endpoint.ask_behind}" if endpoint.ask_behind else ""
        return f"masks arrive, but rollouts cannot be collected: {error}{instead}"


def _auto_top_k(rules: ServerRules) -> int:
    top_k = rules.resolve(SamplingParams(top_k="auto")).top_k
    assert isinstance(top_k, int), "resolve leaves a number"
    return top_k


def _described(endpoint: Endpoint) -> list[Probe]:
    """What the endpoint's own pages say."""
    server, model = endpoint.server or {}, endpoint.model or {}
    rules, version = endpoint.rules, server.get("version")
    return [
        _who(endpoint),
        Probe("version", str(version), endpoint.no_rules, rules is not None)
        if version
        else Probe("version", "unknown", endpoint.no_rules, None),
        _fact("model", model.get("model_path")),
        *_sampler(rules),
        _speculation(rules),
        _switch("deterministic", server.get("enable_deterministic_inference")),
        _switch(
            "custom logit processors",
            server.get("enable_custom_logit_processor"),
            off="banned tokens need --enable-custom-logit-processor",
        ),
        _fact("weight version", model.get("weight_version")),
    ]


def _who(endpoint: Endpoint) -> Probe:
    if endpoint.router:
        count = len(endpoint.workers)
        behind = f"a router in front of {', '.join(endpoint.workers) or 'unknown servers'}"
        if count > 1 and endpoint.server:
            behind += "; what follows is of one of them"
        return Probe("endpoint", endpoint.router, behind)
    if endpoint.front_end:
        return Probe("endpoint", f"SGLang, {endpoint.front_end} front end", ok=False)
    return Probe("endpoint", "SGLang")


def _sampler(rules: ServerRules | None) -> list[Probe]:
    if rules is None:
        return [Probe(name, "unknown", ok=None) for name in ("sampler", "top_k")]
    order = {name: rules.filter_order(min_p) for name, min_p in (("off", 0.0), ("on", 0.1))}
    filters = f"filters {order['off']}"
    if order["on"] != order["off"]:
        filters += f" ({order['on']} once min_p is used)"
    ties = "ties kept: a support may exceed top_k" if rules.keeps_ties else "ties cut"
    source = "captured" if rules.captures else "reconstructed, not what was sampled from"
    top_k = _auto_top_k(rules)
    auto = f"auto becomes {top_k}"
    if top_k == 1:
        auto += ", which is greedy; set a number, or raise --sampling-mask-max-tokens"
    return [
        Probe(
            "sampler",
            rules.sampling_backend or "unknown",
            f"{filters}, {ties}, support {source}",
            rules.captures,
        ),
        Probe("top_k", f"at most {rules.cap}" if rules.cap else "no limit", auto, top_k > 1),
    ]


def _speculation(rules: ServerRules | None) -> Probe:
    name = "speculative decoding"
    if rules is None:
        return Probe(name, "unknown", ok=None)
    if not rules.speculative:
        return Probe(name, "off")
    try:
        rules.check(SamplingParams(top_k=2))
    except EngineError as error:
        return Probe(name, rules.speculative, str(error), False)
    return Probe(name, rules.speculative, "with sampling masks, but not with min_p")


def _fact(name: str, value: object) -> Probe:
    return Probe(name, "unknown", ok=None) if value is None else Probe(name, str(value))


def _switch(name: str, value: object, off: str = "") -> Probe:
    if value is None:
        return Probe(name, "unknown", ok=None)
    return Probe(name, "on") if value else Probe(name, "off", off)


async def _asked(http: SGLangHttp, endpoint: Endpoint, sampled: Sampled) -> list[Probe]:
    """What requests show; those that are still to be sent go at once."""
    deterministic = bool((endpoint.server or {}).get("enable_deterministic_inference"))
    chat, fields, seeded = await asyncio.gather(
        mask_on_chat(http, endpoint.served, endpoint.dropped_by),
        sampling_fields(http, endpoint.router),
        seeds(http, deterministic),
    )
    return [
        mask_on_generate(sampled, endpoint.dropped_by),
        chat,
        support_logprobs(sampled),
        full_logprobs(sampled),
        fields,
        seeded,
    ]
