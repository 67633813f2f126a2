"""Finds which keys of the schema the package reads, by following the types of expressions through its source."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from jaxrl_ppo.schema import config as schema
from jaxrl_ppo.schema.coerce import fields_of

SECTIONS = {name: getattr(schema, name) for name in schema.__all__}
# The algorithms read their settings through protocols of their own.
SECTIONS |= {
    "PolicyLossSettings": schema.ActorConfig,
    "PolicyLossOptions": schema.PolicyLossConfig,
    "AdvantageSettings": schema.AlgorithmConfig,
    "KlControlSettings": schema.KlCtrlConfig,
    "CorrectionSettings": schema.RolloutCorrectionConfig,
}


class Reads(ast.NodeVisitor):
    """Visits one module; `found` gets (section class, key) for each key that it reads.

    A name has the type of its annotation or of what was assigned to it, anywhere in the module's function or, for
    `self.x`, in its class. `getattr(section, …)` with a name that is computed reads every key of the section.
    """

    def __init__(self) -> None:
        self.found: set[tuple[type, str]] = set()
        self.names: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.attributes = self.attributes, {}
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                self.attributes[item.target.id] = self.annotated(item.annotation)
        for _ in range(2):  # attributes may be set below the methods that read them
            self.generic_visit(node)
        self.attributes = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self.names = self.names, dict(self.names)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.names[argument.arg] = self.annotated(argument.annotation)
        self.generic_visit(node)
        self.names = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.assign(target, node.value)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, of in zip(target.elts, value.elts, strict=False):
                self.assign(part, of)
        elif isinstance(target, ast.Name):
            self.names[target.id] = self.type_of(value)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            self.attributes[target.attr] = self.type_of(value)

    def visit_For(self, node: ast.For) -> None:
        if isinstance(node.iter, ast.Tuple) and isinstance(node.target, ast.Name):
            for item in node.iter.elts:  # each of several sections in turn
                self.assign(node.target, item)
                self.generic_visit(node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        section = self.type_of(node.value)
        if section is not None and isinstance(node.ctx, ast.Load) and node.attr in fields_of(section):
            self.found.add((section, node.attr))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            section = self.type_of(node.args[0])
            if section is not None:
                name = node.args[1]
                keys = [name.value] if isinstance(name, ast.Constant) else list(fields_of(section))
                self.found |= {(section, str(key)) for key in keys}

    def annotated(self, annotation: ast.expr | None) -> Any:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):  # Section | None
            return self.annotated(annotation.left) or self.annotated(annotation.right)
        name = annotation.attr if isinstance(annotation, ast.Attribute) else getattr(annotation, "id", None)
        return SECTIONS.get(str(name))

    def type_of(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return self.attributes.get(node.attr)
            section = self.type_of(node.value)
            if section is not None and node.attr in fields_of(section):
                hint, info = fields_of(section)[node.attr]
                return hint if info is None else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            section = self.type_of(node.args[0])
            if section is not None and isinstance(node.args[1], ast.Constant):
                hint, info = fields_of(section)[str(node.args[1].value)]
                return hint if info is None else None
        return None


def keys_read(root: Path) -> set[tuple[type, str]]:
    """(section class, key) for every key that a module below `root`, outside the schema, reads."""
    found: set[tuple[type, str]] = set()
    for file in sorted(root.rglob("*.py")):
        if "schema" not in file.parts:
            reads = Reads()
            reads.visit(ast.parse(file.read_text()))
            found |= reads.found
    return found
