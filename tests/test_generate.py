"""The command line as users meet it: what goes to stdout and stderr, exit codes, pipes."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import compiling
import jaxtyping
import pytest
import tokenizers
from flax import nnx
from terminals import Terminal
from tokenizers import decoders, models, pre_tokenizers

import mla_jax
from mla_jax import Config, Grammar, Transformer
from mla_jax.engine.opening.opened import Opened
from mla_jax.generate import main, parse, read_prompt, with_schema
from mla_jax.weights.save import save

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of one dense layer with random weights, and a tokenizer of single letters."""
    path = tmp_path_factory.mktemp("model")
    save(Transformer(Config.preset("tiny", num_hidden_layers=1, vocab_size=64, num_nextn_predict_layers=0), nnx.Rngs(0)), path)
    letters = ["<bos>", "<eos>", *map(chr, range(ord("A"), ord("A") + 62))]
    model = tokenizers.Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="A"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    model.add_special_tokens(["<bos>", "<eos>"])
    model.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return compiling.as_users() | {"PYTHONIOENCODING": "utf-8"}


@pytest.fixture
def command(environment):
    """Runs the command line with arguments and bytes on stdin."""

    def run(*arguments, stdin: bytes = b"") -> subprocess.CompletedProcess:
        line = [sys.executable, "-m", "mla_jax.generate", *map(str, arguments)]
        return subprocess.run(line, input=stdin, capture_output=True, cwd=ROOT, env=environment, timeout=600)

    return run


SHORT = ("--max-tokens", 6, "--ignore-eos", "--seed", 4)


def test_stdout_carries_the_text_alone_and_stderr_the_statistics(command, folder):
    loud, quiet = (command("AB", "--model", folder, *SHORT, *more) for more in ((), ("--quiet",)))
    assert (loud.returncode, quiet.returncode) == (0, 0)
    assert 0 < len(loud.stdout.decode().removesuffix("\n")) <= 6, "a letter a token, control tokens left out"
    assert b" stop: length " in loud.stderr
    assert b"2+6 tokens" in loud.stderr
    assert b"seed 4" in loud.stderr
    assert (quiet.stdout, quiet.stderr) == (loud.stdout, b"")


@pytest.mark.deep
def test_a_dash_reads_the_prompt_from_stdin(command, folder):
    given, piped = (
        command("AB", "--model", folder, *SHORT, "--quiet"),
        command("-", "--model", folder, *SHORT, "--quiet", stdin=b"AB"),
    )
    assert piped.returncode == 0
    assert piped.stdout == given.stdout != b""


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "words"),
    [
        ([], b"", 2, "no prompt given"),
        (["--model", "{model}"], b"", 2, "no prompt given"),
        (["AB", "--config"], b"", 2, "--config"),
        (["-", "--model", "{model}"], b"", 2, "no prompt given"),
        (["-", "--model", "{model}"], b"A\xff", 2, "the prompt is not UTF-8"),
        (["AB", "--model", "{model}", "--temperature", "-1"], b"", 2, "temperature is -1.0"),
        (["AB", "--model", "{model}", "--temperature", "warm"], b"", 2, "warm"),
        (["AB", "--model", "{model}", "--max-tokens", "4095"], b"", 2, "leave room for 4,094 of 4,096"),
        (["AB", "--model", "{model}", "--max-token", "4"], b"", 2, "--max-tokens"),
        (["AB", "--tensor-parallel-size", "2"], b"", 2, "no flag --tensor-parallel-size\n  did you mean --mesh tensor=N?"),
        (["AB", "--max-new-tokens=4"], b"", 2, "there is no flag --max-new-tokens\n  did you mean --max-tokens?"),
        (["AB", "--trust-remote-code"], b"", 2, "code of a model folder is never run"),
        (["AB", "--model", "{model}", "--attention", "flash"], b"", 2, "attention is 'flash', expected one of auto, naive"),
        (["AB", "--model", "{model}/nowhere"], b"", 3, "nowhere"),
        (["AB", "--model", "deepseek-ai/DeepSeek-V2-Lite"], b"", 3, "hf download deepseek-ai/DeepSeek-V2-Lite"),
        (["AB", "--file", "{model}/config.json", "--model", "{model}"], b"", 2, "several prompts given"),
        (["--file", "{model}/nowhere", "--model", "{model}"], b"", 2, "nowhere cannot be read"),
        (["--chat", "--model", "{model}"], b"", 2, "has no chat template"),
        (["AB", "--config", "{model}/nowhere"], b"", 2, "cannot be read as TOML"),
        (["AB", "--memory-fraction", "2", "--model", "{model}"], b"", 2, "memory_fraction is 2.0"),
        (["AB", "--batch", "0", "--model", "{model}"], b"", 2, "batch is 0"),
        (["AB", "--batch", "1025", "--model", "{model}"], b"", 2, "batch is 1025, expected a whole number 1 to 1,024"),
        (["AB", "--system", "be brief", "--model", "{model}"], b"", 2, "--system needs --chat"),
        (["AB", "--chat-template-kwargs", "{{}}", "--model", "{model}"], b"", 2, "--chat-template-kwargs needs --chat"),
        (["--chat", "--chat-template-kwargs", "[1]", "--model", "{model}"], b"", 2, "expected a JSON object, such as"),
        (["AB", "--batch-file", "{model}/config.json", "--model", "{model}"], b"", 2, "several prompts given"),
        (["--chat", "--batch-file", "-", "--model", "{model}"], b"", 2, "--batch-file excludes a prompt, --file and --chat"),
        (["AB", "--out", "answers", "--model", "{model}"], b"", 2, "--out needs --batch-file"),
        (["--batch-file", "{model}/nowhere", "--model", "{model}"], b"", 2, "nowhere cannot be read"),
        (["--batch-file", "-", "--out", "{model}", "--model", "{model}"], b"", 2, "cannot be written"),
        (["--chat", "--n", "2", "--model", "{model}"], b"", 2, "--n 2 and --chat exclude each other"),
        (["AB", "--logit-bias", "64", "5", "--model", "{model}"], b"", 2, "logit_bias names token id 64"),
        (["AB", "--json-schema", "{{", "--model", "{model}"], b"", 2, "a JSON schema is not JSON"),
        (["AB", "--json-schema", "[1]", "--model", "{model}"], b"", 2, "a JSON schema is an object"),
        (["AB", "--json-schema", "@{model}/nowhere", "--model", "{model}"], b"", 2, "nowhere cannot be read"),
        (["AB", "--json-schema", "{{}}", "--ignore-eos", "--model", "{model}"], b"", 2, "ignore_eos and grammar exclude"),
        (["AB", "--cache-tokens", "1000", "--context", "2000", "--model", "{model}"], b"", 4, "--cache-tokens 1024 is less than"),
        (["A" * 5000, "--model", "{model}"], b"", 2, "the prompt is too long: 5,000 tokens"),
        (["AB", "--model", "{broken}"], b"", 3, "not valid JSON"),
        (["AB", "--model", "{other}"], b"", 3, "not an MLA model"),
    ],
)
def test_a_mistake_ends_with_its_exit_code_and_words_on_stderr(command, folder, tmp_path, arguments, stdin, code, words):
    for name, content in {"broken": "{", "other": json.dumps({"model_type": "llama"})}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    places = {"model": folder, "broken": tmp_path / "broken", "other": tmp_path / "other"}
    result = command(*[a.format(**places) for a in arguments], stdin=stdin)
    assert result.returncode == code
    assert result.stdout == b""
    assert words in result.stderr.decode()
    assert "Traceback" not in result.stderr.decode()


def test_debug_shows_where_an_error_came_from(command, folder):
    result = command("AB", "--model", folder / "nowhere", "--debug")
    assert result.returncode != 0
    assert b"Traceback" in result.stderr
    assert b"BadFile" in result.stderr


def test_help_is_short_and_imports_no_jax(environment):
    code = "import sys, runpy; sys.argv = ['mla_jax.generate', '--help']\n"
    code += "try: runpy.run_module('mla_jax.generate', run_name='__main__')\n"
    code += 'except SystemExit as e: sys.stderr.write(f\'{e.code} {sorted({"jax", "flax", "numpy"} & sys.modules.keys())}\')'
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, env=environment, timeout=600)
    assert result.stderr == b"0 []"
    assert 10 < len(result.stdout.splitlines()) <= 60
    for flag in (b"--model", b"--temperature", b"--max-tokens", b"--dry-run"):
        assert flag in result.stdout


def test_the_version_is_told(command):
    assert command("--version").stdout.decode() == f"mla-jax {mla_jax.__version__}\n"


@pytest.mark.parametrize("flags", [("--attention", "flash"), ("--batch", "0"), ("--experts", "gpu"), ("--dtype", "float16")])
def test_a_value_that_cannot_be_is_refused_without_jax(flags):
    code = "import sys; from mla_jax.generate import main\n"
    code += f"code = main(['AB', *{flags!r}]); print(code, sorted({{'jax', 'flax', 'numpy'}} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert result.stdout == "2 []\n"
    assert f"{flags[0][2:]} is " in result.stderr


def test_a_prompt_over_the_context_is_refused_before_weights_are_read(folder, monkeypatch, capsys):
    monkeypatch.setattr(Opened, "load", lambda *_: pytest.fail("weights were read"))
    assert main(["A" * 5000, "--model", str(folder)]) == 2
    assert "the context holds 4,096" in capsys.readouterr().err


@pytest.mark.deep
def test_log_probabilities_are_printed_after_the_text(command, folder):
    given, plain = (command("AB", "--model", folder, *SHORT, *more) for more in (("--logprobs", 2), ()))
    assert given.stdout == plain.stdout
    lines = given.stderr.decode().split(" logprobs:\n")[1].split("\n\n")[0].splitlines()
    assert len(lines) == 6
    for line in lines:
        assert re.fullmatch(r"( *-\d+\.\d{3} (\S+) *){2,3}", line)
    assert b"logprobs" not in plain.stderr


@pytest.mark.deep
def test_log_probabilities_of_the_prompt_are_printed_or_in_the_first_event(command, folder):
    given, plain = (command("ABC", "--model", folder, *SHORT, *more) for more in (("--prompt-logprobs", 1), ()))
    assert given.stdout == plain.stdout
    lines = given.stderr.decode().split(" prompt logprobs:\n")[1].split("\n\n")[0].splitlines()
    assert len(lines) == 2
    assert [re.match(r" *-\d+\.\d{3} (\S+)", line)[1] for line in lines] == ['"B"', '"C"']
    events = [
        json.loads(line)
        for line in command("ABC", "--model", folder, *SHORT, "--json", "--prompt-logprobs", 1).stdout.splitlines()
    ]
    assert events[0]["prompt_logprobs"][0] is None
    assert len(events[0]["prompt_logprobs"]) == 3
    assert not any("prompt_logprobs" in event for event in events[1:])


@pytest.mark.deep
def test_n_answers_come_one_after_the_other_with_seeds_that_follow_each_other(command, folder):
    several = command("AB", "--model", folder, *SHORT, "--temperature", 1, "--n", 2)
    assert b"seed 4" in several.stderr
    assert b"seed 5" in several.stderr
    single = [command("AB", "--model", folder, *SHORT, "--temperature", 1, "--seed", seed).stdout for seed in (4, 5)]
    assert several.stdout == b"".join(single)


@pytest.mark.deep
def test_biases_and_penalties_act_from_the_command_line_and_from_a_file(command, folder, tmp_path):
    biased = command("AB", "--model", folder, *SHORT, "--quiet", "--logit-bias", 10, 100, 11, -100)
    assert biased.stdout == b"I" * 6 + b"\n"
    (tmp_path / "run.toml").write_text("[sampling]\nlogit_bias = {10 = 100, 11 = -100}")
    assert command("AB", "--model", folder, *SHORT, "--quiet", "--config", tmp_path / "run.toml").stdout == biased.stdout
    penalised = command("AB", "--model", folder, *SHORT, "--quiet", "--frequency-penalty", 100)
    letters = penalised.stdout.decode().strip()
    assert len(set(letters)) == len(letters) > 1


@pytest.mark.deep
def test_a_dumb_terminal_of_20_columns_gets_plain_text(folder, environment):
    plain = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "20"}
    terminal = Terminal("AB", "--model", folder, *SHORT, **{**environment, **plain})
    shown = terminal.to_the_end()
    terminal.close()
    assert " stop: length " in shown
    assert "\x1b" not in shown
    mistaken = Terminal("AB", "--max-token", "4", **{**environment, **plain})
    shown = mistaken.to_the_end()
    mistaken.close()
    assert "--max-tokens" in shown
    assert "\x1b" not in shown


@pytest.mark.deep
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_nothing(environment, folder, closed):
    arguments = shlex.join([sys.executable, "-m", "mla_jax.generate", "AB", "--model", str(folder), *map(str, SHORT)])
    result = subprocess.run(f"{arguments} {closed}", shell=True, capture_output=True, cwd=ROOT, env=environment, timeout=600)
    assert result.returncode == 0
    assert b"Traceback" not in result.stderr
    assert bool(result.stdout) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.deep
def test_a_dry_run_says_what_is_needed_and_what_would_run_without_a_prompt(command, folder):
    result = command("--model", folder, "--dry-run")
    assert result.returncode == 0
    assert b"decode (1 new over 4,096)" in result.stdout
    for row in (
        b"weights",
        b"cache of 4,096 tokens",
        b"temporaries",
        b"largest context that fits: 4,096 tokens; the cache holds",
    ):
        assert row in result.stdout
    plan = json.loads(command("--model", folder, "--dry-run", "--json").stdout)
    assert plan["fits"] is True
    several = json.loads(command("--model", folder, "--dry-run", "--json", "--batch", 3).stdout)
    assert several["cache"] == 3 * plan["cache"]
    assert (plan["tokens"], several["tokens"]) == (16_384, 16_384), "the pool of a CPU, more than was asked for"
    assert plan["weights"] > 0


@pytest.mark.deep
def test_json_is_one_object_an_event_and_the_last_says_how_it_ended(command, folder):
    result = command("AB", "--model", folder, *SHORT, "--json", "--logprobs", 2)
    events = [json.loads(line) for line in result.stdout.decode().splitlines()]
    assert {e["event"] for e in events[:-1]} == {"token"}
    assert sum(len(e["token_ids"]) for e in events[:-1]) == 6
    assert all(len(e["logprobs"]) == len(e["token_ids"]) for e in events[:-1])
    assert events[-1]["event"] == "done"
    assert events[-1]["finish_reason"] == "length"
    plain = command("AB", "--model", folder, *SHORT, "--quiet")
    assert "".join(e["text"] for e in events[:-1]) + "\n" == plain.stdout.decode()


@pytest.mark.deep
def test_a_file_and_a_configuration_give_the_same_as_flags(command, folder, tmp_path):
    (tmp_path / "prompt.txt").write_text("AB")
    settings = f'[model]\nmodel = "{folder}"\n[sampling]\nmax_tokens = 6\nignore_eos = true\nseed = 4\n[output]\nquiet = true\n'
    (tmp_path / "run.toml").write_text(settings)
    given = command("AB", "--model", folder, *SHORT, "--quiet")
    assert command("AB", "--config", tmp_path / "run.toml").stdout == given.stdout
    assert command("--file", tmp_path / "prompt.txt", f"--config={tmp_path / 'run.toml'}").stdout == given.stdout
    assert command("-p", "AB", "--config", tmp_path / "run.toml").stdout == given.stdout
    shorter = command("AB", "--config", tmp_path / "run.toml", "--max-tokens", "2")
    assert given.stdout.startswith(shorter.stdout.removesuffix(b"\n"))
    assert len(shorter.stdout) < len(given.stdout)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sampling]\ntemprature = 1", "did you mean temperature?"),
        ("\ufeff[sampling]\ntemprature = 1", "did you mean temperature?"),
        ("[sampler]\nseed = 1", "did you mean sampling?"),
        ("[", "TOML"),
        ("[sampling]\ntemperature = 'warm'\nseed = 1.5", "temperature is 'warm', expected a number 0 to 1,000\n  seed is 1.5"),
        ("[model]\nmodel = 7", "run.toml has a value in [model] that cannot be used\n  model is 7, expected a path"),
        ("[attention]\nattention = 'flash'", "attention is 'flash', expected one of auto, naive"),
        ("[memory]\nbatch = '4'", "batch is '4'"),
        ("[output]\njson = 1", "json is 1, expected True or False"),
        ("[prompt]\nchat = 'yes'", "chat is 'yes'"),
        ("sampling = 4", "no known group sampling"),
    ],
)
def test_a_mistake_in_a_configuration_is_named(tmp_path, capsys, monkeypatch, text, words):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checks of the tests
    (tmp_path / "run.toml").write_text(text)
    assert main(["AB", "--config", str(tmp_path / "run.toml")]) == 2
    assert words in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfAB")
    assert read_prompt(parse(["--file", str(tmp_path / "prompt.txt")])) == "AB"


@pytest.mark.deep
def test_a_chat_answers_turn_by_turn_until_input_ends(command, folder, tmp_path):
    talking = tmp_path / "talking"
    shutil.copytree(folder, talking)
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (talking / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "chat_template": template}))
    result = command("--chat", "--model", talking, *SHORT, stdin=b"AB\n\nCD\n")
    assert result.returncode == 0
    assert result.stderr.count(b" stop: length ") == 2
    assert b"3+6 tokens" in result.stderr  # <bos>, A, B
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.parametrize("setting", ["{thinking = true}", "'{\"thinking\": true}'"])
def test_variables_of_a_chat_template_may_be_a_table_of_a_file(tmp_path, monkeypatch, setting):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checks of the tests
    (tmp_path / "run.toml").write_text(f"[prompt]\nchat = true\nchat_template_kwargs = {setting}\n")
    command = parse(["--config", str(tmp_path / "run.toml")])
    assert json.loads(command.prompt.chat_template_kwargs or "") == {"thinking": True}


def test_a_json_schema_may_come_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    expected = Grammar.json_schema({"type": "integer"})
    for given in ("@" + str(tmp_path / "schema.json"), '{"type": "integer"}'):
        assert with_schema(parse(["AB", "--json-schema", given])).sampling.grammar == expected
    (tmp_path / "run.toml").write_text('[sampling]\ngrammar = {json_schema = {type = "integer"}}\n')
    assert parse(["AB", "--config", str(tmp_path / "run.toml")]).sampling.grammar == expected


def test_ctrl_c_ends_the_text_cleanly_and_still_prints_the_figures(environment, folder):
    line = [
        sys.executable,
        "-m",
        "mla_jax.generate",
        "AB",
        "--model",
        str(folder),
        "--max-tokens",
        "4000",
        "--ignore-eos",
        "--json",
    ]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, complaint = process.communicate(timeout=600)
    assert process.returncode == 130
    assert json.loads(out.splitlines()[-1])["finish_reason"] == "interrupted"
    assert b"Traceback" not in complaint


@pytest.mark.deep
@pytest.mark.parametrize("arguments", [("AB", *SHORT), ("--dry-run",), ("--help",)], ids=["text", "plan", "help"])
def test_a_closed_pipe_ends_quietly(environment, folder, arguments):
    line = [sys.executable, "-m", "mla_jax.generate", *map(str, arguments), "--model", str(folder)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    process.stdout.close()  # as `| head -0` does
    complaint = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=600) == 0
    assert "Traceback" not in complaint
    assert "BrokenPipe" not in complaint


def test_an_interrupt_ends_with_130_and_no_traceback(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mla_jax.generate.run_command", interrupted)
    assert main(["AB"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_logits_that_are_not_finite_are_told_by_words_and_exit_code(folder, monkeypatch, capsys):
    from mla_jax.engine.llm import LLM

    made = LLM.__init__

    def spoilt(self, *arguments, **options):
        made(self, *arguments, **options)
        self.model.norm.set_value(self.model.norm[...] * float("nan"))

    monkeypatch.setattr(LLM, "__init__", spoilt)
    assert main(["AB", "--model", str(folder), "--max-tokens", "4", "--quiet"]) == 1
    assert capsys.readouterr().err == "error: the model's logits were not finite, the text ends before them\n"
