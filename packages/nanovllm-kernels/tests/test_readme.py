import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_readme_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    try:
        exec(compile(example, str(README), "exec"), {})
    finally:
        # The example sets a default device, which makes every later torch call slower. Remove the default device.
        torch.set_default_device(None)
