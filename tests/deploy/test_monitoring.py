"""The server has all metrics of the dashboard and the alerts. Prometheus evaluates their expressions."""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from unittest.mock import Mock

import promql_parser
import pytest
import yaml
from programs import require_programs
from proxies import DEPLOY, chat, free_port, post_chat, start_proxy

from nanovllm_core import EngineStats
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.observability.shared_counters import SharedCounters, allocate_counters

DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
ALERTS_FILE = DEPLOY / "prometheus-alerts.yaml"
ALERTS = yaml.safe_load(ALERTS_FILE.read_text())["groups"][0]["rules"]
CASES = DEPLOY.parents[1] / "tests" / "deploy" / "support" / "alert_cases.yaml"
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m"}
MAX_SCRAPE_WAIT_S = 120


def substitute(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


EXPRESSIONS = [substitute(target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
DRAFT_PREFIX = "nanovllm:spec_decode_"


def find_metric_names(text: str) -> set[str]:
    return set(re.findall(r"nanovllm:\w+|process_\w+", text))


def sample_names(text: str) -> set[str]:
    return {re.split(r"[ {]", line)[0] for line in text.splitlines()}


def draft_sample_names() -> set[str]:
    stats = EngineStats(verified_drafts_by_position=(1,), accepted_drafts_by_position=(1,))
    metrics = Metrics("any", Mock(draft_method="ngram"), lambda: stats, SharedCounters(allocate_counters(1)))
    return {name for name in sample_names(metrics.render().decode()) if name.startswith(DRAFT_PREFIX)}


def test_server_has_every_metric_of_dashboard_and_alerts(server):
    with post_chat(server.url, chat()) as response:
        assert response.status == 200
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        metrics = sample_names(response.read().decode()) | draft_sample_names()
    names = find_metric_names(" ".join([*EXPRESSIONS, *(alert["expr"] for alert in ALERTS)]))
    assert len(names) > 20
    assert names - metrics == set()


def test_variables_of_the_dashboard_are_defined():
    defined = {f"${{{variable['name']}}}" for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{\w+\}", json.dumps(DASHBOARD)))
    assert used == {"${datasource}"} <= defined
    assert {f"${variable['name']}" for variable in DASHBOARD["templating"]["list"][1:]} | {"$__rate_interval"} == {
        *VARIABLES
    }


def test_panels_have_unique_ids_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + column, panel["gridPos"]["y"] + row)
        for panel in panels
        for column in range(panel["gridPos"]["w"])
        for row in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(column for column, _ in cells) < 24


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *(alert["expr"] for alert in ALERTS)])
def test_expression_is_valid(expression):
    promql_parser.parse(expression)


def test_check_of_expressions_finds_an_error():
    with pytest.raises(ValueError, match="rate"):
        promql_parser.parse("rate(nanovllm:prompt_tokens_total)")


def test_each_alert_has_a_case_in_which_it_fires():
    cases = yaml.safe_load(CASES.read_text())["tests"]
    samples = cases[1]["promql_expr_test"][0]["exp_samples"]
    assert [sample["labels"] for sample in samples] == [f'{{alertname="{alert["alert"]}"}}' for alert in ALERTS]


@pytest.fixture(scope="module")
def prometheus_program() -> str:
    require_programs("prometheus", "prometheus", "promtool")
    return "prometheus"


def test_each_alert_fires_for_its_fault_only(prometheus_program, tmp_path):
    (tmp_path / "cases.yaml").write_text(CASES.read_text().replace("[ALERTS]", json.dumps([str(ALERTS_FILE)])))
    check = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "cases.yaml"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.fixture(scope="module")
def prometheus(prometheus_program, server, tmp_path_factory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "400ms", "evaluation_interval": "500ms"},
        "rule_files": [str(ALERTS_FILE)],
        "scrape_configs": [
            {"job_name": "nanovllm", "static_configs": [{"targets": [server.url.removeprefix("http://")]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [prometheus_program, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with start_proxy([*command, f"--web.listen-address=127.0.0.1:{port}"], folder, port) as url:
        yield url


def query(url: str, path: str, **parameters: str) -> dict:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as response:
        return json.load(response)["data"]


def test_prometheus_has_data_for_every_panel_but_those_of_drafts(prometheus, server):
    deadline = time.monotonic() + MAX_SCRAPE_WAIT_S
    missing = [expression for expression in EXPRESSIONS if DRAFT_PREFIX not in expression]
    while missing:
        assert time.monotonic() < deadline, missing
        # Rates need requests between two scrapes.
        for _ in range(2):
            with post_chat(server.url, chat()) as response:
                assert response.status == 200
        time.sleep(0.5)
        missing = [
            expression
            for expression in missing
            if not any(sample["value"][1] != "NaN" for sample in query(prometheus, "query", query=expression)["result"])
        ]


def test_prometheus_evaluates_the_alerts_of_a_healthy_server(prometheus):
    deadline = time.monotonic() + MAX_SCRAPE_WAIT_S
    while True:
        (group,) = query(prometheus, "rules")["groups"]
        if all(rule["health"] == "ok" for rule in group["rules"]):
            break
        assert time.monotonic() < deadline, group
        time.sleep(0.2)
    assert [rule["name"] for rule in group["rules"]] == [alert["alert"] for alert in ALERTS]
    # Alerts may be pending, because other tests provoke refused requests.
    assert [alert for alert in query(prometheus, "alerts")["alerts"] if alert["state"] == "firing"] == []
    # Prometheus allows a scrape only 0.4 s, so that single scrapes of a healthy server may fail.
    while True:
        (target,) = query(prometheus, "targets")["activeTargets"]
        if (target["health"], target["lastError"]) == ("up", ""):
            break
        assert time.monotonic() < deadline, target
        time.sleep(0.2)
