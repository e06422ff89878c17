"""The script of the docs that answers a batch file on a Ray cluster."""

import importlib.util
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mla_jax import LLM, BadRequest, SamplingParams
from mla_jax.generate import parse

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs/scaling/ray_batch.py"
PROMPTS = [f"{letter}1b2" for letter in "abcdefghi"]
GREEDY = ("--temperature", "0", "--max-tokens", "6", "--seed", "1")


def loaded():
    spec = importlib.util.spec_from_file_location("ray_batch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ray_batch = loaded()


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    """The prompts, the last of which is refused, and the place of the answers."""
    lines = [{"prompt": prompt, "id": f"p{i}"} for i, prompt in enumerate(PROMPTS)]
    lines.append({"prompt": "a", "id": "wrong", "echo": True})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def arguments(prompts: Path, out: Path, *more: str) -> list[str]:
    return ["--workers", "2", "--lines", "2", "--batch-file", str(prompts), "--out", str(out), *GREEDY, *more]


def assert_answered(out: Path, model: Path | None) -> None:
    """All lines have the answers of an LLM, in their order, and the last has an error."""
    answers = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    with LLM(model) as llm:
        expected = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6))
    assert [one["id"] for one in answers] == [*(f"p{i}" for i in range(len(PROMPTS))), "wrong"]
    assert [one.get("text") for one in answers] == [*(output.text for output in expected), None]
    assert "echo" in answers[-1]["error"]


def in_this_process(lines, own, command, settings):
    """As `answered`, by one worker."""
    worker = ray_batch.Worker(command, settings)
    for piece in ray_batch.pieces(lines, own.lines):
        numbers, data = zip(*piece, strict=True)
        found = worker({"number": np.array(numbers), "data": np.array(data, object)})
        yield from zip(found["answer"], found["refused"], strict=True)
    worker.llm.close()


@pytest.mark.deep
def test_a_worker_answers_lines_as_an_llm_does_and_a_second_run_resumes(files, model, monkeypatch):
    prompts, out = files
    monkeypatch.setattr(ray_batch, "answered", in_this_process)
    assert ray_batch.main(arguments(prompts, out, "--model", str(model))) == 2
    assert_answered(out, model)
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    assert ray_batch.main(arguments(prompts, out, "--model", str(model))) == 2
    assert out.read_bytes() == whole


def test_answers_by_other_settings_are_not_mixed(files, monkeypatch):
    prompts, out = files
    monkeypatch.setattr(ray_batch, "answered", lambda lines, own, command, settings: [(b"{}\n", False) for _ in lines])
    first, second = (ray_batch.digest(parse(["--temperature", t])) for t in ("0", "1"))
    assert first != second
    out.write_text('{"id": "p0", "digest": "0123456789abcdef", "text": ""}\n')
    with pytest.raises(BadRequest, match="not from an earlier run"):
        ray_batch.main(arguments(prompts, out))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--workers", "1", "--batch-file", "a"], "--out"),
        (["--workers", "1", "--batch-file", "-", "--out", "b"], "--batch-file FILE"),
        (["--workers", "1", "--batch-file", "a", "--out", "b", "--chat"], "several prompts"),
        (
            [
                "--workers",
                "1",
                "--batch-file",
                "a",
                "--out",
                "b",
                "--processes",
                "2",
                "--process-id",
                "0",
                "--coordinator",
                "h:1",
            ],
            "one process",
        ),
        (["--workers", "1", "--batch-file", "/no/such/file", "--out", "b"], "/no/such/file"),
    ],
)
def test_what_cannot_be_is_refused(changed, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequest, match=words):
        ray_batch.main(changed)


def test_two_workers_of_ray_answer_as_one_llm_does(files, tmp_path):
    pytest.importorskip("ray")
    import pandas

    prompts, out = files
    own = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **own}
    environment.pop("RAY_ADDRESS", None)
    line = [sys.executable, str(SCRIPT), *arguments(prompts, out)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 2, done.stderr
    assert_answered(out, None)
    pandas.read_json(out, lines=True, dtype=False).to_parquet(tmp_path / "out.parquet")  # as the page says
    assert len(pandas.read_parquet(tmp_path / "out.parquet")) == len(PROMPTS) + 1
