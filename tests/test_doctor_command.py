"""`rollout doctor`: what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from endpoints import (
    endpoint,
    selected_alone,
    without_mask,
)

from cli.main import cli


@contextmanager
def python_http_server(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().split(" port ")[1].split()[0]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def test_the_command_ends_with_4_where_this_is_no_sglang(tmp_path: Path) -> None:
    with python_http_server(tmp_path) as url:
        result = CliRunner().invoke(cli, ["doctor", url])
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith(f"Error: {url}: not an SGLang server: ")
    assert "HTTP 501 from 'SimpleHTTP/" in result.stderr


def test_the_command_ends_with_4_where_nobody_listens() -> None:
    result = CliRunner().invoke(cli, ["doctor", "http://127.0.0.1:9", "--json"])
    assert (result.exit_code, result.stdout) == (4, "")
    assert "no answer" in result.stderr


def invoke(*options: str, **kwargs: Any) -> Any:
    """`rollout doctor` on an endpoint that lives in this process."""

    async def run() -> Any:
        async with endpoint(**kwargs) as url:
            arguments = ["doctor", url, *options]
            return await asyncio.to_thread(CliRunner().invoke, cli, arguments)

    return asyncio.run(run())


def test_the_command_prints_a_table_and_the_block() -> None:
    result = invoke(generate=selected_alone, enable_custom_logit_processor=None)
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert any(line.split()[:3] == ["!", "support", "logprobs"] for line in lines)
    assert any(line.split()[:3] == ["?", "custom", "logit"] for line in lines)
    assert lines[-6:-4] == ["engine:", "  kind: sglang"]
    assert lines[-3:] == ["  support_logprobs: false", "sampling:", "  top_k: auto  # 512 here"]
    assert result.stderr == "next: paste the blocks into a config, rollout collect CONFIG\n"


def test_the_command_prints_one_json_document() -> None:
    result = invoke("--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == ["url", "usable", "reason", "probes", "config"]
    assert found["usable"] is True
    assert found["probes"][1] == {"name": "version", "value": "0.5.23", "detail": "", "ok": True}
    assert found["config"] == {
        "engine": {"kind": "sglang", "url": found["url"], "support_logprobs": True},
        "sampling": {"top_k": "auto"},
    }


def test_the_command_ends_with_4_where_the_mask_does_not_come() -> None:
    result = invoke("--json", generate=without_mask)
    assert result.exit_code == 4
    found = json.loads(result.stdout)
    assert (found["usable"], found["config"]) == (False, None)
    assert result.stderr == f"not usable: {found['reason']}\n"
