"""The embedded engine on the tiny model: what it returns against plain forward passes."""

import asyncio
import time

import numpy as np
import pytest
import torch
from builders import make_prompt
from transformers import AutoTokenizer

from rollout.config import EmbeddedConfig
from rollout.engines import embedded
from rollout.engines.embedded import EmbeddedEngine
from rollout.engines.hf import GrowingBatch, load_model
from rollout.engines.truncation import Samplers, truncate
from rollout.errors import ConfigError, EngineError, EngineRefused, NotReplayable, PolicyError
from rollout.record import WeightSpan
from rollout.sampling import SamplingParams

SETTINGS = [
    dict(top_k=20),
    dict(top_k=50, top_p=0.9, temperature=0.7),
    dict(top_k=1024, top_p=0.8, temperature=1.3),
    dict(top_k=40, min_p=0.1),
    dict(temperature=0.0),
    dict(top_k=1),
]
TEXTS = [
    "The try statement",
    "A",
    "An exception is raised when the object has no attribute of",
    "if",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path):
    return AutoTokenizer.from_pretrained(tiny_model_path)


@pytest.fixture(scope="module")
def model(tiny_model_path):
    return load_model(str(tiny_model_path), dtype="float32", device="cpu", trust_remote_code=False)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [make_prompt(*tokenizer.encode(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def jobs(prompts):
    """24 calls: every prompt with every setting, in one order."""
    return [
        (prompt, params(seed=len(SETTINGS) * p + s, **setting))
        for p, prompt in enumerate(prompts)
        for s, setting in enumerate(SETTINGS)
    ]


@pytest.fixture
def sample(tiny_model_path):
    """The completions of some (prompt, params), all called at once."""

    async def gather(jobs, config):
        async with EmbeddedEngine(str(tiny_model_path), config) as engine:
            return await asyncio.gather(*(engine.generate(*job) for job in jobs))

    return lambda jobs, **config: asyncio.run(gather(jobs, EmbeddedConfig(**config)))


def params(seed=0, max_new_tokens=24, **settings):
    if "temperature" not in settings or settings["temperature"] > 0:
        settings = {"top_k": 50} | settings
    return SamplingParams(sampling_seed=seed, max_new_tokens=max_new_tokens, **settings)


def assert_same(one, other):
    for name in ("output_ids", "sampling_logprobs", "full_logprobs", "support_logprobs"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    np.testing.assert_array_equal(one.support.ids, other.support.ids)
    np.testing.assert_array_equal(one.support.offsets, other.support.offsets)
    assert (one.text, one.finish_reason, one.stop_match) == (
        other.text,
        other.finish_reason,
        other.stop_match,
    )


def test_rollouts_replay_to_what_was_recorded(sample, model, jobs):
    """Padded, cached and batched with other settings, against each sequence alone."""
    same_support, num_tokens = 0, 0
    for (prompt, sampling), got in zip(jobs, sample(jobs), strict=True):
        sequence = torch.from_numpy(np.concatenate([prompt.ids, got.output_ids])).long()
        with torch.inference_mode():
            logits = model(sequence[None]).logits[0, len(prompt.ids) - 1 : -1]
        scaled = logits / sampling.sampler.temperature
        again = truncate(logits, Samplers.stack([sampling] * len(logits), "cpu"))
        assert len(got.support) == len(got.output_ids) == len(logits)
        support_logprobs = np.split(got.support_logprobs, got.support.offsets[1:-1])
        for t, token in enumerate(got.output_ids.tolist()):
            ids = got.support[t].tolist()
            expected = scaled[t, ids].log_softmax(0).numpy()
            np.testing.assert_allclose(support_logprobs[t], expected, atol=1e-4, rtol=0)
            full = scaled[t].log_softmax(0)[token]
            np.testing.assert_allclose(got.full_logprobs[t], full, atol=1e-4, rtol=0)
            assert got.sampling_logprobs[t] == support_logprobs[t][ids.index(token)]
            same_support += set(ids) == set(again.ids[t, : again.counts[t]].tolist())
            num_tokens += 1
    # a rounding may move an id across a cut-off
    assert num_tokens > 300
    assert same_support >= 0.99 * num_tokens


def test_shapes_and_types(sample, prompts):
    (got,) = sample([(prompts[0], params())])
    size = len(got.output_ids)
    assert got.output_ids.dtype == got.support.ids.dtype == np.int32
    assert got.sampling_logprobs.shape == got.full_logprobs.shape == (size,)
    assert got.sampling_logprobs.dtype == got.support_logprobs.dtype == np.float32
    assert len(got.support_logprobs) == len(got.support.ids)
    assert got.support.contains(got.output_ids).all()
    assert not got.support.duplicated().any()
    assert got.weight_versions == (WeightSpan("default", 0, size),)


def test_the_same_batch_is_bitwise_the_same(sample, jobs):
    for one, other in zip(sample(jobs), sample(jobs), strict=True):
        assert_same(one, other)


@pytest.mark.stress
@pytest.mark.parametrize("batch_size", [1, 5])
def test_neighbours_hardly_ever_change_the_tokens(sample, prompts, batch_size):
    calls = [(p, params(seed, 12, **s)) for seed in range(5) for p in prompts for s in SETTINGS]
    pairs = zip(sample(calls), sample(calls, batch_size=batch_size), strict=True)
    same = [np.array_equal(a.output_ids, b.output_ids) for a, b in pairs]
    assert sum(same) >= 0.99 * len(calls) > 100


def test_half_precision_runs(sample, prompts):
    (got,) = sample([(prompts[0], params())], dtype="bfloat16")
    assert np.isfinite(got.support_logprobs).all()


def test_seeds(sample, prompts):
    seeds = [1, 1, 2, -5, None, None]
    outputs = [tuple(c.output_ids) for c in sample([(prompts[0], params(seed=s)) for s in seeds])]
    assert outputs[0] == outputs[1]
    assert len(set(outputs)) == 5


def test_greedy_follows_the_largest_logit(sample, model, prompts):
    (got,) = sample([(prompts[2], params(temperature=0.0))])
    assert got.support.ids.tolist() == got.output_ids.tolist()
    assert got.support.counts.tolist() == [1] * len(got.output_ids)
    assert not got.sampling_logprobs.any()
    assert not got.support_logprobs.any()
    sequence = torch.from_numpy(np.concatenate([prompts[2].ids, got.output_ids])).long()
    with torch.inference_mode():
        logits = model(sequence[None]).logits[0, len(prompts[2].ids) - 1 : -1]
    assert logits.argmax(1).tolist() == got.output_ids.tolist()


def test_ends_at_the_length(sample, prompts):
    (got,) = sample([(prompts[0], params(max_new_tokens=3, ignore_eos=True))])
    assert (len(got.output_ids), got.finish_reason, got.stop_match) == (3, "length", None)


def test_ends_at_eos_unless_ignored(sample, tokenizer, prompts):
    eos = tokenizer.eos_token_id
    calls = [(prompts[0], params(seed=seed, max_new_tokens=150)) for seed in range(8)]
    ignoring = [(p, s.model_copy(update={"ignore_eos": True})) for p, s in calls]
    ended = 0
    for stopped, longer in zip(sample(calls), sample(ignoring), strict=True):
        assert (longer.finish_reason, len(longer.output_ids)) == ("length", 150)
        if stopped.finish_reason == "stop":
            size, ended = len(stopped.output_ids), ended + 1
            assert stopped.stop_match == str(eos)
            assert stopped.output_ids.tolist().index(eos) == size - 1
            assert longer.output_ids[:size].tolist() == stopped.output_ids.tolist()
            assert stopped.text == tokenizer.decode(stopped.output_ids[:-1])
    assert ended > 0


def test_ends_at_a_stop_token(sample, tokenizer, prompts):
    (free,) = sample([(prompts[0], params())])
    stop = int(free.output_ids[5])
    first = free.output_ids.tolist().index(stop)
    trimmed, whole = sample(
        [
            (prompts[0], params(stop_token_ids=[stop])),
            (prompts[0], params(stop_token_ids=[stop], no_stop_trim=True)),
        ]
    )
    for got in (trimmed, whole):
        assert got.output_ids.tolist() == free.output_ids[: first + 1].tolist()
        assert (got.finish_reason, got.stop_match) == ("stop", str(stop))
        assert len(got.support) == first + 1
    assert trimmed.text == tokenizer.decode(free.output_ids[:first])
    assert whole.text == tokenizer.decode(free.output_ids[: first + 1])


def test_ends_at_a_stop_string(sample, tokenizer, prompts):
    (free,) = sample([(prompts[0], params())])
    # a string that begins inside one token and ends inside a later one
    stop = free.text[9:16]
    size = next(n for n in range(99) if stop in tokenizer.decode(free.output_ids[:n]))
    trimmed, whole = sample(
        [
            (prompts[0], params(stop=["never said", stop])),
            (prompts[0], params(stop=[stop], no_stop_trim=True)),
        ]
    )
    for got in (trimmed, whole):
        assert got.output_ids.tolist() == free.output_ids[:size].tolist()
        assert (got.finish_reason, got.stop_match) == ("stop", stop)
    before = free.text[: free.text.index(stop)]
    assert (trimmed.text, whole.text) == (before, before + stop)


def test_a_stop_string_beats_the_length(sample, tokenizer, prompts):
    (free,) = sample([(prompts[0], params(max_new_tokens=4))])
    stop = tokenizer.decode(free.output_ids)
    (got,) = sample([(prompts[0], params(max_new_tokens=4, stop=[stop]))])
    assert (got.finish_reason, got.stop_match, got.text) == ("stop", stop, "")


def test_ends_where_the_context_ends(sample, model, prompts):
    context = model.config.max_position_embeddings
    prompt = make_prompt(*np.resize(prompts[2].ids, context - 2))
    (got,) = sample([(prompt, params(max_new_tokens=50, ignore_eos=True))])
    assert (len(got.output_ids), got.finish_reason) == (2, "length")


def test_refuses_prompts_the_model_cannot_read(sample, model):
    context, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
    with pytest.raises(EngineRefused, match=f"got {context} tokens.* context of {context}"):
        sample([(make_prompt(*[1] * context), params())])
    with pytest.raises(EngineRefused, match=f"0..{vocab_size - 1}, got 3..{vocab_size}"):
        sample([(make_prompt(3, vocab_size), params())])
    with pytest.raises(EngineRefused, match="at least one token"):
        sample([(make_prompt(), params())])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regex", "a+"),
        ("json_schema", "{}"),
        ("ebnf", "root ::= 'a'"),
        ("structural_tag", "{}"),
        ("stop_regex", ["a+"]),
        ("min_new_tokens", 3),
        ("logit_bias", {"5": float("-inf")}),
        ("disallowed_token_ids", [5]),
    ],
)
def test_refuses_what_only_sglang_does(tiny_model_path, name, value):
    engine = EmbeddedEngine(str(tiny_model_path), EmbeddedConfig())
    with pytest.raises(ConfigError, match=f"sampling.{name}: .*sglang engine"):
        engine.check(params(**{name: value}))


def test_refuses_a_top_k_above_the_vocabulary(sample, prompts):
    with pytest.raises(NotReplayable, match="at most 1024"):
        sample([(prompts[0], params(top_k=1025))])


def test_says_what_it_is(tiny_model_path):
    async def look():
        async with EmbeddedEngine(str(tiny_model_path), EmbeddedConfig(batch_size=3)) as engine:
            return engine.info, engine.meta(params(min_p=0.1)), engine.meta(params())

    info, sequential, joint = asyncio.run(look())
    assert (info.name, info.max_top_k) == ("embedded", 1024)
    assert info.details == {
        "dtype": "float32",
        "device": "cpu",
        "batch_size": 3,
        "vocab_size": 1024,
    }
    assert joint == {
        "engine": "embedded",
        "version": info.version,
        "sampling_backend": "embedded",
        "filter_order": "joint",
        "tie_policy": "keep",
        "fp32_head": True,
        "deterministic": True,
        "support_source": "captured",
    }
    assert sequential == joint | {"filter_order": "sequential"}


def test_batches_are_filled_in_order(sample, prompts, monkeypatch):
    seen = []
    decode = embedded._Decoder.decode

    def spy(self, requests):
        seen.append([request.params.sampling_seed for request in requests])
        return decode(self, requests)

    monkeypatch.setattr(embedded._Decoder, "decode", spy)
    sample([(prompts[0], params(seed=i, max_new_tokens=2)) for i in range(7)], batch_size=3)
    assert seen == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_cancelled_caller_leaves_the_others_alone(sample, tiny_model_path, jobs):
    async def cancel_two():
        async with EmbeddedEngine(str(tiny_model_path), EmbeddedConfig(batch_size=4)) as engine:
            tasks = [asyncio.create_task(engine.generate(*job)) for job in jobs[:6]]
            while not engine._running:
                await asyncio.sleep(0)
            # one is being decoded, the other one waits
            tasks[1].cancel()
            tasks[5].cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    got = asyncio.run(cancel_two())
    assert [i for i, c in enumerate(got) if isinstance(c, asyncio.CancelledError)] == [1, 5]
    expected = sample(jobs[:4], batch_size=4) + sample([jobs[4]], batch_size=4)
    for i in (0, 2, 3, 4):
        assert_same(got[i], expected[i])


def test_leaving_ends_what_nobody_waits_for(tiny_model_path, prompts):
    async def leave():
        async with EmbeddedEngine(str(tiny_model_path), EmbeddedConfig()) as engine:
            long = params(max_new_tokens=2000, ignore_eos=True)
            task = asyncio.create_task(engine.generate(prompts[0], long))
            while not engine._running:
                await asyncio.sleep(0)
            began = time.perf_counter()
        assert time.perf_counter() - began < 2
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())


def test_an_exception_reaches_every_caller_and_the_engine_lives(
    tiny_model_path, prompts, monkeypatch
):
    error = MemoryError("none left")
    logits = GrowingBatch.logits

    def fail_once(self):
        monkeypatch.setattr(GrowingBatch, "logits", logits)
        raise error

    async def fail_then_work():
        async with EmbeddedEngine(str(tiny_model_path), EmbeddedConfig()) as engine:
            monkeypatch.setattr(GrowingBatch, "logits", fail_once)
            calls = [engine.generate(prompts[0], params(seed=i)) for i in range(3)]
            failed = await asyncio.gather(*calls, return_exceptions=True)
            return failed, await engine.generate(prompts[0], params())

    failed, completion = asyncio.run(fail_then_work())
    assert failed == [error] * 3
    assert completion.finish_reason in ("stop", "length")


def test_no_distribution_is_an_error(sample, prompts, monkeypatch):
    monkeypatch.setattr(GrowingBatch, "logits", lambda self: torch.full((1, 1024), torch.nan))
    with pytest.raises(EngineError, match="not finite"):
        sample([(prompts[0], params())])


def load(path, dtype="float32", device="cpu"):
    return load_model(str(path), dtype=dtype, device=device, trust_remote_code=False)


def test_models_that_cannot_be_loaded(tiny_model_path, tmp_path):
    with pytest.raises(ConfigError, match="no model could be loaded: no such folder$"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="device"):
        load(tiny_model_path, device="cuda:99")
    with pytest.raises(ConfigError, match="float8"):
        load(tiny_model_path, dtype="float8")
    (tmp_path / "config.json").write_text(
        '{"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}'
    )
    with pytest.raises(ConfigError, match="set trust_remote_code"):
        load(tmp_path)


def test_incomplete_weights_are_not_filled_with_noise(model, tmp_path):
    state = model.state_dict()
    del state["model.layers.0.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(PolicyError, match="1 weights are missing.*layers.0.mlp.up_proj"):
        load(tmp_path)
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(PolicyError, match="cannot be read"):
        load(tmp_path)
