import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest


def test_every_import_contract_holds():
    lint_imports = Path(sys.executable).with_name("lint-imports")
    process = subprocess.run([lint_imports], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    assert "0 broken" in process.stdout


@pytest.mark.parametrize("package", ["nanovllm_kernels", "nanovllm_core", "nanovllm_models", "nanovllm_server"])
def test_no_modules_import_each_other_in_a_cycle(package):
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()
