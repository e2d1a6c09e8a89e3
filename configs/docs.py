"""What the schema says of itself: each field's text, type and default, for help and tests."""

from __future__ import annotations

import ast
import functools
import typing
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from typing import Any

from dflash_pipeline.configs.schema import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldDoc:
    """One `section.name` of the schema."""

    key: str
    kind: Any
    default: Any
    text: str
    """The literal under the field, on one line; "" where there is none."""


@functools.cache
def field_docs() -> dict[str, FieldDoc]:
    """`section.name` -> what the schema says of it, in the schema's order."""
    texts = _texts()
    found: dict[str, FieldDoc] = {}
    for section, kind in typing.get_type_hints(Run).items():
        hints = typing.get_type_hints(kind)
        for one in fields(kind):
            key = f"{section}.{one.name}"
            assert one.default is not MISSING, f"{key} has no default"
            found[key] = FieldDoc(
                key=key,
                kind=hints[one.name],
                default=one.default,
                text=texts.get(f"{kind.__name__}.{one.name}", ""),
            )
    return found


def _texts() -> dict[str, str]:
    """`ClassName.field` -> the string literal that follows the field in the schema's source."""
    source = (resources.files("dflash_pipeline.configs") / "schema.py").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for line, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                found[f"{node.name}.{line.target.id}"] = " ".join(after.value.value.split())
    return found
