"""Collections of schemas: the official test suite, functions of a tool call benchmark, and installed packages."""

import gzip
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
PACKAGES = ("check-jsonschema", "validate-pyproject-schema-store", "jsonschema-specifications")
# For each schema, at most MAX_PARTS definitions in `definitions` and MAX_PARTS in `$defs` become cases.
MAX_PARTS = 6


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    schema: Any
    valid: list[Any] = field(default_factory=list)
    invalid: list[Any] = field(default_factory=list)


def load_suite() -> list[Case]:
    """Returns the official suite of draft 2020-12."""
    return [Case(**case) for case in _load("json_schema_test_suite.json.gz")]


def load_tool_parameters() -> list[Case]:
    """Returns schemas of function parameters that people wrote for models."""
    return [Case(**case) for case in _load("bfcl.json.gz")]


def load_package_schemas() -> list[Case]:
    return [*_read_files(), *_read_models("openai.types.chat"), *_read_models("openai.types.fine_tuning")]


def _load(name: str) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def _read_files() -> Iterator[Case]:
    for package in PACKAGES:
        for path in sorted(importlib.metadata.files(package) or (), key=str):
            if path.suffix != ".json":
                continue
            schema = json.loads(Path(path.locate()).read_text(encoding="utf-8"))
            if not isinstance(schema, dict) or not ({"$schema", "properties", "definitions", "$defs"} & schema.keys()):
                continue
            yield Case(f"{package}: {path.name}", schema)
            for keyword in ("definitions", "$defs"):
                parts = schema.get(keyword)
                for name in (
                    list(parts)[:: max(1, len(parts) // MAX_PARTS)][:MAX_PARTS] if isinstance(parts, dict) else ()
                ):
                    kept = {key: value for key, value in schema.items() if key in (keyword, "$schema", "$id")}
                    pointer = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
                    yield Case(f"{package}: {path.name} {name}", {**kept, "$ref": f"#/{keyword}/{pointer}"})


def _read_models(package: str) -> Iterator[Case]:
    from pydantic import BaseModel
    from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError

    seen: set[type] = set()
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        for name, model in sorted(inspect.getmembers(importlib.import_module(module.name), inspect.isclass)):
            if not issubclass(model, BaseModel) or model in seen or not model.__module__.startswith(package):
                continue
            seen.add(model)
            try:
                yield Case(f"{module.name}: {name}", model.model_json_schema())
            except (PydanticInvalidForJsonSchema, PydanticUserError):
                continue  # pydantic can't describe a field of this model.


CORPUS_LOADERS = {"suite": load_suite, "tools": load_tool_parameters, "real": load_package_schemas}
