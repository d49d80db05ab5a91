"""The report: figures worked out by hand, effects against closed forms, nothing unescaped, loopback only."""

import http.client
import math
import re
import resource
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.app.report import (
    Coefficient,
    ColumnTold,
    Contents,
    Effect,
    Histogram,
    Projection,
    Stretch,
    effects,
    page,
    projection,
)
from opvi.app.report import _charts as charts
from opvi.app.report._contents import calibration_error, interval_coverage, noise_limits, so_far
from opvi.app.report._effects import spread_out
from opvi.app.report._page import LIVE_POLICY, POLICY, TEMPLATES
from opvi.app.report._particles import plane
from opvi.app.report._server import MOST_CONNECTIONS, serve
from opvi.app.report._words import clean, number, percent
from opvi.predictive import Normal

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAN = math.nan
ELSEWHERE = "http://somewhere.invalid/"
ATTACK = f"<script>document.title='owned'</script>\"'><img src={ELSEWHERE} onerror=\"document.title='owned'\">&amp;"
VOID = {"meta", "link", "img"}


def contents(**changes):
    curve = [Stretch(100 * i, 100, 1 / i, 2 / i, 0.9) for i in range(1, 11)]
    made = Contents(
        title="a run",
        task="regression",
        target="price",
        classes=[],
        rows=1000,
        rejected={"no number": 3, "too few cells": 40},
        filled=7,
        finished=True,
        total=Stretch(1000, 1000, 0.29, 0.79, 0.9),
        baseline=3.16,
        curve=curve,
        calibration=Histogram([50] * 20),
        alarms=[320, 610],
        probability=0.125,
        effects=[
            Effect("size", "number", [0.0, 1.0, 2.0], [[1, 2, 3]], [[0, 1, 2]], [[2, 3, 4]], 0.8, seen=[0.5, 1.5]),
            Effect("colour", "text", ["red", "blue"], [[1, 2]], [[0.5, 1]], [[2, 3]], 0.4),
        ],
        posterior=Projection([(0, 1), (1, 0), (-1, -1)], (0.7, 0.2), [0.5, 0.3, 0.2], ["tanh", "tanh", "ReLU"]),
        settings={"particles": "3"},
        versions={"opvi": "0"},
        command="opvi learn data.csv --resume",
        notes=["a note"],
    )
    return made._replace(**changes)


def labelled(**changes):
    bins = Histogram([0, 200, 800], [NAN, 0.6, 0.9], [NAN, 0.5, 0.95])
    lines = Effect(
        "x",
        "number",
        [0.0, 1.0],
        [[0.1, 0.9], [0.2, 0.1]],
        [[0, 0.8], [0.1, 0]],
        [[0.2, 1], [0.3, 0.2]],
        0.4,
        ["a", "b"],
    )
    made = contents(task="classification", classes=["a", "b", "c"], calibration=bins, effects=[lines], baseline=0.5)
    return made._replace(**{"total": Stretch(1000, 1000, 0.4, 0.14), **changes})


NOTHING = {
    "rows": 0,
    "total": Stretch(0, 0, NAN, NAN),
    "baseline": NAN,
    "curve": [],
    "calibration": Histogram([0] * 20),
    "alarms": [],
    "effects": [],
    "posterior": None,
}


class Checker(HTMLParser):
    """Every element closed, and what is on the page."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script") and data.strip():
            self.text.append(data)


def parsed(html):
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.open
    return checker


# --- figures --------------------------------------------------------------------------------------


def test_figures_of_calibration_and_curve():
    bins = Histogram([10, 30, 60], [0.2, 0.5, 0.9], [0.3, 0.5, 0.8])
    assert calibration_error(bins) == pytest.approx(0.1 * 0.1 + 0.6 * 0.1)
    assert math.isnan(calibration_error(Histogram([0, 0], [NAN, NAN], [NAN, NAN])))
    promised, held = interval_coverage(Histogram([*[1] * 9, 31, 31, *[1] * 9]))
    assert promised[0] == pytest.approx(0.1)
    assert held[0] == pytest.approx(62 / 80)
    assert (promised[-1], held[-1]) == (pytest.approx(0.9), pytest.approx(78 / 80))
    error, loss = so_far(
        [Stretch(10, 10, 1.0, 3.0), Stretch(40, 30, 2.0, 1.0), Stretch(50, 10, NAN, NAN)], squared=True
    )
    np.testing.assert_allclose(error, [3, math.sqrt((90 + 30) / 40), math.sqrt(120 / 40)])
    np.testing.assert_allclose(loss, [1, 70 / 40, 70 / 40])


def test_noise_limits_hold_what_chance_does():
    draws = np.random.default_rng(0).binomial(1000, 0.05, 20_000)
    low, high = noise_limits(1000, 0.05)
    inside = ((draws >= low) & (draws <= high)).mean()
    assert 0.95 <= inside < 0.98  # a band of whole counts holds a little more than it must
    assert noise_limits(1, 0.05) == (0, 1)


def test_ticks_are_round_and_inside():
    assert charts.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert charts.tick_labels([0, 0.05, 0.1]) == ["0.00", "0.05", "0.10"]
    assert charts.tick_labels([0, 5e6, 1e7]) == ["0", "5M", "10M"]
    assert charts.decades(20, 3e6) == [100, 1000, 10_000, 100_000, 1e6]
    assert [charts.compact(v) for v in (20, 1e3, 5e6)] == ["20", "1k", "5M"]
    for low, high in [(-1e-12, 1e-12), (1e17, 1.0001e17), (-3, 1e9), (0.3, 0.30001)]:
        marks = charts.ticks(*charts.spanned([low, high]))
        assert 2 <= len(marks) <= 12
        assert len(set(charts.tick_labels(marks))) == len(marks)
    assert charts.spanned([NAN, math.inf]) == (0, 1)
    assert charts.spanned([5.0]) == pytest.approx((4.5, 5.5))


def test_numbers_for_people():
    assert [number(v) for v in (0.07061, 1234567, -2.5, 1e-9, 0, NAN, math.inf)] == [
        "0.07061", "1,234,567", "−2.500", "1.000 × 10^−9", "0", "–", "∞",
    ]  # fmt: skip
    assert (percent(0.1234), percent(NAN)) == ("12.3\u00a0%", "–")


def test_headline_says_what_there_is():
    words = " ".join(parsed(page(contents())).text)
    assert "75\u00a0% below predicting the mean so far" in words
    assert "43" in words
    assert "last at row 610; probability of a jump by now: 12.5" in words
    assert "as promised, within chance" in words
    narrow = contents(total=Stretch(1000, 1000, 0.3, 4.0, 0.7))
    words = " ".join(parsed(page(narrow)).text)
    assert "27\u00a0% above predicting the mean so far" in words
    assert "too narrow" in words
    words = " ".join(parsed(page(labelled())).text)
    assert "Confidence and accuracy lie 6.0\u00a0% apart" in words


# --- pages of every kind --------------------------------------------------------------------------

ODD = {
    "regression": contents(),
    "classification": labelled(),
    "nothing": contents(**NOTHING),
    "all rejected": labelled(**NOTHING, rejected={"bad": 10**9}),
    "one row": contents(
        rows=1,
        total=Stretch(1, 1, 1.5, 0.0, 1.0),
        baseline=0.0,
        curve=[Stretch(1, 1, 1.5, 0.0, 1.0)],
        calibration=Histogram([1] + [0] * 19),
    ),
    "one class": labelled(
        classes=["only"],
        total=Stretch(50, 50, 0.0, 0.0),
        baseline=0.0,
        calibration=Histogram([0, 0, 50], [NAN, NAN, 1.0], [NAN, NAN, 1.0]),
    ),
    "not numbers": contents(
        total=Stretch(10, 10, NAN, math.inf, NAN),
        baseline=math.inf,
        curve=[Stretch(10 * i, 10, NAN if i % 2 else math.inf, -math.inf, NAN) for i in range(1, 30)],
        effects=[
            Effect("a", "number", [0.0, NAN], [[NAN, 1]], [[NAN, NAN]], [[math.inf, 2]], NAN, missing=[(NAN, 1, 2)]),
            Effect("b", "text", ["x", "y"], [[NAN, NAN]], [[NAN, 0]], [[1, NAN]], NAN),
        ],
        posterior=Projection([(NAN, NAN), (0, 0)], (NAN, NAN), [NAN, 1.0], ["a", "b"], [Coefficient("c", NAN, NAN, 1)]),
    ),
    "extremes": contents(
        rows=10**15,
        curve=[Stretch(10 * 4**i, 4**i, -(10.0**i), 10.0**i, 1.0) for i in range(25)],
        effects=[Effect("a", "number", [-3e38, 3e38], [[1e30, -1e30]], [[-1e38, -1e38]], [[1e38, 1e38]], 1e30)],
        alarms=list(range(10, 10_000, 10)),
    ),
    "same everywhere": contents(
        curve=[Stretch(10 * i, 10, 0.0, 0.0, 1.0) for i in range(1, 40)],
        effects=[Effect("a", "number", [1.0, 1.0], [[2, 2]], [[2, 2]], [[2, 2]], 0.0)],
        posterior=Projection([(0, 0)] * 5, (0, 0), [0.2] * 5, ["g"] * 5),
    ),
    "many columns": contents(
        effects=[Effect("c" * 300, "text", ["l" * 200] * 40, [[1] * 40], [[0] * 40], [[2] * 40], 1.0)] * 60,
        rejected={f"reason {i}": 1 for i in range(1000)},
    ),
}


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("kind", list(ODD))
def test_every_page_is_well_formed_and_needs_nothing_from_elsewhere(kind, live):
    html = page(ODD[kind], live=live)
    assert html.startswith("<!doctype html>\n")
    seen = parsed(html)
    drawn = [value for name, value in seen.attributes if name in ("d", "x", "y", "cx", "cy", "width", "height")]
    assert drawn or kind in ("nothing", "all rejected")
    assert not [value for value in drawn if re.search("nan|inf", value)]
    assert not [value for name, value in seen.attributes if name in ("width", "height", "r") and value.startswith("-")]
    assert seen.tags.count("script") == live
    assert not {"iframe", "object", "embed", "form", "base", "img"} & set(seen.tags)
    assert [value for name, value in seen.attributes if name in ("src", "href", "srcset", "action")] == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", html)
    policy = dict(seen.attributes)["content"]
    policies = [value for name, value in seen.attributes if name == "content" and "default-src" in value]
    assert policies == [LIVE_POLICY if live else POLICY], policy
    assert "nan" not in " ".join(seen.text).lower().split()
    assert len(html) < 1_000_000


def test_charts_say_in_words_what_they_show():
    seen = parsed(page(contents()))
    assert seen.tags.count("desc") >= 7
    assert ("lang", "en") in seen.attributes
    assert "<caption>" in page(contents())
    assert 'scope="col"' in page(contents())


# --- nothing shown can become markup ----------------------------------------------------------------


def hostile():
    """Every text of the contents is an attack."""
    effect = Effect(ATTACK, "text", [ATTACK, "b"], [[1, 2]], [[0, 1]], [[2, 3]], 1.0, lines=[ATTACK])
    twice = effect._replace(kind="number", values=[0.0, 1.0], mean=[[1, 2]] * 2, low=[[0, 1]] * 2, high=[[2, 3]] * 2)
    said = [Coefficient(ATTACK, 1, 0, 2)]
    return labelled(
        title=ATTACK,
        target=ATTACK,
        classes=[ATTACK, "</style>", "</title>"],
        rejected={ATTACK: 3},
        effects=[twice._replace(lines=[ATTACK] * 2), effect],
        posterior=Projection([(0, 1), (1, 0)], (0.7, 0.2), [0.5, 0.5], [ATTACK, "b"], said, ATTACK),
        settings={ATTACK: ATTACK},
        versions={ATTACK: ATTACK},
        command=ATTACK,
        notes=[ATTACK, "\x00\x1b[31m\ud800\u202eabc"],
    )


def test_text_is_escaped():
    shown = TEMPLATES.from_string("<p title='{{ text }}'>{{ text }}</p>").render(text="<b>\"&'\x00")
    assert shown == "<p title='&lt;b&gt;&#34;&amp;&#39;�'>&lt;b&gt;&#34;&amp;&#39;�</p>"
    assert clean("a\x00\ud800\u202eb\tc") == "a���b\tc"
    html = page(hostile())
    html.encode()
    seen = parsed(html)
    assert not {"script", "img"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "owned" in " ".join(seen.text)  # it is there, as text


def chromium(address, folder, *more):
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-component-update", *quiet, *more]
    done = subprocess.run(
        [*command, f"--user-data-dir={folder / 'profile'}", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_no_script_runs_in_a_browser_and_nothing_is_asked_for(tmp_path):
    def opened(html):
        """What the browser made of a page, and whether it asked for anything elsewhere."""
        file, log = tmp_path / 'it\'s "a" run.html', tmp_path / "net.json"
        file.write_text(html, encoding="utf-8")
        seen = parsed(chromium(file.as_uri(), tmp_path, f"--log-net-log={log}"))
        return seen, ELSEWHERE in log.read_text(errors="replace")

    seen, asked = opened(page(hostile()))
    assert seen.text[0].startswith("<script>document.title='owned'</script>")  # the title, as text: nothing has set it
    assert not {"script", "img"} & set(seen.tags)
    assert seen.tags.count("svg") > 5
    assert not asked
    # The same attack on a page that escapes nothing shows that this test can fail, ...
    seen, asked = opened(f"<!doctype html><html><head></head><body>{ATTACK}</body></html>")
    assert seen.text[0] == "owned"
    assert asked
    # ... and on one that escapes nothing but has our policy, that the policy alone would hold.
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    seen, asked = opened(f"<!doctype html><html><head>{policy}</head><body>{ATTACK}</body></html>")
    assert "title" not in seen.tags
    assert not asked


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_live_page_renews_itself_in_a_browser_and_runs_no_other_script(tmp_path):
    calls = []

    def make():
        calls.append(1)
        return page(hostile()._replace(title=f"look {len(calls)}{ATTACK}"), live=True)

    with serve(make) as server:
        # Virtual time lets the page's three seconds pass at once.
        seen = parsed(chromium(server.url, tmp_path, "--virtual-time-budget=8000"))
    assert len(calls) >= 2
    assert re.match(r"look [2-9]<script>", seen.text[0])
    assert seen.tags.count("script") == 1
    assert "img" not in seen.tags
    assert "live, last changed" in " ".join(seen.text)


# --- the server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with serve(lambda: page(contents(), live=True)) as running:
        yield running


def ask(server, method="GET", path="/", host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": host or f"127.0.0.1:{server.port}", **headers}.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_the_page_is_served_with_headers_that_keep_others_out(server, capfd):
    answer, body = ask(server)
    assert (answer.status, body) == (200, page(contents(), live=True))
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Server"] == "opvi"
    answer, body = ask(server, "HEAD")
    assert (answer.status, body) == (200, "")
    assert int(answer.headers["Content-Length"]) > 1000
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        ("GET", "/", "localhost", 200),
        ("GET", "/", "LOCALHOST:1234", 200),  # a port forwarded from elsewhere
        ("GET", "/", "evil.example", 421),
        ("GET", "/", "127.0.0.1.evil.example:80", 421),
        ("GET", "/", "localhost@evil.example", 421),
        ("GET", "/", " ", 421),
        ("GET", "/etc/passwd", None, 404),
        ("GET", "/../../../etc/passwd", None, 404),
        ("GET", "/?x=1", None, 404),
        ("GET", "http://evil.example/", None, 404),
        ("POST", "/", None, 405),
        ("DELETE", "/", None, 405),
        ("OPTIONS", "*", None, 405),
        ("NONSENSE", "/", None, 405),
    ],
)
def test_only_the_page_is_answered_and_only_by_its_own_name(server, method, path, host, status):
    answer, body = ask(server, method, path, host)
    assert answer.status == status
    if status != 200:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert "root:" not in body
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_requests_that_are_none_do_no_harm(server, capfd):
    for sent in (
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /\r\n\r\n",
        b"",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as link:
            link.sendall(sent)
            link.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while part := link.recv(4096):
                    answer += part
            except ConnectionResetError:
                pass
        assert b"200" not in answer[:20]
    assert ask(server)[0].status == 200
    assert capfd.readouterr() == ("", "")


def other_addresses():
    """Of this machine, apart from loopback; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        try:
            link.connect(("192.0.2.1", 9))
            return [link.getsockname()[0]]
        except OSError:
            return []


def test_only_this_computer_is_listened_to(server):
    assert server.socket.getsockname() == ("127.0.0.1", server.port)
    assert server.url == f"http://127.0.0.1:{server.port}/"
    for address in ["127.0.0.2", *other_addresses()]:
        with pytest.raises(OSError, match="refused|unreachable|assign|timed out"):
            socket.create_connection((address, server.port), timeout=2)


def test_an_error_in_the_page_is_shown_and_survived(capfd):
    trouble = [ValueError("<script>no</script> \ud800"), None]

    def make():
        error = trouble.pop(0)
        if error:
            raise error
        return "fine"

    with serve(make) as server:
        answer, body = ask(server)
        assert answer.status == 500
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert "learning continues" in body
        assert "ValueError" in body
        answer, body = ask(server)
        assert (answer.status, body) == (200, "fine")
    assert capfd.readouterr() == ("", "")


def test_pages_are_made_one_at_a_time():
    inside, most = [], []

    def make():
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.02)
        inside.pop()
        return "page"

    with serve(make) as server:
        threads = [threading.Thread(target=ask, args=(server,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(most) == {1}
    assert len(most) <= 6


def test_waiting_requests_share_a_page_and_making_it_leaves_time_for_learning():
    made, began = [], time.monotonic()

    def make():
        made.append(time.monotonic())
        threading.Event().wait(0.1)
        return f"page {len(made)}"

    with serve(make) as server:
        while time.monotonic() < began + 1.0:
            answer, body = ask(server)
            assert (answer.status, body) == (200, f"page {len(made)}")
    assert 1 < len(made) <= 3  # a fifth of the time


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_connections_are_bounded_and_the_page_is_there_afterwards(count, capfd):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 500:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 500), hard))
    with serve(lambda: "page") as server:
        before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
        with ThreadPoolExecutor(64) as pool:  # where one has to knock again a second later, others go on
            held = list(pool.map(socket.create_connection, [("127.0.0.1", server.port)] * count))
        for one in held[:MOST_CONNECTIONS]:
            one.send(b"GET / HT")  # and no more: a slow one
        time.sleep(0.3)
        during = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
        assert during[0] - before[0] <= count + MOST_CONNECTIONS + 2  # so many are the test's own
        assert during[1] - before[1] <= MOST_CONNECTIONS
        for one in held:
            one.close()
        time.sleep(0.3)
        assert ask(server)[1] == "page"
    assert capfd.readouterr() == ("", "")


def test_ports():
    server = serve(lambda: "page")
    with pytest.raises(OSError, match=f"`port` is {server.port}, but another program listens there. Give another one"):
        serve(lambda: "", server.port)
    for port in (-1, 65536, 1.5, "80", True):
        with pytest.raises(ValueError, match="whole number from 0"):
            serve(lambda: "", port)
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        ask(server)
    with serve(lambda: "again", server.port) as again:  # the port is free at once
        assert ask(again)[1] == "again"


# --- effects and particles ------------------------------------------------------------------------

FEATURES = ["size", "size is missing", "colour=red", "colour=<blue>", "when: hour sin", "when: hour cos", "idle"]
ORIGIN = ["size", "size", "colour", "colour", "when", "when", "idle"]


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    size, missing = rng.uniform(-2, 2, count), rng.random(count) < 0.1
    colour, hour = rng.integers(0, 3, count), rng.uniform(0, 24, count)
    turn = 2 * np.pi * hour / 24
    columns = [
        np.where(missing, 0, size),
        missing,
        colour == 0,
        colour == 1,
        np.sin(turn),
        np.cos(turn),
        np.zeros(count),
    ]
    x = np.stack([np.asarray(column, np.float32) for column in columns], 1)
    y = 3 * x[:, 0] + 2 * missing + 4 * (colour == 0) + np.sin(turn) + 0.1 * rng.normal(size=count)
    return x, y.astype(np.float32)


@pytest.fixture(scope="module")
def linear():
    x, y = rows(1200)
    tracker = opvi.watched(opvi.regressor(len(FEATURES), hidden=(), particles=4))
    state, _ = opvi.run(tracker, opvi.stream((x, y), batch_size=20), key=0)
    return tracker, state, x


@pytest.fixture(scope="module")
def classes():
    x, y = rows(1200)
    labels = np.digitize(y, [-2, 3]).astype(np.int32)
    tracker = opvi.classifier(len(FEATURES), 3, hidden=(), half_life=5000.0)
    state, _ = opvi.run(tracker, opvi.stream((x, labels), batch_size=20), key=0)
    return tracker, state, x


def test_effects_of_a_linear_model_are_its_slopes(linear):
    found = {effect.feature: effect for effect in effects(*linear, FEATURES, ORIGIN)}
    assert list(found) == [
        "size",
        "colour",
        "when: hour",
    ]  # the strongest first; a column that never varies is left out
    size, colour, hour = found.values()
    # The noise of 0.1 over 1,200 rows leaves slopes uncertain by some 0.01; the loss of short memories is below 0.1.
    slope = np.polyfit(size.values, size.mean[0], 1)[0]
    assert slope == pytest.approx(3, abs=0.1)
    at_zero = np.interp(0, size.values, size.mean[0])
    assert size.missing[0][0] - at_zero == pytest.approx(2, abs=0.3)
    assert len(size.seen) == 9
    assert colour.values == ["red", "<blue>", "(anything else)"]
    assert colour.mean[0][0] - colour.mean[0][1] == pytest.approx(4, abs=0.2)
    assert colour.mean[0][2] == pytest.approx(colour.mean[0][1], abs=0.2)
    assert hour.values[0] == 0
    assert hour.values[-1] == 24
    wave = np.sin(2 * np.pi * np.array(hour.values) / 24)
    np.testing.assert_allclose(hour.mean[0] - np.mean(hour.mean[0][:-1]), wave, atol=0.2)
    for effect in found.values():
        assert (np.array(effect.low) <= effect.mean).all()
        assert (np.array(effect.mean) <= effect.high).all()
    # 3·size, where a tenth is 0: a deviation of 3·√(0.9·4/3).
    assert size.strength == pytest.approx(3 * math.sqrt(4 / 3), rel=0.1)
    parsed(page(contents(effects=list(found.values()))))


def test_effects_are_those_of_the_predictive_mean(linear):
    sampler, state, x = linear
    for effect in effects(sampler, state, x[:200], FEATURES, ORIGIN):
        assert (np.array(effect.high) > effect.low).all()
    size = effects(sampler, state, x[:200], FEATURES, ORIGIN)[0]
    rows = spread_out(x[:200], 64)
    for value, mean in zip(size.values, size.mean[0], strict=True):
        there = rows.copy()
        there[:, :2] = value, 0
        assert mean == pytest.approx(float(sampler.predict(state, there).mean().mean()), abs=1e-3)


def test_effects_of_classes_are_probabilities(classes):
    names = ["low", "middle", "<high>"]
    found = effects(*classes, FEATURES, ORIGIN, names)
    assert found[0].feature == "size"
    assert found[0].lines == names
    mean, low, high = (np.array(part) for part in (found[0].mean, found[0].low, found[0].high))
    np.testing.assert_allclose(mean.sum(0), 1, atol=1e-4)
    assert (low >= 0).all()
    assert (high <= 1).all()
    assert mean[2, -1] - mean[2, 0] > 0.5  # a large size makes a high label likely
    parsed(page(labelled(effects=found, classes=names)))


def test_effects_ask_for_columns_that_fit(linear):
    tracker, state, x = linear
    assert effects(tracker, state, x[:0], FEATURES, ORIGIN) == []
    assert effects(tracker, state, x[:1], FEATURES, ORIGIN) == []  # nothing varies
    with pytest.raises(ValueError, match="`x` has shape .*but all must be about the same columns"):
        effects(tracker, state, x, FEATURES[:-1], ORIGIN)


def test_effects_of_two_known_particles_among_many_columns():
    # Two particles of weights 1/4 and 3/4 that say 2·x and 4·x of the 58th of 60 columns: the mean is 3.5·x, and
    # 90 % of their weight reaches from one to the other. Of 60 columns 48 are kept, this one among them.
    class TwoLines:
        def predict(self, state, x):
            mean = jnp.stack([2 * x[:, 57], 4 * x[:, 57]])
            return opvi.Predictive(Normal(mean, jnp.ones_like(mean)), jnp.log(jnp.array([0.25, 0.75])))

    x = np.random.default_rng(0).normal(size=(300, 60)).astype(np.float32)
    names = [f"c{i}" for i in range(60)]
    found = effects(TwoLines(), None, x, names, names)
    assert len(found) == 48
    first, *rest = found
    assert first.feature == "c57"
    v = np.array(first.values)
    np.testing.assert_allclose(first.mean[0], 3.5 * v, rtol=1e-4)
    np.testing.assert_allclose(first.low[0], np.minimum(2 * v, 4 * v), rtol=1e-4)
    np.testing.assert_allclose(first.high[0], np.maximum(2 * v, 4 * v), rtol=1e-4)
    assert max(effect.strength for effect in rest) < 1e-6


def test_effects_of_other_columns():
    from opvi.app.report._effects import _pieces

    rng = np.random.default_rng(0)
    hashed = np.zeros((50, 3), np.float32)
    hashed[np.arange(50), rng.integers(0, 3, 50)] = rng.choice([-1, 1], 50)
    week = 2 * np.pi * rng.integers(0, 7, 50) / 7
    x = np.stack([*hashed.T, np.sin(week), np.cos(week), rng.integers(0, 2, 50), np.full(50, 2)], 1).astype(np.float32)
    names = ["t: hash 1", "t: hash 2", "t: hash 3", "d: weekday sin", "d: weekday cos", "flag", "same"]
    hashes, weekday, flag, same = _pieces(x, names, ["t", "t", "t", "d", "d", "flag", "same"])
    assert len(hashes.values) == 6
    assert len(weekday.values) == 7
    np.testing.assert_allclose(weekday.settings[2], [np.sin(4 * np.pi / 7), np.cos(4 * np.pi / 7)], atol=1e-6)
    assert set(np.round(weekday.here, 2)) <= set(range(7))
    assert flag.values == ["0", "1"]
    assert same.values == [2.0]


def test_weights_of_a_linear_model(linear):
    tracker, state, x = linear
    made = projection(tracker, state, x, FEATURES)
    by_name = {one.name: one for one in made.coefficients}
    # Per standard deviation of the column, in units of y.
    assert by_name["size"].mean == pytest.approx(3 * x[:, 0].std(), rel=0.05)
    assert by_name["colour=red"].mean == pytest.approx(4 * x[:, 2].std(), rel=0.05)
    assert all(one.low <= one.mean <= one.high for one in made.coefficients)
    assert made.groups == ["linear model"] * 4
    assert sum(made.weights) == pytest.approx(1)
    parsed(page(contents(posterior=made)))


def test_weights_of_linear_classes(classes):
    tracker, state, x = classes
    made = projection(tracker, state, x, FEATURES, ["low", "middle", "high"])
    by_name = {one.name: one for one in made.coefficients}
    assert by_name["size → high"].mean > 0 > by_name["size → low"].mean
    assert len(made.coefficients) == 3 * len(FEATURES)
    assert made.groups == ["linear filter"]
    with pytest.raises(ValueError, match="at least one row"):
        projection(tracker, state, x[:0])


def test_particles_of_networks_by_what_they_predict():
    x, _ = rows(60)
    tracker = opvi.regressor(len(FEATURES), hidden=(3,), particles=5)
    state = tracker.init(jax.random.key(0))
    made = projection(tracker, state, x, FEATURES)
    assert made.groups == ["tanh network", "tanh network", "ReLU network", "ReLU network", "sine network"]
    assert np.isfinite(made.points).all()
    assert made.coefficients == []


def test_the_plane_keeps_distances():
    flat = np.random.default_rng(0).normal(size=(6, 2)) @ np.random.default_rng(1).normal(size=(2, 9))
    even = np.full(6, 1 / 6)
    points, shares = plane(flat, even)
    apart = np.linalg.norm(flat[:, None] - flat[None], axis=-1) / 3
    np.testing.assert_allclose(np.linalg.norm(points[:, None] - points[None], axis=-1), apart, atol=1e-10)
    assert sum(shares) == pytest.approx(1)
    heavy, _ = plane(np.array([[0.0, 0, 9], [1, 0, 0], [-1, 0, 0]]), np.array([0, 0.5, 0.5]))
    np.testing.assert_allclose(np.abs(heavy[:, 0]), [0, 1 / math.sqrt(3), 1 / math.sqrt(3)], atol=1e-12)
    assert plane(np.ones((3, 4)), np.ones(3))[1] == (0, 0)
    assert plane(np.ones((1, 1)), np.ones(1))[0].tolist() == [[0, 0]]
    broken = flat.copy()
    broken[0] = NAN
    assert np.isnan(plane(broken, even)[0][0]).all()
    assert np.isfinite(plane(broken, even)[0][1:]).all()


# --- what people look for -------------------------------------------------------------------------


def test_absolute_errors_columns_and_classes_are_on_the_page():
    told = [ColumnTold("cost", "number", 1, 0.25, 0.1), ColumnTold("shop", "levels", 3, 0.0, 2.5),
            ColumnTold("day", "date", 5, 0.0, NAN), ColumnTold("flag", "number", 1, 0.0, math.inf)]  # fmt: skip
    text = page(contents(figures={"mae": 0.5, "r2": 0.875}, columns=told))
    assert "Mean absolute error" in text
    assert "R² is 0.875" in text
    moved = [text.index(word) for word in (">flag<", ">shop<", ">cost<", ">day<")]
    assert moved == sorted(moved)  # what moved most comes first
    assert "was constant" in text
    assert "2.5 sd" in text
    assert "25.0 %" in text.replace("\u00a0", " ")
    table = {"a": {"a": 8, "b": 2, "c": 0}, "b": {"a": 5, "b": 5, "c": 10}, "c": {"a": 0, "b": 0, "c": 0}}
    named = page(labelled(figures={"confusion": table}))
    named = named.replace("\u00a0", " ")
    assert "c (50.0 %), a (25.0 %)" in named  # what b was taken for
    assert "80.0 %" in named
    assert "Area under ROC" not in named
    assert "Area under ROC" in page(labelled(figures={"auc": 0.75}))
