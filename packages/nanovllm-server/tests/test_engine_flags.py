from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm_core import EngineConfig
from nanovllm_server import cli
from nanovllm_server.settings import SettingsError


def parse(*arguments: str) -> EngineConfig:
    return cli.make_settings(cli.make_parser().parse_args(arguments)).engine_config


def test_without_flags_every_setting_has_its_default():
    assert parse() == EngineConfig()


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ("--device cpu --dtype bfloat16 --seed -3", {"device": "cpu", "dtype": "bfloat16", "seed": -3}),
        ("--device auto --dtype auto --attention-backend auto --graph-mode auto", {}),
        ("--kv-cache-dtype auto", {"kv_cache_dtype": "auto"}),
        ("--kv-cache-dtype fp8 --state-dtype bfloat16", {"kv_cache_dtype": "fp8", "state_dtype": "bfloat16"}),
        ("--max-model-len 100 --max-num-seqs 2", {"max_model_len": 100, "max_num_seqs": 2}),
        ("--target-step-ms 12.5 --cpu-cache-gib 0.5", {"target_step_ms": 12.5, "cpu_cache_gib": 0.5}),
        ("--block-size 64 --depth 1", {"block_size": 64, "depth": 1}),
        ("--no-prefix-caching --no-compile", {"prefix_caching": False, "compile": False}),
        ("--tensor-parallel-size 2 --expert-parallel", {"tensor_parallel_size": 2, "expert_parallel": True}),
        ("-tp 2 --dp-attention", {"tensor_parallel_size": 2, "dp_attention": True}),
        ("-tp 4", {"tensor_parallel_size": 4}),
        ("--multi-tenant", {"prefix_hash": "sha256"}),
        ("--speculate ngram", {"speculate": "ngram"}),
        ("--speculate none --num-speculative-tokens 15", {"num_speculative_tokens": 15}),
        ("--trace steps.json", {"trace": Path("steps.json")}),
    ],
)
def test_flags_set_fields_of_the_engine_config(arguments, settings):
    assert parse(*arguments.split()) == replace(EngineConfig(), **settings)


@pytest.mark.parametrize(
    "arguments",
    [
        "--max-num-seqs 0",
        "--max-model-len -1",
        "--block-size 48",
        "--depth 3",
        "--dtype int8",
        "--seed x",
        "--speculate auto",
        "--num-speculative-tokens 0",
        "--num-speculative-tokens 16",
    ],
)
def test_an_invalid_value_is_refused_by_the_parser(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments.split())
    assert arguments.split()[0] in capsys.readouterr().err


def test_draft_model_can_be_a_repository_name():
    options = cli.make_parser().parse_args(["--speculate", "draft", "--draft-model", "organisation/name"])
    settings = cli.make_settings(options)
    assert (settings.draft_model, settings.engine_config.speculate) == ("organisation/name", "draft")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--speculate draft", "add --draft-model"),
        ("--draft-model x", "--draft-model x is used only with --speculate draft"),
        ("--speculate ngram --draft-model x", "--draft-model x is used only with --speculate draft"),
    ],
)
def test_draft_model_and_method_draft_need_each_other(arguments, reason):
    with pytest.raises(SettingsError, match=reason):
        parse(*arguments.split())
