"""What is passed to the chat template besides the conversation: part of a store's identity."""

from __future__ import annotations

import json
from typing import Any

from dflash_pipeline.configs.schema import TargetConfig


def template_arguments(config: TargetConfig) -> dict[str, Any]:
    """Keyword arguments of the chat template; a value that is JSON is passed as such."""
    arguments: dict[str, Any] = {}
    for argument in config.template_args:
        name, _, text = argument.partition("=")
        try:
            arguments[name] = json.loads(text)
        except ValueError:
            arguments[name] = text
    if config.thinking != "default":
        arguments["enable_thinking"] = config.thinking == "on"
    return arguments


def template_arguments_text(config: TargetConfig) -> str:
    """Canonical JSON of all that is passed to the template: part of a store's identity."""
    values = {"arguments": template_arguments(config), "system_prompt": config.system_prompt}
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
