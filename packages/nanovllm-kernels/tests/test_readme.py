"""The README's example runs as printed."""

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_example():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    before = torch.get_default_device()
    try:
        exec(compile(example, str(README), "exec"), {})
    finally:
        torch.set_default_device(before)
