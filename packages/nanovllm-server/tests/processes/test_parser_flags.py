"""Which format a server reads: the model's own, or what it is told."""

import json
from types import SimpleNamespace

import pytest

from nanovllm_models.chat_formats import HERMES, LLAMA, REASONING_FORMATS, THINK, TOOL_CALL_FORMATS, ChatFormat
from nanovllm_server import cli
from nanovllm_server.processes.worker import select_chat_format


def test_the_flags_name_every_format():
    assert ("auto", "none", *REASONING_FORMATS) == cli.REASONING_PARSERS
    assert ("auto", "none", *TOOL_CALL_FORMATS) == cli.TOOL_CALL_PARSERS


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ChatFormat(None, HERMES)),
        (["--reasoning-parser", "auto", "--tool-call-parser", "auto"], ChatFormat(None, HERMES)),
        (["--reasoning-parser", "think"], ChatFormat(THINK, HERMES)),
        (["--tool-call-parser", "llama"], ChatFormat(None, LLAMA)),
        (["--tool-call-parser", "none"], ChatFormat(None, None)),
    ],
)
def test_flags_go_before_the_model(tmp_path, arguments, expected):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    settings = cli.settings(cli.parser().parse_args([str(tmp_path), *arguments]))
    worker_arguments = SimpleNamespace(model=tmp_path, settings=settings)
    assert select_chat_format(worker_arguments, "{{ messages }}") == expected


def test_other_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["--tool-call-parser", "any"])
    assert "hermes" in capsys.readouterr().err
