"""Fixtures: a tiny trained model for every test, a real model and a real server for a few."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest
from builders import DATA

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may look anything up

# how long an example takes is the machine's business
hypothesis.settings.register_profile("rollout", deadline=None)
hypothesis.settings.load_profile("rollout")

TESTS = Path(__file__).parent
CACHE = Path("~/.cache/rollout").expanduser()
SGLANG_VENV = CACHE / "sglang-0.5.23-cpu"
SGLANG_FLAGS = ["--enable-custom-logit-processor"]
ROUTERS_VENV = CACHE / "routers-sglang-router-0.3.2-smg-1.13.0"
SERVER_START_S = 300


@pytest.fixture(scope="session")
def tiny_model_path() -> Path:
    """A Llama of 1.8 M parameters, trained on CPython's documentation; see its model card."""
    return TESTS / "tiny_model" / "model"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, fetched once into the user's cache."""
    script = TESTS.parent / "examples" / "smollm2.py"
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def recorded_file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The rollouts of a recorded set, named by indirect parametrisation, as a plain file."""
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(gzip.decompress((DATA / request.param / "rollouts.jsonl.gz").read_bytes()))
    return path


@pytest.fixture(scope="session")
def sglang_url(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real SGLang 0.5.23 serving SmolLM2 on the CPU; installed once into the user's cache.

    ROLLOUT_TEST_SGLANG names one that runs already: starting takes longer than most tests.
    """
    if running := os.environ.get("ROLLOUT_TEST_SGLANG"):
        yield running
        return
    with _sglang(smollm2_path, tmp_path_factory, *SGLANG_FLAGS) as url:
        yield url


@pytest.fixture(scope="session")
def sglang_tiny_url(
    tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The same engine with the tiny model, whose weights tests may train."""
    with _sglang(tiny_model_path, tmp_path_factory) as url:
        yield url


@contextmanager
def _sglang(model: Path, tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[str]:
    scripts = TESTS / "sglang_cpu"
    CACHE.mkdir(parents=True, exist_ok=True)
    subprocess.run([scripts / "install.sh", SGLANG_VENV], check=True)
    command = [scripts / "serve.sh", SGLANG_VENV, model]
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with _serving(lambda port: [*command, str(port), *flags], "/model_info", log) as url:
        yield url


@pytest.fixture(scope="session")
def sglang_router_url(sglang_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """sglang-router in front of the real server."""
    with _router(["-m", "sglang_router.launch_router"], sglang_url, tmp_path_factory) as url:
        yield url


@pytest.fixture(scope="session")
def smg_url(sglang_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """smg in front of the real server."""
    with _router(["-m", "smg", "launch"], sglang_url, tmp_path_factory) as url:
        yield url


@contextmanager
def _router(
    module: list[str], worker: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    CACHE.mkdir(parents=True, exist_ok=True)
    subprocess.run([TESTS / "routers" / "install.sh", ROUTERS_VENV], check=True)
    _wait_until_answers(f"{worker}/health")  # smg looks again only after half a minute

    def command(port: int) -> list[str | Path]:
        loopback = ["--host", "127.0.0.1", "--prometheus-host", "127.0.0.1"]
        ports = ["--port", str(port), "--prometheus-port", str(_free_port())]
        return [
            ROUTERS_VENV / "bin" / "python",
            *module,
            *loopback,
            *ports,
            "--worker-urls",
            worker,
        ]

    log = tmp_path_factory.mktemp("router") / "router.log"
    with _serving(command, "/readiness", log) as url:
        yield url


@contextmanager
def _serving(command: Callable[[int], list[str | Path]], ready: str, log: Path) -> Iterator[str]:
    """The URL of a process that serves the port given to `command`, from when `ready` answers."""
    port = _free_port()
    with open(log, "wb") as output:
        server = subprocess.Popen(
            command(port),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a server has children: they end with it
        )
    try:
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_until_answers(url + ready, server)
        except RuntimeError as error:
            words = log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"{command(port)[0]} did not start:\n{words}") from error
        yield url
    finally:
        os.killpg(server.pid, 15)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)
            server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_answers(url: str, server: subprocess.Popen[bytes] | None = None) -> None:
    """Until GET `url` is a 200; no longer than its server lives."""
    deadline = time.monotonic() + SERVER_START_S
    while time.monotonic() < deadline:
        if server is not None and server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    raise RuntimeError(f"{url} does not answer")
