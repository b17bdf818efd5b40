"""Options of vLLM 0.33.0, SGLang and transformers on our commands: meant, without effect, or refused."""

from __future__ import annotations

import argparse
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from model.errors import ModelError
from model.llm.engine_args import EngineArgs
from model.llm.vllm_options import EQUIVALENT, VllmOption, list_options, translate_arguments
from nkw.commands import build_parser, load, main
from nkw.verbs import MODEL_VERBS

NAMES = dict(
    line.split()
    for line in (Path(__file__).parent / "vllm_options.txt").read_text(encoding="utf-8").splitlines()
)
"""Every name of an option of `vllm serve` 0.33.0, and whether it is a switch or takes a value."""
SECRET = "sk-0123456789abcdef"
FIELDS = EngineArgs.__dataclass_fields__


def first_named(flag: str) -> VllmOption:
    """Return the option that `nkw serve` means by a name."""
    rows = {
        name
        for option in load(MODEL_VERBS["serve"].options)
        for name in option.name.partition("=")[0].split("|")
    }
    return next(
        option
        for option in list_options()
        if option.flag == flag
        and (
            option.equivalent is None
            or rows & {row.partition("=")[0] for row in option.equivalent.rows.split()}
        )
    )


@cache
def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of `nkw` for a command."""
    return build_parser([command])


def parse(*words: str) -> dict[str, Any]:
    """Return the options of a command."""
    return vars(parser_of(words[0]).parse_args(words))


def changed(*words: str) -> dict[str, Any]:
    """Return the options of a command that words change."""
    bare = parse(words[0])
    return {name: value for name, value in parse(*words).items() if name not in bare or bare[name] != value}


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line of a command line that is refused."""
    with pytest.raises(SystemExit) as left:
        parser_of(words[0]).parse_args(words)
    assert left.value.code == 2
    line, end = capsys.readouterr().err.split("\n")
    assert end == ""
    return line


def test_every_option_of_vllm_is_in_the_table() -> None:
    table = {option.flag for option in list_options()}
    assert len(NAMES) > 300
    assert sorted(set(NAMES) - table) == []


def test_switches_and_values_are_those_of_vllm() -> None:
    table = {option.flag: option.is_switch for option in list_options()}
    assert [name for name, option_type in NAMES.items() if table[name] != (option_type == "switch")] == []


def test_a_name_is_once_in_the_tables_without_equivalent() -> None:
    flags = [option.flag for option in list_options() if option.equivalent is None]
    assert len(flags) == len(set(flags))
    meant = [option.flag for option in list_options() if option.equivalent is not None]
    assert len(meant) == len(set(meant))


def test_every_equivalent_is_a_row_and_a_field() -> None:
    rows = {option.name for verb in MODEL_VERBS.values() if verb.options for option in load(verb.options)}
    for equivalent in EQUIVALENT.values():
        assert set(equivalent.rows.split()) & rows
        assert not equivalent.argument or equivalent.argument in FIELDS


VALUES = {
    "--dtype": "bfloat16",
    "--torch-dtype": "bfloat16",
    "--kv-cache-dtype": "auto",
    "--tool-call-parser": "hermes",
    "--log-level": "warning",
    "--device": "simulate",
    "--allowed-origins": "[]",
    "--speculative-config": '{"num_speculative_tokens": 3}',
    "-sc": '{"num_speculative_tokens": 3}',
}


@pytest.mark.parametrize("flag", sorted(NAMES))
def test_an_option_of_vllm_is_taken_or_refused_by_serve(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    option = first_named(flag)
    words = [flag] if option.is_switch else [flag, VALUES.get(flag, "2")]
    if not option.is_refused:
        parse("serve", *words)
        err = capsys.readouterr().err
        assert err == ("" if not option.sentence else f"nkw serve: {flag} has no effect: {option.sentence}\n")
        return
    if option.is_switch and option.default:
        parse("serve", flag)
        words = [f"--no-{flag[2:]}"]
    assert refusal(capsys, "serve", *words) == f"nkw serve: error: {words[0]}: {option.sentence}"
    if option.is_switch and flag.startswith("--") and not option.default:
        assert changed("serve", f"--no-{flag[2:]}") == {}
    elif not option.is_switch and option.default:
        assert changed("serve", flag, str(option.default)) == {}


def test_a_sentence_is_one_sentence_that_is_shown_whole() -> None:
    for option in list_options():
        check_sentence(option)


def check_sentence(option: VllmOption) -> None:
    """Check that a sentence begins after a colon and has no full stop."""
    if not option.sentence:
        return
    assert len(option.sentence) < 300
    assert option.sentence[0].islower() or option.sentence.startswith(
        ("LoRA", "SIGTERM", "NEURON", "/", "--", "vLLM")
    )
    assert not option.sentence.endswith(".")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # vLLM's documentation
        ("serve stories --tensor-parallel-size 2 --max-model-len 128", {"tp": 2, "max_model_len": 128}),
        ("serve stories -tp 2 --gpu-memory-utilization 0.95 --enforce-eager", {"tp": 2}),
        ("serve stories --enable-prefix-caching --enable-chunked-prefill", {}),
        ("serve stories --no-enable-prefix-caching", {"prefix_caching": False}),
        ("serve stories --disable-prefix-caching --no-enable-chunked-prefill",
         {"prefix_caching": False, "chunked_prefill": False}),
        ("serve stories --enable-auto-tool-choice --tool-call-parser hermes", {"tool_call_parser": "hermes"}),
        ("serve stories --max_num_seqs=8 --max_num_batched_tokens 64",
         {"max_num_seqs": 8, "max_num_batched_tokens": 64}),
        ("serve stories --max-model-len 2k --trust-remote-code --disable-log-requests", {"max_model_len": 2000}),
        ("serve stories --max-num-batched-tokens 1K", {"max_num_batched_tokens": 1024}),
        ("serve --port 8001 --served-model-name tales --dtype bfloat16 stories",
         {"port": 8001, "served_model_name": "tales", "dtype": "bfloat16"}),
        ("serve stories --data-parallel-size 2 --api-server-count 1", {"replicas": 2}),
        ("serve stories --spec-method ngram --spec-tokens 3",
         {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}),
        ("serve stories --speculative-config.method ngram --speculative_config.num_speculative_tokens 4",
         {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'}),
        ("serve stories -O3 --max-num-queued-reqs 5 --seed 3", {"max_queue": 5, "seed": 3}),
        ("serve stories --load-format auto --pipeline-parallel-size 1 --no-enable-lora", {}),
        # AWS's vLLM-Neuron documentation
        ("serve stories --device neuron --tensor-parallel-size 2 --max-num-seqs 4 --max-model-len 128 --block-size 8 "
         "--num-gpu-blocks-override 64 --no-enable-prefix-caching --additional-config "
         "'{\"override_neuron_config\": {\"enable_bucketing\": true}}'",
         {"backend": "neuron", "tp": 2, "max_num_seqs": 4, "max_model_len": 128, "block_size": 8, "num_pages": 64,
          "prefix_caching": False}),
        ("serve --model=stories --max-num-seqs=4 --override-neuron-config '{}' --port=8080",
         {"max_num_seqs": 4, "port": 8080}),
        # SGLang's documentation
        ("serve --model-path stories --tp-size 2 --context-length 128 --mem-fraction-static 0.8 --host 127.0.0.1",
         {"tp": 2, "max_model_len": 128}),
        ("serve --model-path stories --dp-size 2 --disable-radix-cache --chunked-prefill-size 64 --random-seed 1",
         {"replicas": 2, "prefix_caching": False, "max_num_batched_tokens": 64, "seed": 1}),
        ("serve --model-path stories --max-running-requests 4 --disable-cuda-graph --attention-backend triton "
         "--enable-metrics --page-size 32", {"max_num_seqs": 4, "block_size": 32}),
        # transformers' names
        ("generate --max_new_tokens 8 --top_k 5 --temperature 0.5 --torch_dtype bfloat16",
         {"max_new_tokens": 8, "top_k": 5, "temperature": 0.5, "dtype": "bfloat16"}),
        ("generate --max-tokens 8 --num_return_sequences 2 --tensor-parallel-size 2 -pp 2 -dp 3",
         {"max_new_tokens": 8, "n": 2, "tp": 2, "pp": 2, "dp": 3}),
    ],
)  # fmt: skip
def test_command_lines_of_other_engines_work(line: str, expected: dict[str, Any]) -> None:
    assert changed(*shlex.split(line)) == expected


def test_the_model_is_a_word_anywhere_or_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path)
    for words in (
        [folder],
        ["--model", folder],
        ["--tp", "2", folder],
        [folder, "--tp", "2"],
        ["--tp", "2", folder, "--sp"],
    ):
        if words[-1] == "--sp":
            assert "there is no option --sp" in refusal(capsys, "serve", *words)
        else:
            assert parse("serve", *words)["model"] == tmp_path
    for words in (
        [folder, "--model", "stories-moe"],
        ["--model", "stories-moe", folder],
        [folder, "stories-moe"],
    ):
        assert "error: two models, " in refusal(capsys, "serve", *words)


def test_underscores_of_values_stay() -> None:
    assert changed("generate", "--system", "--a_b c_d")["system"] == "--a_b c_d"
    assert changed("generate", "--stop=a_b")["stop"] == ["a_b"]
    assert changed("serve", "--served_model_name=a_b.c_d")["served_model_name"] == "a_b.c_d"


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--api-key", SECRET],
        ["serve", "--api_key", SECRET],
        ["serve", f"--api-key={SECRET}"],
        ["serve", "stories", "--api-key", SECRET, "another-" + SECRET],
        ["serve", "--api-ke", SECRET],
        ["serve", f"--apikey={SECRET}"],
        ["serve", "stories", "--apikey", SECRET],
        ["serve", "-api-key", SECRET],
        ["serve", "--hf-token", SECRET],
        ["--api-key", SECRET, "serve"],
        ["generate", "--api-key", SECRET],
        ["top", "--api-key", SECRET],
    ],
)  # fmt: skip
def test_a_key_on_the_command_line_is_never_printed(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert SECRET not in refusal(capsys, *words)


def test_a_key_in_a_file_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert changed("serve", "--api-key-file", str(tmp_path)) == {"api_key_file": tmp_path}
    assert "write it to a file and give --api-key-file FILE" in refusal(capsys, "serve", "--api-key", SECRET)


def test_a_key_in_the_environment_is_refused_without_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("fastapi", reason="the server needs the extra serve")
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == (
        "nkw: error: VLLM_API_KEY is set, but keys are read from files only: write the key to a file and give "
        "--api-key-file FILE, or unset VLLM_API_KEY\n"
    )
    absent = tmp_path / "keys"
    assert main(["serve", "--api-key-file", str(absent)]) == 2
    assert f"{absent} cannot be read" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert main(["serve", "--port", "70000"]) == 2
    assert "ports end at 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "serve --temprature 1",
            "nkw serve: error: there is no option --temprature; --help lists the options",
        ),
        (
            "generate --temprature 1",
            "nkw generate: error: there is no option --temprature; did you mean --temperature?",
        ),
        (
            "generate --tempe 1",
            "nkw generate: error: there is no option --tempe; did you mean --temperature? Options are not abbreviated",
        ),
        (
            "plan CONFIG --backend x",
            "nkw plan: error: there is no option --backend; --help lists the options",
        ),
        (
            "serve --api-ke x",
            "nkw serve: error: there is no option --api-ke; did you mean --api-key-file? Options are not abbreviated",
        ),
        ("serve -t 2", "nkw serve: error: there is no option -t; did you mean -tp?"),
        ("generate story", "nkw generate: error: unexpected word story"),
        ("--verbose serve", "nkw: error: there is no option --verbose; --help lists the options"),
    ],
)
def test_an_unknown_option_gets_the_closest_one(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert refusal(capsys, *line.split()) == message


@pytest.mark.parametrize("name", [name for name in MODEL_VERBS if MODEL_VERBS[name].options])
def test_help_lists_our_names_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser([name]).parse_args([name, "--help"])
    out = capsys.readouterr().out
    assert "--tensor-parallel-size" not in out
    assert "--enable-lora" not in out


def test_groups_of_data_parallelism_divide_experts() -> None:
    from model.commands.serve.command import divide_experts

    for line, expected in (
        ("-dp 2 --enable-expert-parallel", (2, 1)),
        ("-dp 2", (1, 2)),
        ("--enable-expert-parallel", (1, 1)),
        ("--ep 2 --enable-expert-parallel", (2, 1)),
        ("-dp 2 --no-enable-expert-parallel", (1, 2)),
    ):
        options = build_parser(["serve"]).parse_args(["serve", *line.split()])
        divide_experts(options)
        assert (options.ep, options.replicas) == expected
        assert "expert_parallel" not in vars(options)


def test_every_keyword_of_vllm_is_known_to_llm() -> None:
    for option in list_options():
        if option.flag in NAMES and option.flag.startswith("--"):
            check_keyword(option)


def check_keyword(option: VllmOption) -> None:
    """Check that a default is taken in silence; another value is translated, without effect, or refused."""
    if option.equivalent is not None:
        if "." not in option.keyword and option.equivalent.argument:
            value: Any = True if option.is_switch else {"num_speculative_tokens": 2}
            assert set(translate_arguments({option.keyword: value}, FIELDS)) == {option.equivalent.argument}
        return
    default = option.default
    assert translate_arguments({option.keyword: default}, FIELDS) == {}
    value = not default if option.is_switch else "another"
    if option.keyword in FIELDS:
        return
    if option.is_refused:
        with pytest.raises(ModelError) as refused:
            translate_arguments({option.keyword: value}, FIELDS)
        assert str(refused.value) == f"LLM takes no {option.keyword}: {option.sentence}"
    elif option.sentence:
        with pytest.warns(UserWarning, match=f"^LLM: {option.keyword} has no effect: "):
            assert translate_arguments({option.keyword: value}, FIELDS) == {}
    else:
        assert translate_arguments({option.keyword: value}, FIELDS) == {}


def test_keywords_of_vllm_become_arguments_of_the_engine() -> None:
    for keywords, expected in (
        ({"num_gpu_blocks_override": 8, "seed": 2}, {"num_pages": 8, "seed": 2}),
        ({"spec_method": "ngram", "spec_tokens": 3},
         {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        ({"spec_tokens": None, "num_gpu_blocks_override": None}, {}),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, {"expert_parallel_size": 2}),
        ({"data_parallel_size": 1, "pipeline_parallel_size": 1}, {}),
        ({"disable_radix_cache": True}, {"enable_prefix_caching": False}),
        ({"cpu_offload_gb": 0.0, "offload_params": set(), "hf_overrides": {}}, {}),
        ({"trust_remote_code": True, "enforce_eager": True, "disable_log_stats": False}, {}),
    ):  # fmt: skip
        assert translate_arguments(keywords, FIELDS) == expected


def test_an_unknown_keyword_gets_the_closest_one() -> None:
    with pytest.raises(
        ModelError, match=r"^LLM takes no tensor_parallel; did you mean tensor_parallel_size\?$"
    ):
        translate_arguments({"tensor_parallel": 2}, FIELDS)
    with pytest.raises(ModelError, match=r"^LLM takes no colour; it takes model, tensor_parallel_size, "):
        translate_arguments({"colour": "red"}, FIELDS)
    with pytest.raises(
        ModelError, match=r"^LLM takes no data_parallel_size: an engine is one group of ranks; "
    ):
        translate_arguments({"data_parallel_size": 2}, FIELDS)
