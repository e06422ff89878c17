"""NVIDIA's aiperf, by the guide's command: it measures the server without a patch, and its counts are right."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from servers import started

from mla_jax.weights.hub import DEMO

pytestmark = pytest.mark.skipif(shutil.which("aiperf") is None, reason="there is no aiperf: `make aiperf` installs it")
GUIDE = Path(__file__).parents[2] / "docs" / "serving.md"
REQUESTS, PROMPT, ANSWER = 12, 32, 8


def command(url: str, out: Path, endpoint: str, *further: str) -> list[str]:
    """The guide's command with another server, tokenizer, size and kind of request."""
    (text,) = re.findall(r"^aiperf profile (?:.*\\\n)*.*$", GUIDE.read_text("utf-8"), re.MULTILINE)
    given = {
        "url": url,
        "tokenizer": str(DEMO),
        "endpoint-type": endpoint,
        "concurrency": "4",
        "request-count": str(REQUESTS),
        "synthetic-input-tokens-mean": str(PROMPT),
        "output-tokens-mean": str(ANSWER),
    }
    program, *words = shlex.split(text.replace("\\\n", ""))
    assert program == "aiperf"
    for name, value in given.items():
        words[words.index(f"--{name}") + 1] = value
    return [program, *words, *further, "--output-artifact-dir", str(out)]


@pytest.fixture(scope="module")
def demo():
    yield from started(DEMO, model_name="demo", context=1024, max_rows=4, draft="off")


@pytest.mark.parametrize(
    ("endpoint", "further"), [("chat", ["--per-chunk-usage", "--use-server-token-count"]), ("completions", []), ("responses", [])]
)
def test_aiperf_measures_the_server(demo, tmp_path, endpoint, further):
    subprocess.run(
        command(demo.url, tmp_path, endpoint, *further),
        check=True,
        timeout=600,
    )
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_error_rate"]["avg"] == 0
    assert found["request_count"]["avg"] == REQUESTS
    assert found["time_to_first_token"]["avg"] > 0
    if endpoint != "responses":  # aiperf reads no figures where an answer ends at its limit: `response.incomplete` has them
        assert found["total_usage_completion_tokens"]["avg"] == REQUESTS * ANSWER
    metrics = json.loads((tmp_path / "server_metrics_export.json").read_text())["metrics"]
    assert "vllm:time_to_first_token_seconds" in metrics
