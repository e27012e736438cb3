"""The embedded engine: a transformers model in this process, batched, sampling like SGLang.

Concurrent calls of `generate` are gathered, first come first served, into batches that one worker
thread decodes; `truncation` is what the sampler does. Every rollout draws from its own Philox
stream, so its neighbours do not touch its random numbers. Results are bitwise the same for the same
batch; in fp32, at least 99 % of rollouts get the same tokens in any batch; in half precision the
logits themselves depend on the batch, and nothing is claimed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from rollout.config import EmbeddedConfig
from rollout.engines.base import Completion, EngineInfo
from rollout.engines.hf import GrowingBatch, check_batchable, load_model
from rollout.engines.truncation import Recorder, Samplers, draw, draw_uniforms, truncate
from rollout.errors import ConfigError, EngineError, EngineRefused
from rollout.prompts import Prompt, load_tokenizer
from rollout.record import WeightSpan
from rollout.sampling import AUTO_TOP_K, SamplingParams

GATHER_S = 0.002
"""How long a batch waits for company: calls made in one turn of the event loop go together."""

UNSUPPORTED = (
    "stop_regex",
    "min_new_tokens",
    "regex",
    "json_schema",
    "ebnf",
    "structural_tag",
    "logit_bias",
    "disallowed_token_ids",
)


@dataclass(eq=False)
class _Request:
    """One call of `generate`, and what became of it."""

    prompt_ids: list[int]
    params: SamplingParams
    max_output: int  # max_new_tokens, or less where the context ends first
    future: asyncio.Future[Completion]
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = "abort"
    stop_token: int | None = None
    stop_string: str | None = None

    @property
    def stop_match(self) -> str | None:
        return self.stop_string if self.stop_token is None else str(self.stop_token)


class EmbeddedEngine:
    """An `Engine` that runs `model`, a folder or hub id, in this process.

    Loads on entering, with the errors of `load_model`. What goes wrong in a batch, for example for
    want of memory, is raised as it is by every call in that batch. A caller that is cancelled
    leaves its batch running for the others.
    """

    def __init__(self, model: str, config: EmbeddedConfig) -> None:
        self._path = model
        self._config = config
        self._decoder: _Decoder | None = None
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []

    async def __aenter__(self) -> Self:
        self._decoder = await asyncio.to_thread(_Decoder, self._path, self._config)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedded")
        self._arrived = asyncio.Event()
        self._server = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # a batch that nobody waits for ends after its current step
        for request in (*self._waiting, *self._running):
            request.future.cancel()
        self._server.cancel()
        await asyncio.wait([self._server])
        await asyncio.to_thread(self._worker.shutdown)
        self._decoder = None

    @property
    def info(self) -> EngineInfo:
        vocab_size = self._entered().vocab_size
        details = self._config.model_dump(include={"dtype", "device", "batch_size"})
        return EngineInfo(
            name="embedded",
            version=transformers.__version__,
            model=self._path,
            max_top_k=vocab_size,
            details=details | {"vocab_size": vocab_size},
        )

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with a number for `top_k: auto`: the vocabulary is the only bound here."""
        if params.top_k != "auto":
            return params
        top_k = min(AUTO_TOP_K, self._entered().vocab_size)
        return params.model_copy(update={"top_k": top_k})

    def check(self, params: SamplingParams) -> None:
        """Raise `NotReplayable` or `ConfigError` for settings this engine cannot serve."""
        params.check_replayable(self._decoder.vocab_size if self._decoder else None)
        for name in UNSUPPORTED:
            if value := getattr(params, name):
                raise ConfigError(
                    f"sampling.{name}: got {value!r}, which the embedded engine cannot do; "
                    "remove it or use the sglang engine"
                )

    def meta(self, params: SamplingParams) -> dict[str, Any]:
        """How rollouts with `params` are sampled, as their `engine_meta` says it."""
        return {
            "engine": "embedded",
            "version": transformers.__version__,
            "sampling_backend": "embedded",
            "filter_order": "sequential" if params.min_p > 0 else "joint",
            "tie_policy": "keep",
            "fp32_head": self._config.dtype == "float32",
            "deterministic": True,
            "support_source": "captured",
        }

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Completion:
        """Sample one sequence after the prompt's ids.

        Raises what `check` raises, and `EngineRefused` for a prompt that the model cannot read.
        """
        self.check(params)
        max_output = self._entered().max_output(prompt.ids, params)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(prompt.ids.tolist(), params, max_output, future))
        self._arrived.set()
        return replace(await future, engine_meta=self.meta(params))

    def _entered(self) -> _Decoder:
        assert self._decoder is not None, "to be used inside `async with EmbeddedEngine(...)`"
        return self._decoder

    async def _serve(self) -> None:
        """Decode what waits, one batch after another, until cancelled."""
        size = self._config.batch_size
        while True:
            await self._arrived.wait()
            if len(self._waiting) < size:
                await asyncio.sleep(GATHER_S)
            waiting = [request for request in self._waiting if not request.future.done()]
            self._running, self._waiting = waiting[:size], deque(waiting[size:])
            if not self._waiting:
                self._arrived.clear()
            if self._running:
                await self._run(self._running)

    async def _run(self, requests: list[_Request]) -> None:
        decode = self._entered().decode
        done = asyncio.get_running_loop().run_in_executor(self._worker, decode, requests)
        await asyncio.wait([done])
        error = done.exception()
        for i, request in enumerate(requests):
            if request.future.done():
                continue
            if error is None:
                request.future.set_result(done.result()[i])
            else:
                request.future.set_exception(error)


class _Decoder:
    """The blocking half: loads the model, then batches of requests in, completions out."""

    def __init__(self, path: str, config: EmbeddedConfig) -> None:
        self._tokenizer = load_tokenizer(path)
        self._model = load_model(
            path,
            dtype=config.dtype,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
        )
        check_batchable(path, self._model)
        text_config = self._model.config.get_text_config(decoder=True)
        self.vocab_size: int = text_config.vocab_size
        self._context: int | None = getattr(text_config, "max_position_embeddings", None)
        eos: Any = self._model.generation_config
        eos = eos and eos.eos_token_id
        # like SGLang, which also stops at the tokenizer's own
        listed = {self._tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
        self._eos_ids = frozenset(listed - {None})

    def max_output(self, prompt_ids: NDArray[np.int32], params: SamplingParams) -> int:
        """How many tokens can follow the prompt; `EngineRefused` where it cannot be read."""
        num_prompt = len(prompt_ids)
        if num_prompt == 0:
            raise EngineRefused("prompt_ids: must hold at least one token, got none")
        if prompt_ids.min() < 0 or prompt_ids.max() >= self.vocab_size:
            raise EngineRefused(
                f"prompt_ids: must be within 0..{self.vocab_size - 1}, "
                f"got {prompt_ids.min()}..{prompt_ids.max()}"
            )
        if self._context is None:
            return params.max_new_tokens
        if num_prompt >= self._context:
            raise EngineRefused(
                f"prompt_ids: got {num_prompt} tokens, must leave room for at least one more in "
                f"the model's context of {self._context}"
            )
        return min(params.max_new_tokens, self._context - num_prompt)

    @torch.inference_mode()
    def decode(self, requests: Sequence[_Request]) -> list[Completion]:
        """Sample all requests to their ends; finished rows leave the batch at once."""
        device = self._model.device
        batch = GrowingBatch(self._model, [request.prompt_ids for request in requests])
        samplers = Samplers.stack([request.params for request in requests], device)
        num_steps = max(request.max_output for request in requests)
        seeds = [request.params.sampling_seed for request in requests]
        uniforms = draw_uniforms(seeds, num_steps).to(device)
        recorder, rows = Recorder(), list(range(len(requests)))
        for step in range(num_steps):
            truncated = truncate(batch.logits(), samplers)
            if not truncated.counts.all():
                raise EngineError("the model's logits are not finite, so there is no distribution")
            positions = draw(truncated, uniforms[:, step])
            recorder.add(rows, truncated, positions)
            tokens = truncated.ids.gather(1, positions[:, None])[:, 0]
            taken = enumerate(zip(rows, tokens.tolist(), strict=True))
            going = [i for i, (row, token) in taken if not self._accept(requests[row], token)]
            if not going or all(request.future.cancelled() for request in requests):
                break
            batch.append(tokens)
            if len(going) < len(rows):
                index = torch.tensor(going, device=device)
                batch.take(index)
                samplers, uniforms = samplers.take(index), uniforms[index]
                rows = [rows[i] for i in going]
        return self._completions(requests, recorder)

    def _accept(self, request: _Request, token: int) -> bool:
        """Append the token; whether it was the last. A string match comes before a token match.

        Unlike in SGLang, `ignore_eos` leaves `stop_token_ids` in force.
        """
        request.output_ids.append(token)
        params = request.params
        if (found := self._find_stop(request)) is not None:
            request.finish_reason, request.stop_string = "stop", found
        elif token in params.stop_token_ids or (token in self._eos_ids and not params.ignore_eos):
            request.finish_reason, request.stop_token = "stop", token
        elif len(request.output_ids) == request.max_output:
            request.finish_reason = "length"
        return request.finish_reason != "abort"

    def _find_stop(self, request: _Request) -> str | None:
        if not request.params.stop:
            return None
        # a token decodes to at least a byte; one more, since the first may lose its space
        num_tokens = max(len(stop.encode()) for stop in request.params.stop) + 1
        tail = self._tokenizer.decode(request.output_ids[-num_tokens:])
        return next((stop for stop in request.params.stop if stop in tail), None)

    def _text(self, request: _Request) -> str:
        params, ids = request.params, request.output_ids
        if request.stop_token is not None and not params.no_stop_trim:
            ids = ids[:-1]
        text = cast(
            str,
            self._tokenizer.decode(
                ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
        )
        if request.stop_string is not None and request.stop_string in text:
            before, stop, _ = text.partition(request.stop_string)
            return before + stop if params.no_stop_trim else before
        return text

    def _completions(self, requests: Sequence[_Request], recorder: Recorder) -> list[Completion]:
        return [
            Completion(
                output_ids=np.array(request.output_ids, dtype=np.int32),
                support=row.support,
                sampling_logprobs=row.sampling_logprobs,
                full_logprobs=row.full_logprobs,
                support_logprobs=row.support_logprobs,
                finish_reason=request.finish_reason,
                stop_match=request.stop_match,
                weight_versions=(WeightSpan("default", 0, len(request.output_ids)),),
                text=self._text(request),
            )
            for request, row in zip(requests, recorder.split(len(requests)), strict=True)
        ]
