"""Makes engines propose as many drafts as they may: all measured times of steps are 0.

Python imports this module at its start. `compare_drafts.py --always` adds this directory to PYTHONPATH.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder

PATCHED_MODULE = "nanovllm_core.scheduling.draft_times"


class _Patcher(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != PATCHED_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            module.measure_draft_times = lambda *_: module.DraftTimes()

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, _Patcher())
