"""The house: imports go one way only, and the trainers are whole."""

from __future__ import annotations

import ast

import pytest
from conftest import ROOT

# From the ground up: a module imports only from layers below its own, or from its own layer without a cycle.
LAYERS = [
    ["racer.game"],
    ["racer.view"],
    ["racer_env", "callbacks_lite"],
    ["racer.training"],
    ["ppo_racer", "sac_racer"],
    ["racer.evaluate", "racer.export", "racer.compare", "racer.sb3", "racer.statistics"],
    ["racer.experiment"],
    ["bench_racer"],
]
FILES = [path for path in [*ROOT.glob("*.py"), *ROOT.glob("racer/**/*.py")] if path.name != "__init__.py"]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}


def imports_of(module: str) -> set[str]:
    """The modules of ours that a module imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(MODULES)


def layer_of(module: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if any(module == n or module.startswith(f"{n}.") for n in names))


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    assert all(layer_of(other) <= layer_of(module) for other in imports_of(module))


def test_there_is_no_cycle():
    order, graph = [], {module: imports_of(module) for module in MODULES}
    while len(order) < len(graph):
        free = [m for m in graph if m not in order and graph[m] <= set(order)]
        assert free, f"a cycle among {sorted(set(graph) - set(order))}"
        order += free


@pytest.mark.parametrize("name", ["class RewardScaler", "def normalize", "def drive"])
def test_what_stands_in_both_trainers_is_the_same(name):
    """Whole files that share nothing: what is not the algorithm has to stay equal."""
    found = []
    for trainer in ("ppo_racer", "sac_racer"):
        text = MODULES[trainer].read_text(encoding="utf-8")
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
        found += [ast.get_source_segment(text, n) for n in nodes if f"{name.split()[0]} {n.name}" == name]
    assert len(found) == 2 and found[0] == found[1]


@pytest.mark.parametrize("trainer", ["ppo_racer", "sac_racer"])
def test_a_trainer_imports_few_names_from_few_modules_of_ours(trainer):
    body = ast.parse(MODULES[trainer].read_text(encoding="utf-8")).body
    ours = [node for node in body if isinstance(node, ast.ImportFrom) and node.module in MODULES]
    assert len(ours) <= 4 and sum(len(node.names) for node in ours) <= 20
