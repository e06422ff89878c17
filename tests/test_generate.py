"""The command line as users meet it: what goes to stdout and stderr, exit codes, pipes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers

from mla_jax import Config, Transformer
from mla_jax.generate import main
from mla_jax.weights.save import save

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of one dense layer with random weights, and a tokenizer of single letters."""
    path = tmp_path_factory.mktemp("model")
    save(Transformer(Config.preset("tiny", num_hidden_layers=1, vocab_size=64, num_nextn_predict_layers=0), nnx.Rngs(0)), path)
    letters = ["<bos>", "<eos>", *map(chr, range(ord("A"), ord("A") + 62))]
    model = tokenizers.Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<eos>"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    model.add_special_tokens(["<bos>", "<eos>"])
    model.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    cache = str(tmp_path_factory.mktemp("cache"))
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONIOENCODING": "utf-8",
    }


@pytest.fixture
def command(environment):
    """Runs the command line with arguments and bytes on stdin."""

    def run(*arguments, stdin: bytes = b"") -> subprocess.CompletedProcess:
        line = [sys.executable, "-m", "mla_jax.generate", *map(str, arguments)]
        return subprocess.run(line, input=stdin, capture_output=True, cwd=ROOT, env=environment, timeout=120)

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
        (["--model", "{model}"], b"", 2, "no prompt given"),
        (["-", "--model", "{model}"], b"", 2, "no prompt given"),
        (["-", "--model", "{model}"], b"A\xff", 2, "not valid Unicode"),
        (["AB"], b"", 2, "no model given"),
        (["AB", "--model", "{model}", "--temperature", "-1"], b"", 2, "temperature is -1.0"),
        (["AB", "--model", "{model}", "--temperature", "warm"], b"", 2, "warm"),
        (["AB", "--model", "{model}", "--max-tokens", "4095"], b"", 2, "leave room for 4,094 of 4,096"),
        (["AB", "--model", "{model}", "--max-token", "4"], b"", 2, "--max-tokens"),
        (["AB", "--model", "{model}", "--attention", "flash"], b"", 2, "known: auto, naive"),
        (["AB", "--model", "{model}/nowhere"], b"", 3, "cannot be read"),
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
    assert b"BadConfig" in result.stderr


def test_help_is_short_and_imports_no_jax(environment):
    code = "import sys, runpy; sys.argv = ['mla_jax.generate', '--help']\n"
    code += "try: runpy.run_module('mla_jax.generate', run_name='__main__')\n"
    code += 'except SystemExit as e: sys.stderr.write(f\'{e.code} {sorted({"jax", "flax", "numpy"} & sys.modules.keys())}\')'
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, env=environment, timeout=60)
    assert result.stderr == b"0 []"
    assert 10 < len(result.stdout.splitlines()) < 80
    for flag in (b"--model", b"--temperature", b"--max-tokens", b"--explain"):
        assert flag in result.stdout


def test_explain_says_what_would_run_without_a_prompt(command, folder):
    result = command("--model", folder, "--explain")
    assert result.returncode == 0
    assert b"decode (1 new tokens over 4,096)" in result.stdout


@pytest.mark.parametrize("arguments", [("AB", *SHORT), ("AB", "--explain"), ("--help",)], ids=["text", "explain", "help"])
def test_a_closed_pipe_ends_quietly(environment, folder, arguments):
    line = [sys.executable, "-m", "mla_jax.generate", *map(str, arguments), "--model", str(folder)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    process.stdout.close()  # as `| head -0` does
    complaint = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert "Traceback" not in complaint
    assert "BrokenPipe" not in complaint


def test_an_interrupt_ends_with_130_and_no_traceback(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mla_jax.generate.run", interrupted)
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
