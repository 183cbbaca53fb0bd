import json
from types import SimpleNamespace

import pytest

from nanovllm_models.chat_formats import HERMES, LLAMA, REASONING_FORMATS, THINK, TOOL_CALL_FORMATS, ChatFormat
from nanovllm_server import cli
from nanovllm_server.processes.worker import select_chat_format


def test_parser_flags_list_every_format():
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
def test_parser_flags_override_the_model(tmp_path, arguments, expected):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    settings = cli.make_settings(cli.make_parser().parse_args([str(tmp_path), *arguments]))
    worker_arguments = SimpleNamespace(model=tmp_path, settings=settings)
    assert select_chat_format(worker_arguments, "{{ messages }}") == expected


def test_unknown_parser_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        cli.make_parser().parse_args(["--tool-call-parser", "any"])
    assert "hermes" in capsys.readouterr().err
