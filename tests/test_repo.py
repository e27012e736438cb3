"""What holds for the project as a whole: layers, light imports, exports, configs, README."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import replay
import rollout
from cli.main import cli
from replay.config import ReplayConfig
from rollout.config import CollectConfig

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "rollout": {"rollout"},
    "replay": {"rollout", "replay"},
    "cli": {"rollout", "replay", "cli"},
}
SOURCES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def imported_packages(path: Path) -> set[str]:
    """Top-level names of every import in a file, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    ours = imported_packages(path) & MAY_IMPORT.keys()
    assert ours <= MAY_IMPORT[package]


def test_an_install_holds_every_module() -> None:
    """setuptools finds what has an __init__.py; the project once listed its packages and forgot."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = settings["packages"]
    assert packages == {"find": {"include": [f"{package}*" for package in MAY_IMPORT]}}
    assert [p for p in SOURCES if not (p.parent / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        pytest.param("rollout", {"torch", "transformers", "datasets"}, id="rollout"),
        pytest.param("rollout.job", {"torch", "transformers", "datasets"}, id="rollout.job"),
        pytest.param("cli.main", {"torch", "transformers", "datasets"}, id="cli"),
        pytest.param("replay", {"triton", "transformers", "datasets"}, id="replay"),
    ],
)
def test_imports_are_light(module: str, absent: set[str]) -> None:
    code = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not absent & set(done.stdout.split())


@pytest.mark.parametrize("package", [rollout, replay], ids=lambda package: package.__name__)
def test_all_is_sorted_and_is_what_is_exported(package: object) -> None:
    names = package.__all__
    assert names == sorted(names)
    tree = ast.parse(Path(package.__file__).read_text())
    bound = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert set(names) == bound


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_config_loads_and_says_what_it_is_for(path: Path) -> None:
    assert path.read_text().startswith("# ")
    block = ReplayConfig if path.name.startswith("replay") else CollectConfig
    block.load(path)


def test_the_shipped_gates_are_the_defaults() -> None:
    assert ReplayConfig.load(ROOT / "configs" / "replay.yaml") == ReplayConfig()


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_help_and_stands_in_the_readme(name: str) -> None:
    command = cli.commands[name]
    assert command.help and "Example:" in command.help
    assert f"rollout {name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_option_has_help(name: str) -> None:
    for parameter in cli.commands[name].params:
        if isinstance(parameter, click.Option) and not isinstance(parameter.type, click.Choice):
            assert parameter.help or parameter.required or parameter.is_flag, parameter.name


def dotted_name(path: Path) -> str:
    """As docs/structure.md writes it: without the package, `engines.sglang_rules`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.name != "__init__.py"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_module_stands_in_the_structure_of_its_package(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    page = (ROOT / "docs" / "structure.md").read_text()
    section = page.split(f"\n## {package}: ")[1].split("\n## ")[0]
    assert f"`{dotted_name(path)}`" in section


EVERY_FILE = [
    path
    for folder in ("rollout", "replay", "cli", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


@pytest.mark.parametrize("path", EVERY_FILE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
