"""The table of host sites that compare the name DFLASH is complete and current."""

from __future__ import annotations

import ast
from pathlib import Path

import sglang.srt

from sglang_dflow.config import DFLOW_ARCHITECTURES
from sglang_dflow.host_sites import HOST_SITES

ROOT = Path(sglang.srt.__path__[0])
NAMES = {"DFLASH", *DFLOW_ARCHITECTURES}


def _named_sites() -> set[str]:
    """Find functions whose code holds "DFLASH", SpeculativeAlgorithm.DFLASH, or an architecture that we rename.

    Message strings do not count: only the bare name can be compared. The enum's own definition is not a site.
    """
    found: set[str] = set()
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in NAMES):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)

        def visit(node: ast.AST, scope: tuple[str, ...], module: str = module) -> None:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                scope = (*scope, node.name)
            named = (isinstance(node, ast.Constant) and node.value in NAMES) or (
                isinstance(node, ast.Attribute)
                and node.attr == "DFLASH"
                and isinstance(node.value, ast.Name)
                and node.value.id == "SpeculativeAlgorithm"
            )
            if named:
                found.add(f"{module}:{'.'.join(scope) or '<module>'}")
            for child in ast.iter_child_nodes(node):
                visit(child, scope)

        visit(ast.parse(text), ())
    return found


def test_every_site_is_accounted_for() -> None:
    """Catches a host release that asks for DFLASH by name in a new place, and entries that no longer exist."""
    listed = {site.where for site in HOST_SITES}
    assert len(listed) == len(HOST_SITES)
    found = _named_sites()
    assert found - listed == set(), "host sites without a verdict"
    assert listed - found == set(), "verdicts without a host site"
