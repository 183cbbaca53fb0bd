"""Declares the sizes of workloads, each with its flag. Imports nothing slow, because --help needs this module."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkloadSizes(ABC):
    """Base class of the workload sizes of one command. Subclasses declare each field with `size_field`."""

    @abstractmethod
    def describe(self, case: str) -> str:
        """Returns a description of a case in one line."""


def size_field(group: str, parse: Callable[[str], Any], default: Any, help_text: str, **options: Any) -> Any:
    """Declares a field of `WorkloadSizes` and its flag.

    group: heading above the flag in --help. It names the cases that use the size.
    options: further arguments of `add_argument`.
    """
    return field(
        metadata={"group": group, "options": {"type": parse, "default": default, "help": help_text, **options}}
    )
