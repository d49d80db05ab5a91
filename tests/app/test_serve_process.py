"""`opvi serve` as a process: the ecosystem's clients, a browser, slow and hostile clients, signals and kills."""

import json
import shutil
import socket
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from benchmarks import serve as bench
from opvi.app.serve import _guard
from tests.app.test_report import CHROMIUM, chromium, parsed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]
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
    found = bench.attack(server, begun[1], 300, seed=1)
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
    """SIGKILL under load at random moments; `python -m benchmarks.serve` is the long form."""
    run = shutil.copytree(begun[0], tmp_path / "begun.run")
    shutil.copy(begun[0].parent / "table.csv", tmp_path / "table.csv")
    found = bench.killed(run, begun[1] * 40, 3, tmp_path / "programs")
    assert found["acknowledged"] > 0
    assert (found["lost"], found["twice"], found["clean_end"], found["same_bits"]) == (0, 0, True, True)
