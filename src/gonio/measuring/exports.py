"""Results as JSON-able data."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from gonio.escaping import plain


def json_data(value: Any) -> Any:
    """Records as objects, plain text without control characters, None for a number that is not finite.

    Example:
        >>> from gonio.measuring.exports import json_data
        >>> json_data({"norms": (1.0, float("inf")), "name": "a"})
        {'norms': [1.0, None], 'name': 'a'}
    """
    if is_dataclass(value):
        return {field.name: json_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): json_data(item) for key, item in value.items()}
    return [json_data(item) for item in value] if isinstance(value, (list, tuple)) else value
