"""What JSON can say, as a type. This room must not know what any of it means."""

from typing import TypeAlias

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"
