"""Who answers at a URL: SGLang, a router in front of it, or something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rollout.engines.sglang.http import MODEL_PATHS, SERVER_PATHS, SGLangHttp
from rollout.engines.sglang.probes import Sampled
from rollout.engines.sglang.rules import ServerRules
from rollout.errors import EngineError, EngineRefused, ReplyMalformed

SMG_HEADERS = ("x-smg-routed-worker-id", "x-smg-error-code")


@dataclass(frozen=True)
class Endpoint:
    """Who answers, by its own pages; None and empty where it has none."""

    server: Mapping[str, Any] | None
    model: Mapping[str, Any] | None
    router: str | None
    workers: tuple[str, ...]
    served: str  # the model's name on the OpenAI routes
    owner: str  # whose server it is, as these routes say

    @property
    def front_end(self) -> str | None:
        """The name of a front end that is not SGLang's ordinary one; said since 0.5.21."""
        name = (self.server or {}).get("frontend")
        return None if name in (None, "python") else str(name)

    @property
    def ask_behind(self) -> str:
        """What to do about a router; empty without one."""
        if self.router is None:
            return ""
        where = f": rollout doctor {self.workers[0]}" if self.workers else ""
        return f"ask the server behind {self.router}{where}"

    @property
    def dropped_by(self) -> str:
        """What to do about a mask that does not come; empty where the pages do not tell."""
        if self.router:
            return f"{self.router} drops return_sampling_mask; {self.ask_behind}"
        if self.front_end:
            return (
                f"SGLang's {self.front_end} front end returns no sampling mask; "
                "start the server without SGLANG_RUST_SERVER"
            )
        return ""

    @property
    def rules(self) -> ServerRules | None:
        """None where no page tells, or the release has no masks: `no_rules` says which."""
        try:
            return ServerRules.of(self.server) if self.server else None
        except EngineError:
            return None

    @property
    def no_rules(self) -> str:
        """Why there are no `rules`."""
        if self.server is None:
            return f"nothing of the server at {' or '.join(SERVER_PATHS)}"
        try:
            ServerRules.of(self.server)
        except EngineError as error:
            return str(error)
        return ""


async def read_endpoint(http: SGLangHttp, sampled: Sampled) -> Endpoint:
    """Read the endpoint's pages; `sampled` is its answer to a first request."""
    server, router = None, None
    for path in SERVER_PATHS:
        page = await _page(http, path)
        if "router_manager" in page:
            router = "sglang-router"
        elif {"version", "sampling_backend"} & page.keys():
            server = page
            break
    for path in MODEL_PATHS:
        if "model_path" in (model := await _page(http, path)):
            break
    listed = (await _page(http, "/workers")).get("workers")
    workers = tuple(
        _without_password(worker["url"])
        for worker in (listed if isinstance(listed, list) else [])
        if isinstance(worker, dict) and isinstance(worker.get("url"), str)
    )
    if router is None and any(name in sampled.answer.headers for name in SMG_HEADERS):
        router = "smg"
    if router is None and workers:
        router = "a router"
    served = (await _page(http, "/v1/models")).get("data")
    first = served[0] if isinstance(served, list) and served else {}
    first = first if isinstance(first, dict) else {}
    return Endpoint(
        server=server,
        model=model if "model_path" in model else None,
        router=router,
        workers=workers,
        served=str(first.get("id", "default")),
        owner=str(first.get("owned_by", "unknown")),
    )


async def _page(http: SGLangHttp, path: str) -> Mapping[str, Any]:
    """The object at `path`, empty where there is none."""
    try:
        return await http.describe(path)
    except (EngineRefused, ReplyMalformed):
        return {}


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def check_sglang(url: str, endpoint: Endpoint, sampled: Sampled) -> None:
    """Raise `EngineRefused` where neither a page nor the answer is SGLang's."""
    if endpoint.server or endpoint.model or endpoint.router or sampled.speaks_sglang:
        return
    status, name = sampled.answer.status, sampled.answer.headers.get("Server")
    if status in (401, 403):
        raise EngineRefused(
            f"{url}: wants an API key (HTTP {status}); put it into SGLANG_API_KEY and ask again"
        )
    if endpoint.owner == "vllm":
        raise EngineRefused(
            f"{url}: a vLLM server, and doctor examines SGLang; collect from it with "
            f"engine.kind: vllm; rollout collect configs/vllm.yaml -o engine.url={url} "
            "-o model=PATH_OR_ID --dry-run examines it"
        )
    raise EngineRefused(
        f"{url}: not an SGLang server: wanted a page at /server_info and a reply from /generate, "
        f"got no such page and HTTP {status}{f' from {name!r}' if name else ''}; "
        "give the URL that `python -m sglang.launch_server` serves"
    )
