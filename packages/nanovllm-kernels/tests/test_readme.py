"""The README's example runs as printed."""

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_example():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    try:
        exec(compile(example, str(README), "exec"), {})
    finally:
        # None rather than what it was: any device, the usual one too, takes every call of torch from here on through
        # Python.
        torch.set_default_device(None)
