"""The dashboard of Grafana asks for figures that the server exports, and has a panel for each that operators watch."""

import json
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("serve")]

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text("utf-8"))
WATCHED = """
    num_requests_running num_requests_waiting prompt_tokens_total generation_tokens_total time_to_first_token_seconds_bucket
    inter_token_latency_seconds_bucket kv_cache_usage_perc num_preemptions_total prefix_cache_hits_total
    spec_decode_num_accepted_tokens_total
"""


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def names(text: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm|mla_jax):\w+", text))


@pytest.mark.deep
def test_every_figure_of_the_dashboard_is_exported(running):
    running.client.completions.create(model="tiny", prompt="a1", max_tokens=2)
    lines = running.get("/metrics").text.splitlines()
    exported = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    assert all(names(query) for query in queries())
    variables = json.dumps(DASHBOARD["templating"])
    assert names(" ".join([*queries(), variables])) <= exported


def test_every_query_is_of_the_model_that_was_chosen():
    assert all(query.count('{model_name=~"$model"}') == len(re.findall(r"(?:vllm|mla_jax):", query)) for query in queries())


def test_whatever_operators_watch_has_a_panel():
    asked = names(" ".join(queries()))
    assert {f"vllm:{name}" for name in WATCHED.split()} <= asked


def test_panels_have_names_and_places_of_their_own():
    panels = DASHBOARD["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    for found in ([panel["id"] for panel in panels], [panel["title"] for panel in panels], places):
        assert len(set(found)) == len(panels)
