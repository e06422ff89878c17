"""`python -m mla_jax.serve` as a process: its errors, its signals, and its port."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from mla_jax.serve.__main__ import ABOUT_SERVE, ServeCommand, main
from mla_jax.ui.command_line import parse_command

pytestmark = [pytest.mark.once]
ROOT = Path(__file__).parents[2]


class Process:
    """The server as a process, until it listens."""

    def __init__(self, *arguments: object):
        line = [sys.executable, "-m", "mla_jax.serve", "--port", "0", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        self.lines: list[str] = []
        self.url = re.search(r"http://[\d.:]+", self.wait_for("listening on"))[0]  # type: ignore[index]

    def wait_for(self, words: str) -> str:
        """The next line of stderr with these words."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError("".join(self.lines))

    def end(self, sent: int = signal.SIGTERM) -> int:
        self.process.send_signal(sent)
        assert self.process.stderr is not None
        self.lines += self.process.stderr.readlines()
        return self.process.wait(60)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_end_and_then_the_server(chat_folder, sent):
    server = Process("--model", chat_folder)
    try:
        server.wait_for("ready")
        body = {"prompt": "a1", "max_tokens": 480, "ignore_eos": True, "temperature": 0}
        found: list[httpx.Response] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            ending = threading.Thread(target=lambda: found.append(server.end(sent)))
            ending.start()
            rest = [line for line in lines if line]
        ending.join()
        assert rest[-1] == "data: [DONE]"
        assert found == [0], server.lines
        assert not any("Traceback" in line for line in server.lines), server.lines
    finally:
        server.process.kill()


@pytest.mark.deep
def test_a_signal_ends_a_server_that_still_loads(chat_folder):
    server = Process("--model", chat_folder)
    try:
        assert server.end() == 0
        assert not any("Traceback" in line or "ready" in line for line in server.lines), server.lines
    finally:
        server.process.kill()


def test_a_port_in_use_is_told(chat_folder, capfd):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--model", str(chat_folder), "--port", str(port)]) == 2
    assert f"the server cannot listen on 127.0.0.1:{port}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", "/no/such/folder"], 3, "/no/such/folder"),
        (["--port", "70000"], 2, "port is 70000"),
        (["--api-key-file", "/no/such/file"], 3, "/no/such/file"),
        (["--max-model-len", "100"], 2, "did you mean --context"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_loaded(capfd, arguments, code, words):
    assert main(arguments) == code
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert words in error


def test_a_file_of_keys_without_any_is_refused(tmp_path, capfd):
    (tmp_path / "keys").write_text("# none yet\n\n")
    assert main(["--api-key-file", str(tmp_path / "keys")]) == 3
    assert "has no key" in capfd.readouterr().err


def test_settings_come_from_a_file_too(tmp_path):
    (tmp_path / "serve.toml").write_text("[serve]\nport = 8080\n[memory]\nmax_rows = 7\n")
    command = parse_command(ServeCommand, ABOUT_SERVE, ["--config", str(tmp_path / "serve.toml"), "--max-rows", "8"])
    assert (command.serve.port, command.options.memory.max_rows) == (8080, 8)


def test_help_names_every_setting_of_the_server_without_jax(tmp_path):
    code = "import sys; from mla_jax.serve.__main__ import main; main(['--help']); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "--api-key-file" in done.stdout
    assert "--model " in done.stdout
