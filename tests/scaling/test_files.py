"""The files that the page on several machines hands out: they agree with each other, and with the programs' flags."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mla_jax.generate import main as generate_main
from mla_jax.generate import parse
from mla_jax.serve.__main__ import ABOUT_SERVE, ServeCommand
from mla_jax.serve.__main__ import main as serve_main
from mla_jax.serve.options import ServeOptions
from mla_jax.ui.command_line import parse_command

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/scaling"
PAGE = (ROOT / "docs/scaling.md").read_text("utf-8")
DOCKERFILE = (FOLDER / "Dockerfile").read_text("utf-8")
PROXY = (FOLDER / "haproxy.cfg").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
MANIFESTS = ("serve.yaml", "batch-job.yaml", "batch-lws.yaml")
PORT = ServeOptions().port
FOREIGN = {"--address", "--build-arg", "--generate", "--gpus", "--head"}  # flags of docker and of ray


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


def only(name: str, kind: str) -> dict[str, Any]:
    (found,) = [one for one in documents(name) if one["kind"] == kind]
    return found


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
    return template["spec"]


DEPLOYMENT, JOB = only("serve.yaml", "Deployment"), only("batch-job.yaml", "Job")
SET = only("batch-lws.yaml", "LeaderWorkerSet")
PODS = [pod_of(one) for one in (DEPLOYMENT, JOB, SET)]
(SERVER,) = pod_of(DEPLOYMENT)["containers"]


def instructions(name: str) -> list[list[str]]:
    """The words behind an instruction of the Dockerfile, wherever it stands."""
    text = re.sub(r"\\\n", " ", DOCKERFILE)
    return [line.split()[1:] for line in text.splitlines() if line.startswith(name + " ")]


def served(arguments: list[str]) -> ServeCommand:
    return parse_command(ServeCommand, ABOUT_SERVE, arguments)


def set_arguments() -> list[str]:
    """Those of mla_jax.generate in the shell's line of the LeaderWorkerSet."""
    (container,) = pod_of(SET)["containers"]
    (line,) = container["args"]
    words = shlex.split(line.replace("$LWS_GROUP_SIZE", "2").replace("$LWS_WORKER_INDEX", "1"))
    return words[words.index("mla_jax.generate") + 1 : words.index("||")]


def job_arguments() -> list[str]:
    (container,) = pod_of(JOB)["containers"]
    return [one.replace("$(JOB_COMPLETION_INDEX)", "1") for one in container["args"]]


def test_the_servers_arguments_are_its_own():
    command = served(SERVER["args"])
    assert command.serve.host == "0.0.0.0"
    assert command.serve.port == PORT
    mounted = {one["mountPath"] for one in SERVER["volumeMounts"]}
    assert {command.options.model.model, str(Path(str(command.serve.api_key_file)).parent)} <= mounted
    image = served(yaml.safe_load(" ".join(instructions("CMD")[-1])))
    assert (image.serve.host, image.options.model.model) == ("0.0.0.0", "/model")


def test_the_ports_and_paths_of_the_server_agree():
    assert SERVER["ports"] == [{"name": "http", "containerPort": PORT}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert SERVER[probe]["httpGet"] == {"path": "/health", "port": "http"}
    services = [one for one in documents("serve.yaml") if one["kind"] == "Service"]
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    for service in services:
        assert service["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
        assert service["spec"]["ports"] == [{"name": "http", "port": PORT, "targetPort": "http"}]
    assert instructions("EXPOSE") == [[str(PORT)]]
    assert f"http://127.0.0.1:{PORT}/health" in DOCKERFILE
    assert re.findall(r"server \w+ [\d.]+:(\d+)", PROXY) == [str(PORT)] * 2
    assert f"{services[1]['metadata']['name']}:{PORT} resolvers" in PAGE
    assert "option httpchk GET /health" in PROXY


def test_a_pod_has_time_to_drain():
    pause = int(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = served(SERVER["args"]).serve.drain_seconds
    assert pod_of(DEPLOYMENT)["terminationGracePeriodSeconds"] > pause + drain


def test_the_proxy_waits_longer_than_an_answer_may_take():
    (minutes,) = re.findall(r"timeout server (\d+)m", PROXY)
    limits = [int(found) for found in re.findall(r"--request-timeout[= ](\d+)", PAGE)]
    assert limits == [served(SERVER["args"]).serve.request_timeout]
    assert 60 * int(minutes) > limits[0]


@pytest.mark.parametrize("arguments", [job_arguments(), set_arguments()])
def test_the_processes_of_a_batch_are_as_many_as_pods(arguments):
    command = parse(arguments)
    processes = command.options.processes
    assert (processes.processes, processes.process_id) == (JOB["spec"]["completions"], 1)
    assert JOB["spec"]["parallelism"] == JOB["spec"]["completions"] == SET["spec"]["leaderWorkerTemplate"]["size"]
    assert (command.prompt.batch_file, command.output.out) == ("/data/prompts.jsonl", "/data/answers.jsonl")
    gpus = {pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in PODS[1:]}
    assert gpus == {int(command.options.mesh.mesh.removeprefix("data=")) // processes.processes}


def test_the_first_process_has_the_name_that_the_others_ask_for():
    service = only("batch-job.yaml", "Service")
    job, name = JOB["metadata"]["name"], service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job}
    assert pod_of(JOB)["subdomain"] == name
    assert str(parse(job_arguments()).options.processes.coordinator) == f"{job}-0.{name}:8476"


@pytest.mark.parametrize("pod", PODS)
def test_every_mount_has_its_volume_and_the_user_is_the_images(pod):
    (container,) = pod["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert [[str(pod["securityContext"]["runAsUser"])]] == instructions("USER")
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_the_image_has_all_that_the_package_is_built_of():
    copied = {word.rstrip("/") for line in instructions("COPY") for word in line[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    told = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"}
    assert copied == {*PROJECT["tool"]["scikit-build"]["wheel"]["packages"], *told}
    extras = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE + PAGE)
    assert {name for found in extras for name in found.split(",")} <= set(PROJECT["project"]["optional-dependencies"])
    home = {line[-1] for line in instructions("WORKDIR")}
    assert {one["mountPath"] for one in SERVER["volumeMounts"] if one["name"] == "cache"} <= {f"{one}/.cache" for one in home}


def test_flags_that_the_page_names_are_flags(capsys):
    for main in (generate_main, serve_main):
        assert main(["--help", "all"]) == 0
    script = re.findall(r'add\("(--\w+)"', (FOLDER / "ray_batch.py").read_text("utf-8"))
    known = {*re.findall(r"--[a-z][\w-]+", capsys.readouterr().out), *script, *FOREIGN}
    named = set(re.findall(r"--[a-z][\w-]+", PAGE))
    assert named - known == set()
    assert len(named) > 10


def test_files_that_the_page_names_are_there():
    linked = re.findall(r"\]\((scaling/[^)]+)\)", PAGE)
    assert {Path(name).name for name in linked} == {path.name for path in FOLDER.iterdir() if path.is_file()}
    anchors = re.findall(r"\]\((\w+\.md)(?:#[\w-]+)?\)", PAGE)
    assert all((ROOT / "docs" / name).exists() for name in anchors)


def checked() -> Iterator[dict[str, Any]]:
    for name in MANIFESTS:
        yield from (one for one in documents(name) if one["kind"] != "LeaderWorkerSet")
    template = {"metadata": {"labels": {"app": "a"}}, "spec": pod_of(SET)}
    spec = {"selector": {"matchLabels": {"app": "a"}}, "template": template}
    yield {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "the-pod-of-the-set"}, "spec": spec}


@pytest.mark.parametrize("manifest", list(checked()), ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_manifests_have_kubernetes_schema(manifest):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest, "1.30", strict=True)
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
