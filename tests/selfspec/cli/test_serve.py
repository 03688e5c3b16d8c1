"""`selfspec serve`: in a process of its own, from the port to the last request; and what it is told wrongly."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys

import httpx2
import openai
import pytest
from servers import until

PROMPT = "import os\n\ndef main(args):\n"


@pytest.fixture
def start(tmp_path):
    """Starts `selfspec serve` on a free port: the process, and where it serves."""
    started = []

    def run(*args, **environment):
        command = [sys.executable, "-m", "selfspec", "serve", "-m", "builtin", "--port", "0", "--threads", "1", *args]
        log = (tmp_path / "log").open("w+")
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=log, text=True, env={**os.environ, **environment}
        )
        started.append(process)
        said = tmp_path / "log"
        until(lambda: process.poll() is not None or "serving" in said.read_text())
        found = re.search(r"serving (\S+) at (\S+) \((.*)\)", said.read_text())
        assert found, said.read_text()
        until(lambda: answers(found[2]))
        return process, found[2], said

    yield run
    for process in started:
        process.kill()
        process.wait()


def answers(url):
    try:
        return httpx2.get(f"{url}/health").status_code == 200
    except httpx2.TransportError:
        return False


def test_it_serves_and_ends(start, llm64):
    replicas = ["--batch-size", "2", "--devices", "cpu,cpu"]
    process, url, said = start("--profile", "none", "--dtype", "float64", *replicas, SELFSPEC_API_KEY="secret")
    assert "(2 replicas of 2 sequences)" in said.read_text()
    assert url.startswith("http://127.0.0.1:")
    assert httpx2.get(f"{url}/v1/models").status_code == 401
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
        assert [model.id for model in client.models.list()] == ["builtin"]
        answer = client.completions.create(model="builtin", prompt=PROMPT, max_tokens=12, temperature=0, n=2)
        expected = llm64.generate(PROMPT, max_new_tokens=12).text
        assert [choice.text for choice in answer.choices] == [expected] * 2
        stream = client.completions.create(model="builtin", prompt=PROMPT, max_tokens=60, temperature=0, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        text = [piece.choices[0].text for piece in stream]
        assert len("".join(text)) > len(expected), "what runs has its grace"
    assert process.wait(60) == 0
    lines = [json.loads(line) for line in said.read_text().splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines if line["path"] == "/v1/completions"] == [200, 200]
    assert "Traceback" not in said.read_text()
    assert "secret" not in said.read_text()


def test_a_port_that_is_taken(cli):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = cli("serve", "--port", port)
    assert (code, out) == (2, "")
    assert err == f"error: 127.0.0.1:{port} cannot be served at (Address already in use); expected another --port\n"


@pytest.mark.parametrize("lacking", ["fastapi", "prometheus_client", "uvicorn"])
def test_what_is_not_installed_is_named(cli, monkeypatch, lacking):
    monkeypatch.setattr("selfspec.cli.serve.find_spec", lambda name: None if name == lacking else name)
    code, _, err = cli("serve")
    assert (code, err) == (
        2,
        "error: serving needs packages; install them with: pip install fastapi uvicorn prometheus-client "
        '(in a clone: pip install -c constraints.txt ".[serve]")\n',
    )


WRONG = {
    "no such host": (["--host", "nowhere.invalid"], "--host nowhere.invalid: cannot be served at"),
    "a host that is not ours": (["--host", "192.0.2.1"], "192.0.2.1:"),
    "port": (["--port", "70000"], "--port"),
    "an adapter named as the model": (["--adapter", "builtin=x"], "--adapter builtin: is the name of the model, too"),
    "an adapter named as served": (
        ["--served-model-name", "a", "--adapter", "a=x"],
        "--adapter a: is the name of the model, too; expected another name",
    ),
    "model": (["--model", "./nothing"], "no such folder"),
    "profile": (["--profile", "nothing"], "no shipped profile of that name"),
    "store": (["--store", "no.store"], "no.store"),
    "batch size": (["--max-num-seqs", "0"], "--max-num-seqs"),
    "two batch sizes": (["--max-num-seqs", "2", "--batch-size", "2"], "expected only one of the two"),
    "queue": (["--queue", "-1"], "--queue"),
    "key": (["--api-key", " "], "--api-key: the key is blank or not ASCII"),
    "key in letters": (["--api-key", "schlüssel"], "--api-key: the key is blank or not ASCII; expected"),
    "no origin": (
        ["--cors-origin", "app.example"],
        "--cors-origin app.example: expected scheme and host without a path",
    ),
    "an origin with a path": (["--cors-origin", "https://app.example/"], "expected scheme and host without a path"),
    "devices and device": (["--devices", "cpu,cpu", "--device", "cpu"], "without --device"),
    "devices": (["--devices", "cpu,,cpu"], "--devices cpu,,cpu: expected devices separated by commas"),
    "no such device": (["--devices", "cpu,qpu"], "qpu"),
    "memory": (["--port", "0", "--profile", "none", "--memory", "0.001"], "memory"),
}


@pytest.mark.parametrize(("args", "said"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_clear_line(cli, args, said):
    code, _, err = cli("serve", *args)
    assert code == 2
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
