"""What the installed `transformers` knows about a model_type. It is read from source, because an import takes seconds.

If something is not found in its usual place, the answer is the permissive one, because another version may have moved
it. The engine imports transformers, and decides.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_SURELY_KNOWN = "llama"  # if even this is not found, the source has another structure
_PAIR = re.compile(r'"([^"\n]+)"[,:]\s*"(\w+)"')
_PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A configuration class: its fields and the defaults that its source shows."""

    fields: frozenset[str]
    defaults: Mapping[str, Any]
    """Defaults of the fields whose default is a literal."""
    types: Mapping[str, frozenset[type]]
    """Types of the fields for which transformers refuses values of other types."""
    aliases: Mapping[str, str]
    """Other names of fields (`attribute_map`)."""
    complete: bool
    """Whether it inherits no fields from another model's class."""


def version() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def is_known(model_type: str) -> bool:
    """False if no configuration class has this model_type; True also if that is unknown."""
    names = _auto("auto_mappings.py") + _auto("configuration_auto.py")
    return f'"{_SURELY_KNOWN}"' not in names or f'"{model_type}"' in names


def has_causal_lm(model_type: str) -> bool:
    """False if no causal language model takes its configuration; True also if that is unknown."""
    causal = _causal_lm_classes()
    if _SURELY_KNOWN not in causal:
        return True
    config = _config_class(model_type)
    return model_type in causal or config is None or any(_config_class(other) == config for other in causal)


def uses_attention_interface(model_type: str) -> bool:
    """False if its code never looks up an attention function by name; True also if that is unknown."""
    model_class = _causal_lm_classes().get(model_type)
    source = _model_source(model_type, "modeling")
    return model_class is None or f"class {model_class}(" not in source or "ALL_ATTENTION_FUNCTIONS" in source


def has_tensor_plan(model_type: str) -> bool:
    """False if it has no plan for ranks that share its layers; True also if that is unknown."""
    source = config_source(model_type)
    return source is None or not source.complete or "base_model_tp_plan" in _model_source(model_type, "configuration")


@lru_cache(maxsize=8)
def config_source(model_type: str) -> ConfigSource | None:
    """The class that reads its config.json; None if its source has an unknown structure."""
    name = _config_class(model_type)
    try:
        tree = ast.parse(_model_source(model_type, "configuration"))
    except (SyntaxError, ValueError):
        return None
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None:
        return None
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    literals = {_target(node): _literal(node.value) for node in fields}
    types = {_target(node): ast.unparse(node.annotation).split(" | ") for node in fields}
    strict = any(isinstance(decorator, ast.Name) and decorator.id == "strict" for decorator in found.decorator_list)
    aliases = next(
        (_literal(node.value) for node in found.body if isinstance(node, ast.Assign) and _is_alias_map(node)), ({},)
    )
    return ConfigSource(
        fields=frozenset(types),
        defaults={key: literal[0] for key, literal in literals.items() if literal},
        types={
            key: frozenset(_PLAIN[name] for name in names)
            for key, names in types.items()
            if strict and all(name in _PLAIN for name in names)
        },
        aliases=aliases[0] if aliases else {},
        complete=[ast.unparse(base).lower() for base in found.bases] == ["pretrainedconfig"],
    )


def _target(node: ast.AnnAssign) -> str:
    assert isinstance(node.target, ast.Name)
    return node.target.id


def _is_alias_map(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "attribute_map" for target in node.targets)


def _literal(node: ast.expr | None) -> tuple[Any, ...]:
    """The value in a tuple; an empty tuple if the value is computed."""
    if node is None:
        return ()
    try:
        return (ast.literal_eval(node),)
    except ValueError:
        return ()


@lru_cache(maxsize=1)
def _causal_lm_classes() -> dict[str, str]:
    return dict(_PAIR.findall(_block(_auto("modeling_auto.py"), "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")))


@lru_cache(maxsize=1)
def _config_classes() -> dict[str, str]:
    pairs = _PAIR.findall(_auto("configuration_auto.py") + _auto("auto_mappings.py"))
    return {model_type: name for model_type, name in pairs if name.endswith("Config")}


def _config_class(model_type: str) -> str | None:
    return _config_classes().get(model_type)


def _model_source(model_type: str, kind: str) -> str:
    special = dict(_PAIR.findall(_block(_auto("auto_mappings.py"), "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")))
    module = special.get(model_type, model_type.replace("-", "_"))
    return _read(f"models/{module}/{kind}_{module}.py") if module.isidentifier() else ""


def _block(source: str, name: str) -> str:
    """The source text of a module-level mapping."""
    found = re.search(rf"^{name}\b[^\n]*\n(.*?)^\S", source, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def _auto(name: str) -> str:
    return _read(f"models/auto/{name}")


@lru_cache(maxsize=16)
def _read(name: str) -> str:
    """The text of a file of the package; "" if it is missing."""
    package = importlib.util.find_spec("transformers")  # this does not import it
    for folder in (package.submodule_search_locations or ()) if package else ():
        try:
            return (Path(folder) / name).read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
    return ""
