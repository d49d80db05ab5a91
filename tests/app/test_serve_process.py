"""`opvi serve` as a process: the ecosystem's clients, a browser, slow and hostile clients, signals and kills."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from prometheus_client.parser import text_string_to_metric_families

from benchmarks import hostile
from benchmarks import serve as bench
from opvi.app.serve import _guard
from tests.app.test_report import CHROMIUM, chromium, parsed

pytestmark = pytest.mark.slow
SMALL = ("--hidden", "none", "--particles", "4")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    work = tmp_path_factory.mktemp("serve")
    return bench.begin(work, 600, SMALL), bench.rows_of(work / "table.csv")


@pytest.fixture(scope="module")
def server(begun, tmp_path_factory):
    run = shutil.copytree(begun[0], tmp_path_factory.mktemp("served") / "model.run")
    with bench.Server(run) as running:
        yield running
    assert running.said[-1].startswith("Everything that was acknowledged is learnt and saved")
    assert running.process.returncode == 0


def post(server, path, content):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", json.dumps(content).encode())
    with urllib.request.urlopen(request, timeout=60) as said:
        return json.loads(said.read())


@pytest.mark.parametrize("binary", [True, False])
def test_the_kserve_client_of_the_ecosystem(server, begun, binary):
    http = pytest.importorskip("tritonclient.http")
    rows = begun[1][:20]
    client = http.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("model")
    inputs = []
    for about in client.get_model_metadata("model")["inputs"]:
        texts = [row[about["name"]] for row in rows]
        if about["datatype"] == "FP64":
            data = np.array([float(text) if text else np.nan for text in texts])
        else:
            data = np.array(texts, object)
        inputs.append(http.InferInput(about["name"], data.shape, about["datatype"]))
        if binary:
            inputs[-1].set_data_from_numpy(data)
        else:
            inputs[-1].set_data_from_numpy(np.nan_to_num(data) if about["datatype"] == "FP64" else data, False)
    outputs = [http.InferRequestedOutput(name, binary_data=binary) for name in ("mean", "q0.95")]
    said = client.infer("model", inputs, outputs=outputs, request_id="7")
    known = rows if binary else [{**row, "b": row["b"] or 0} for row in rows]
    expected = post(server, "/v1/predict", known)["predictions"]
    for name in ("mean", "q0.95"):
        np.testing.assert_array_equal(said.as_numpy(name), [row[name] for row in expected])
    assert said.get_response()["id"] == "7"
    client.close()


def test_the_client_of_the_page_in_ten_lines(server, begun):
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    names = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    address = f"http://127.0.0.1:{server.port}"
    said = names["ask"]("/v1/predict", begun[1][:2], server=address)
    assert [set(row) for row in said["predictions"]] == [{"mean", "sd", "q0.05", "q0.5", "q0.95"}] * 2
    first, again = (names["ask"]("/v1/learn", begun[1][:2], "page", address) for _ in range(2))
    assert (first["repeated"], again["repeated"]) == (False, True)


def test_slow_clients_do_not_stop_others(server, begun):
    slow = []
    for number in range(200):
        sock = socket.create_connection(("127.0.0.1", server.port))
        begin = b"POST /v1/learn HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        sock.sendall(begin if number % 2 else begin + b"Content-Length: 100\r\n\r\n{")
        slow.append(sock)
    began = time.perf_counter()
    for row in begun[1][:50]:
        assert post(server, "/v1/predict", row)["target"] == "y"
    assert time.perf_counter() - began < _guard.PATIENCE  # they wait still
    for sock in slow:
        sock.close()


def test_a_header_without_end_is_not_kept(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            sock.sendall(b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(10_000)))


def test_hostile_bytes(server, begun):
    found = hostile.attack(server, begun[1], 300, seed=1)
    assert found["alive"]
    assert not [status for status in found["statuses"] if status.startswith("5")]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_the_rows_that_arrive(server, begun, tmp_path):
    def rows(dom):
        return int(dom.partition("Rows learnt</dt><dd><span>")[2].partition("<")[0].replace(",", ""))

    url = f"http://127.0.0.1:{server.port}/"

    def shown():
        with urllib.request.urlopen(url, timeout=60) as said:
            return rows(said.read().decode())

    before = shown()
    post(server, "/v1/learn", begun[1][:200])
    while shown() == before:  # a page is not made too often
        time.sleep(0.2)
    seen = chromium(url, tmp_path, "--virtual-time-budget=8000")
    parsed(seen)
    assert rows(seen) > before
    assert "live, last changed" in seen.replace('say("live, last changed', "")  # its own script has renewed it


def test_kills_lose_nothing(begun, tmp_path):
    """SIGKILL under load at random moments; `python -m benchmarks.serve` kills 20 times (docs/results/serve.json)."""
    run = shutil.copytree(begun[0], tmp_path / "begun.run")
    shutil.copy(begun[0].parent / "table.csv", tmp_path / "table.csv")
    found = bench.killed(run, begun[1] * 40, 2, Path(os.environ["OPVI_PROGRAMS"]))
    assert found["acknowledged"] > 0
    assert (found["lost"], found["twice"], found["clean_end"], found["same_bits"]) == (0, 0, True, True)


# --- the process that learns ----------------------------------------------------------------------


def get(server, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as said:
        return said.read().decode()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux")
def test_only_learning_has_a_lower_priority(server):
    learner = bench.family(server.process.pid)[1]
    nice = {int(task.name): os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks(learner)}
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice[learner] == here  # it takes requests
    assert sorted(set(nice.values())) == [here, min(19, here + 10)]


def tasks(process):
    return Path(f"/proc/{process}/task").iterdir()


def test_what_the_other_process_learns_is_predicted_with(server, begun):
    row = begun[1][0]
    before = post(server, "/v1/predict?ticket=mine", row)["predictions"][0]
    scored = post(server, "/v1/learn?ticket=mine", {"y": before["mean"] + 1})["scored"]
    assert scored[0]["absolute_error"] == pytest.approx(1)
    rows = [{**row, "y": before["mean"] + 100}] * 400
    assert post(server, "/v1/learn", rows)["rows"] == 400
    deadline = time.monotonic() + 30
    while post(server, "/v1/predict", row)["predictions"][0]["mean"] < before["mean"] + 10:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    families = list(text_string_to_metric_families(get(server, "/metrics")))
    assert len({family.name for family in families}) == len(families)  # counted in two processes, each once
    found = {sample.name: sample.value for family in families for sample in family.samples}
    assert found["opvi_tickets_scored_total"] == 1
    assert found["opvi_rows_logged_total"] >= 401
    assert found["opvi_request_seconds_count"] > 0


def test_a_second_server_of_a_run_says_who_has_it(server):
    said = subprocess.run(
        [sys.executable, "-m", "opvi.app.cli", "serve", server.run, "--port", "0"], capture_output=True, text=True
    )
    assert said.returncode == 1
    assert "Traceback" not in said.stderr
    assert f"process {bench.family(server.process.pid)[1]}" in said.stderr


def test_answers_outlive_the_process_that_learns_and_nothing_is_lost(begun, tmp_path):
    run = shutil.copytree(begun[0], tmp_path / "model.run")
    row = begun[1][0]
    with bench.Server(run) as server:
        _, learner = bench.family(server.process.pid)
        post(server, "/v1/learn", begun[1][:70])
        os.kill(learner, signal.SIGKILL)
        with pytest.raises(urllib.error.HTTPError) as refused:
            [post(server, "/v1/learn", row) for _ in range(1000)]  # until it is noticed
        assert refused.value.code == 503
        assert "its process has gone" in refused.value.read().decode()
        assert post(server, "/v1/predict", row)["target"] == "y"
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get(server, "/v2/health/ready")
        assert get(server, "/metrics")
        server.stop()
    assert server.process.returncode == 1
    logged = sum(entry.rows for entry in bench._entries(run))
    assert logged >= 70
    with bench.Server(run) as server:  # learns the log
        assert f"{logged:,} rows of the log were not in the checkpoint; they are learnt now.\n" in server.said
        _, learner = bench.family(server.process.pid)
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{learner}").exists():  # it does not outlive the server
            assert time.monotonic() < deadline
            time.sleep(0.02)


# --- TLS ------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl is installed, which makes the certificate")
def test_tls_by_the_flags_of_uvicorn(begun, tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    run = shutil.copytree(begun[0], tmp_path / "model.run")
    with bench.Server(run, "--one-process", "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as server:
        assert f"https://127.0.0.1:{server.port}/" in server.said[-1]
        address = f"https://localhost:{server.port}/v1/predict"
        asked = urllib.request.Request(address, json.dumps(begun[1][0]).encode())
        with urllib.request.urlopen(asked, timeout=60, context=ssl.create_default_context(cafile=certificate)) as said:
            assert json.load(said)["target"] == "y"
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):  # who does not know it is warned
            urllib.request.urlopen(asked, timeout=60, context=ssl.create_default_context())
        with pytest.raises((OSError, HTTPException)):  # and nothing is said in the clear
            urllib.request.urlopen(address.replace("https", "http"), timeout=60)
    assert server.process.returncode == 0
