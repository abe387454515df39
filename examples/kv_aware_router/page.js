"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const number = (value) => Math.round(value).toLocaleString("en-US");
  const percent = (value) => (100 * value).toFixed(1) + " %";
  const time = (ms) => (ms >= 1000 ? (ms / 1000).toFixed(2) + " s" : Math.round(ms) + " ms");
  const ROUNDS = ["#8c8c8c", "#0072b2", "#d55e00"];
  const WORKERS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a500", "#8c8c8c"];
  const own = (colors, index) => colors[index % colors.length];
  const make = (tag, text = "", name = "") => {
    const element = document.createElement(tag);
    if (text) element.textContent = text;
    if (name) element.className = name;
    return element;
  };
  let state = null;

  // -- light and dark

  const root = document.documentElement;
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  function applyTheme() {
    const dark = chosen === null ? systemDark.matches : chosen;
    root.dataset.theme = dark ? "dark" : "light";
    byId("theme").textContent = dark ? "Light" : "Dark";
    if (state) draw();
  }
  byId("theme").addEventListener("click", () => { chosen = root.dataset.theme !== "dark"; applyTheme(); });
  systemDark.addEventListener("change", applyTheme);

  // -- the table of rounds

  const COLUMNS = [
    ["", (each) => each.name],
    ["hit rate", (each) => percent(each.summary.hit_rate)],
    ["computed", (each) => number(each.summary.computed_tokens)],
    ["saved", (each) => number(each.summary.cached_tokens)],
    ["TTFT p50", (each) => time(each.summary.ttft_ms["50"])],
    ["p99", (each) => time(each.summary.ttft_ms["99"])],
    ["busiest", (each) => each.summary.imbalance.toFixed(2) + " × mean"],
    ["served", (each) => number(each.summary.requests)],
    ["elsewhere", (each) => number(each.summary.retried)],
    ["lost", (each) => number(each.summary.lost)],
  ];
  function showRounds() {
    const head = make("tr");
    head.append(...COLUMNS.map(([name]) => make("th", name)));
    const rows = state.rounds.map((each, index) => {
      const row = make("tr");
      row.append(...COLUMNS.map(([, value]) => make("td", value(each))));
      const mark = make("i");
      mark.style.background = own(ROUNDS, index);
      row.firstChild.prepend(mark);
      return row;
    });
    byId("rounds").replaceChildren(head, ...rows);
  }

  // -- the workers, as they are now

  function showWorkers(round) {
    const now = round.samples[round.samples.length - 1];
    byId("workers-heading").textContent = "Workers in " + round.name;
    byId("workers").replaceChildren(...state.workers.map((name, index) => {
      const card = make("li", "", now.up[index] ? "" : "down");
      card.style.setProperty("--own", own(WORKERS, index));
      const meter = make("meter");
      meter.max = state.blocks;
      meter.value = now.blocks[index];
      meter.setAttribute("aria-label", "blocks known of " + name);
      card.append(
        make("strong", name + (now.up[index] ? "" : ": gone")),
        make("small", number(now.running[index]) + " requests, " + "load " + number(now.load[index]) + " tokens"),
        make("small", number(now.blocks[index]) + " of " + number(state.blocks) + " blocks, by its feed"),
        meter,
      );
      return card;
    }));
  }

  // -- charts

  const seconds = (round) => round.samples.map((each) => each.ms / 1000);
  const line = (name, x, y, color) => ({
    name, x, y, type: "scatter", mode: "lines", line: { color, width: 2 },
  });
  const perRound = (value) => state.rounds.map((each, index) =>
    line(each.name, seconds(each), each.samples.map(value), own(ROUNDS, index)));
  const perWorker = (key) => {
    const round = state.rounds[state.rounds.length - 1];
    return state.workers.map((name, index) => {
      const values = round.samples.map((each) => each[key][index]);
      const trace = line(name, seconds(round), values, own(WORKERS, index));
      trace.line = { ...trace.line, shape: "hv", width: 1.5 };
      return trace;
    });
  };
  const distribution = () => state.rounds.map((each, index) => line(
    each.name,
    each.ttft.map((ms) => ms / 1000),
    each.ttft.map((_, place) => (100 * (place + 1)) / each.ttft.length),
    own(ROUNDS, index),
  ));
  const CHARTS = [
    ["Hit rate so far", () => perRound((each) => 100 * each.hit_rate), "% of prompt tokens", "s"],
    ["Prompt tokens computed", () => perRound((each) => each.computed), "tokens", "s"],
    ["Time to first token", distribution, "% of requests", "within s", "log"],
    ["Load, last round", () => perWorker("load"), "tokens", "s"],
    ["Blocks known by the feed, last round", () => perWorker("blocks"), "blocks", "s"],
    ["Requests at each worker, last round", () => perWorker("running"), "requests", "s"],
  ];
  for (const [title] of CHARTS) {
    const figure = make("figure");
    figure.append(make("figcaption", title), make("div", "", "chart"));
    byId("charts").append(figure);
  }
  function drawCharts() {
    const style = getComputedStyle(root);
    const [ink, grid] = ["--ink", "--line"].map((name) => style.getPropertyValue(name).trim());
    CHARTS.forEach(([, traces, y, x, kind], index) => {
      const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true };
      Plotly.react(document.querySelectorAll(".chart")[index], traces(), {
        margin: { l: 8, r: 8, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: ink, size: 12 }, showlegend: false, hovermode: "x unified",
        xaxis: { ...axis, title: { text: x }, type: kind || "linear" },
        yaxis: { ...axis, title: { text: y }, rangemode: "tozero" },
      }, { displayModeBar: false, responsive: true });
    });
  }

  function showNotes() {
    byId("notes").replaceChildren(...state.rounds.flatMap((round) => round.notes.map(([ms, text]) =>
      make("li", round.name + ", " + (ms / 1000).toFixed(1) + " s: " + text))));
  }

  function draw() {
    if (!state.rounds.length) return;
    const round = state.rounds[state.rounds.length - 1];
    const last = round.samples[round.samples.length - 1];
    byId("status").textContent = round.name + ": " + number(last.requests) + " of " + number(state.requests) +
      " requests served after " + (last.ms / 1000).toFixed(0) + " s of simulated time";
    showRounds();
    showWorkers(round);
    drawCharts();
    showNotes();
  }

  async function poll() {
    try {
      state = await (await fetch("/state")).json();
      draw();
    } catch {
      byId("status").textContent = "The balancer has ended; this is the last that was heard of it.";
    }
    setTimeout(poll, 1000);
  }

  const kept = JSON.parse(byId("state").textContent);
  if (kept) state = kept;
  applyTheme();
  if (!kept) poll();
})();
