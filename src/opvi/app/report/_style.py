"""The page's style sheet, and the script of the live page."""

import base64
import hashlib

# Okabe and Ito's colours, which stay apart under every common colour blindness; lighter ones on a dark page.
CSS = """
:root {
  color-scheme: light dark;
  --ground: #f7f7f5; --card: #ffffff; --ink: #1c2329; --quiet: #55606a; --edge: #dcdfe2; --grid: #e7e9eb;
  --a: #0072b2; --b: #d55e00; --c: #00805d; --d: #a8467f; --e: #946200; --f: #2b7fb8;
  --soft: #cfe2f0; --alarm: #d55e00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #12161a; --card: #1a2026; --ink: #e6e9ec; --quiet: #a3aeb8; --edge: #2f3841; --grid: #29313a;
    --a: #56b4e9; --b: #e69f00; --c: #2fc79a; --d: #e2a0c8; --e: #f0e442; --f: #8fc7ec;
    --soft: #24445a; --alarm: #ff8c42;
  }
}
@media print {
  :root {
    --ground: #ffffff; --card: #ffffff; --ink: #000000; --quiet: #444444; --edge: #bbbbbb; --grid: #e3e3e3;
    --a: #0072b2; --b: #d55e00; --c: #00805d; --d: #a8467f; --e: #946200; --f: #2b7fb8;
    --soft: #cfe2f0; --alarm: #d55e00;
  }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  figure, .figures > div, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
  .live { display: none; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 48px; }
h1, h2, h3 { line-height: 1.25; font-weight: 600; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 44px 0 4px; }
h3 { font-size: 0.95rem; margin: 0 0 6px; }
p { margin: 6px 0; max-width: 74ch; overflow-wrap: anywhere; }
.lead, figcaption, .note, dd small { color: var(--quiet); }
.verdict { border-left: 3px solid var(--a); padding-left: 10px; }
.warning { border-left: 3px solid var(--alarm); padding: 2px 0 2px 10px; }
.badge {
  display: inline-block; border: 1px solid var(--edge); border-radius: 99px; padding: 0 10px; margin-right: 6px;
  font-size: 0.82rem; color: var(--quiet); background: var(--card);
}
.live { color: var(--c); }
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 10px; margin: 20px 0 0;
}
.figures > div, figure, .panel {
  background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 12px 14px;
}
.figures dt { font-size: 0.82rem; color: var(--quiet); }
.figures dd { margin: 0; font-size: 1.55rem; font-weight: 600; line-height: 1.3; }
.figures .long { font-size: 1.05rem; overflow-wrap: anywhere; }
.figures dd small { display: block; font-size: 0.8rem; font-weight: 400; line-height: 1.35; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 14px; }
.charts.three { grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 265px), 1fr)); gap: 12px; }
.charts, .small { margin-top: 12px; align-items: start; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: 0.86rem; line-height: 1.45; margin-top: 4px; overflow-wrap: anywhere; }
figcaption p { margin: 4px 0; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 4px; padding: 0; }
.legend li { font-size: 0.82rem; }
.legend li { overflow-wrap: anywhere; min-width: 0; }
.legend svg { width: 26px; height: 12px; display: inline-block; margin-right: 5px; vertical-align: -1px; }
svg { display: block; width: 100%; height: auto; }
svg.inside { overflow: hidden; }
svg text { fill: var(--ink); font-size: 11.5px; }
svg .tick, svg .name { fill: var(--quiet); }
.charts.three svg text { font-size: 13.5px; }
.grid { stroke: var(--grid); } .axis { stroke: var(--quiet); }
polyline { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
polyline.thin { stroke-width: 1; opacity: 0.55; }
.a { --now: var(--a); } .b { --now: var(--b); } .c { --now: var(--c); }
.d { --now: var(--d); } .e { --now: var(--e); } .f { --now: var(--f); }
polyline, .whisker, .reference { stroke: var(--now, var(--quiet)); }
polyline.b { stroke-dasharray: 7 3; } polyline.c { stroke-dasharray: 2 3.5; }
.whisker { stroke-width: 2.2; opacity: 0.6; }
.reference { stroke-dasharray: 5 4; stroke-width: 1.4; }
.band { fill: var(--now); opacity: 0.2; }
.noise { fill: var(--quiet); opacity: 0.18; }
.dot { fill: var(--now); } .mark { fill: var(--now); stroke: var(--card); stroke-width: 1; opacity: 0.9; }
.bar { fill: var(--a); opacity: 0.75; }
.alarm { stroke: var(--alarm); stroke-width: 1.4; } .flag { fill: var(--alarm); }
.many .alarm { opacity: 0.25; } .many .flag { opacity: 0.5; }
.rug { stroke: var(--quiet); stroke-width: 1.2; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.88rem; width: 100%; }
caption { text-align: left; color: var(--quiet); padding-bottom: 4px; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--edge); vertical-align: top; }
th { font-weight: 600; } td { overflow-wrap: anywhere; } tbody th { font-weight: 400; }
tbody th { min-width: 6.5em; overflow-wrap: anywhere; }
td.amount, th.amount { text-align: right; white-space: nowrap; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 14px; }
.tables { margin-top: 12px; align-items: start; }
pre {
  background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 10px 14px; margin: 8px 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 0.88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas,
  "Liberation Mono", monospace;
}
details { margin-top: 12px; } summary { cursor: pointer; color: var(--quiet); }
details > .small, details > .wide { margin-top: 10px; }
footer { margin-top: 40px; color: var(--quiet); font-size: 0.82rem; }
@media (max-width: 460px) {
  main { padding: 18px 12px 32px; }
  h1 { font-size: 1.4rem; }
  .figures { grid-template-columns: 1fr 1fr; }
  .figures > div, figure, .panel { padding: 10px; }
  .figures dd { font-size: 1.3rem; }
  .charts svg text, .charts.three svg text { font-size: 13.5px; }
  .small svg text { font-size: 9px; }
}
"""

# Takes over the page's main part every few seconds. Scripts in it would not run: they are parsed, not executed, and
# the page's policy allows this one alone, by its hash.
SCRIPT = """
const wait = 3000;
const say = words => { const place = document.getElementById("live"); if (place) place.textContent = words; };
async function renew() {
  try {
    const answer = await fetch("/", {cache: "no-store"});
    if (!answer.ok) throw new Error();
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    const open = [...document.querySelectorAll("details")].map(one => one.open);
    document.querySelector("main").replaceWith(document.adoptNode(next.querySelector("main")));
    document.querySelectorAll("details").forEach((one, index) => { one.open = one.open || open[index]; });
    document.title = next.title;
    say("live, last changed " + new Date().toLocaleTimeString());
  } catch { say("no answer: the learner has ended or is busy; this is its last picture"); }
  setTimeout(renew, wait);
}
setTimeout(renew, wait);
"""
SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
LIVE_POLICY = f"{POLICY}; script-src 'sha256-{SCRIPT_HASH}'; connect-src 'self'"
