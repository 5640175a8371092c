"""Who may import whom, how long a flow may be, and what no file of the project may say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FLOW = 60
TREES = ("signal_batch", "tasks", "flows", "tests", "deployments", "benchmarks")
FILES = ("README.md", "CHANGELOG.md", "Makefile", "requirements.lock", "pyproject.toml")
BUILT = {"__pycache__", "results", "build", "dist", ".venv"}

# Written with gaps, so that this file does not say it either.
REGISTRIES = (
    r"py_pi\.(?:org|io|python\.org)",
    r"python_hosted\.org",
    r"ana_conda\.(?:org|com|cloud)",
    r"npm_js\.(?:org|com)",
    r"(?:arti_factory|nex_us|dev_pi)[.:/-]",
    r"--(?:extra-)?index_-url",
)
MACHINE_PATHS = tuple(rf"(?<![\w.~}})*-])/{name}/" for name in ("ro_ot", "wo_rk", "ho_me"))
FORBIDDEN = re.compile("|".join((*REGISTRIES, *MACHINE_PATHS)).replace("_", ""), re.IGNORECASE)


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def project_files() -> Iterator[Path]:
    for folder in TREES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and not BUILT.intersection(path.relative_to(ROOT).parts):
                yield path
    yield from (ROOT / name for name in FILES)


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, at any depth, by statement or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__", "find_spec")
        ):
            yield from (item.value for item in node.args if isinstance(item, ast.Constant))


def flow_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sources("flows"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [ast.unparse(item).partition("(")[0] for item in node.decorator_list]
                if any(name in ("flow", "prefect.flow") for name in names):
                    yield f"{path.name}:{node.name}", node


def test_the_layers_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([str(program), "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"Contracts: [2-9] kept, 0 broken", result.stdout), result.stdout


@pytest.mark.parametrize("path", sources("signal_batch"), ids=lambda path: path.stem)
def test_the_core_never_imports_prefect_nor_what_is_above_it(path: Path) -> None:
    packages = {name.partition(".")[0] for name in imported(ast.parse(path.read_text()))}
    assert packages.isdisjoint({"prefect", "tasks", "flows", "deployments", "tests"})


def test_tasks_never_import_flows() -> None:
    for path in sources("tasks"):
        packages = {name.partition(".")[0] for name in imported(ast.parse(path.read_text()))}
        assert "flows" not in packages, path


def test_every_flow_can_be_taken_in_at_a_look() -> None:
    lengths = {
        name: (node.end_lineno or 0) - node.body[0].lineno + 1 for name, node in flow_functions()
    }
    assert {name.partition(":")[2] for name in lengths} >= {"export_features", "validate_dataset"}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FLOW} == {}


def test_every_flow_says_what_it_does() -> None:
    assert [name for name, node in flow_functions() if not ast.get_docstring(node)] == []


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    found = []
    for path in project_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode().splitlines(), 1):
            if FORBIDDEN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "https://py_pi.org/simple",
        "https://files.python_hosted.org/x",
        "--index_-url x",
        "root=/wo_rk/main",
        '"/ro_ot/data"',
    ],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert FORBIDDEN.search(line.replace("_", ""))


@pytest.mark.parametrize(
    "line", ["s3://bucket/work/x", "tmp_path / 'root'", "out/home/x", "pip install x", "/data/root"]
)
def test_the_search_leaves_other_lines_alone(line: str) -> None:
    assert not FORBIDDEN.search(line)
