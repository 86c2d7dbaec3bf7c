"""The house: imports go one way only, and docs/house.md draws them as they are."""

from __future__ import annotations

import ast
import re

import pytest
from conftest import ROOT

# From the ground up: a module imports only from layers below its own, or from its own layer without a cycle.
LAYERS = [
    ["racer.game"],
    ["racer.view"],
    ["racer_env", "callbacks_lite"],
    ["racer.training"],
    ["ppo_racer", "sac_racer"],
    ["racer.peers"],
    ["bench_racer", "racer.compare"],
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


def test_the_map_in_the_docs_names_every_module_and_its_imports():
    text = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    drawn = {m: set(filter(None, i.split())) for m, i in re.findall(r"^    (\S+) <- ?(.*)$", text, re.M)}

    def short(name):
        return name.removeprefix("racer.")

    assert drawn == {short(m): {short(i) for i in imports_of(m)} for m in MODULES}
