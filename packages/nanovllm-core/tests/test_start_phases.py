import re

import pytest

from nanovllm_core.start_phases import log_phase


@pytest.fixture(autouse=True)
def _log_level(caplog):
    caplog.set_level("INFO")


def test_a_phase_logs_its_name_and_seconds(caplog):
    with log_phase("weights"):
        pass
    (record,) = caplog.records
    assert re.fullmatch(r"start-up phase weights took \d+\.\d\d s", record.getMessage())


def test_a_phase_that_fails_logs_nothing(caplog):
    with pytest.raises(ValueError, match="broken"), log_phase("weights"):
        raise ValueError("broken")
    assert caplog.records == []


def test_on_a_terminal_progress_bars_replace_the_log(caplog, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with log_phase("weights"):
        pass
    assert caplog.records == []
