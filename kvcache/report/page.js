"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const read = (id) => JSON.parse(byId(id).textContent);
  const number = (value) => value.toLocaleString("en-US");
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  // -- light and dark

  const root = document.documentElement;
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  let printing = false;
  const isDark = () => !printing && (chosen === null ? systemDark.matches : chosen === "dark");

  function applyTheme() {
    root.dataset.theme = isDark() ? "dark" : "light";
    byId("theme").textContent = isDark() ? "Light" : "Dark";
    for (const place of document.querySelectorAll(".chart.drawn")) {
      Plotly.relayout(place, themed(charts[place.dataset.chart].layout));
    }
  }

  function themed(layout) {
    const style = getComputedStyle(root);
    const [ink, line, wash] = ["--ink", "--line", "--wash"].map((name) => style.getPropertyValue(name).trim());
    const changes = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": ink,
      "hoverlabel.bgcolor": wash, "hoverlabel.bordercolor": line, "hoverlabel.font.color": ink,
    };
    for (const axis of ["xaxis", "yaxis"]) {
      if (!(axis in layout)) continue;
      Object.assign(changes, { [`${axis}.gridcolor`]: line, [`${axis}.zerolinecolor`]: line, [`${axis}.linecolor`]: line });
    }
    return changes;
  }

  // -- charts

  const charts = read("charts");
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  const PAPER = 680;
  const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };

  function laidOut(given) {
    const layout = structuredClone(given);
    layout.font = { family: FONT, size: 13 };
    layout.margin ??= { l: 8, r: 8, t: 8, b: 8 };
    layout.legend = { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left", traceorder: "normal" };
    layout.hoverlabel = { font: { family: FONT, size: 13 } };
    for (const axis of ["xaxis", "yaxis"]) {
      if (!layout[axis]) continue;
      layout[axis].fixedrange = axis === "yaxis";
      if (layout[axis].title) layout[axis].title.font = { size: 13 };
    }
    for (const [path, value] of Object.entries(themed(given))) {
      const names = path.split(".");
      const last = names.pop();
      let place = layout;
      for (const name of names) place = place[name] ??= {};
      place[last] = value;
    }
    return layout;
  }

  function draw(place) {
    if (place.classList.contains("drawn")) return;
    place.classList.add("drawn");
    const { data, layout } = charts[place.dataset.chart];
    const full = laidOut(layout);
    // The legend of a narrow chart takes a line for each name.
    if (place.clientWidth < 500 && data.length > 2) full.height += 18 * data.length;
    Plotly.newPlot(place, data, full, CONFIG);
    place.on("plotly_click", ({ points }) => {
      const marked = points.find((point) => point.data.customdata !== undefined);
      if (marked !== undefined) showEviction(marked.customdata);
    });
  }

  function showEviction(at) {
    const bill = byId(`eviction-${at}`);
    for (let place = bill; place; place = place.parentElement.closest("details")) place.open = true;
    bill.querySelector("summary").focus();
    bill.scrollIntoView({ block: "center" });
  }

  const places = [...document.querySelectorAll(".chart")];
  function drawNext() {
    // One at a time, so that the page answers meanwhile.
    const place = places.find((each) => !each.classList.contains("drawn"));
    if (place === undefined) return;
    draw(place);
    setTimeout(drawNext);
  }

  // -- requests

  const lanes = byId("lanes") && read("lanes-data");
  const [WAITING, PREFILL, , AWAY] = [0, 1, 2, 3];
  const PHASES = ["waiting", "prefill", "decode", "away"];
  const KINDS = ["primary", "secondary", "again", "lost", "computed"];
  const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

  function spans(lane) {
    const marks = lanes.marks[lane];
    const found = [];
    for (let at = 0; at < marks.length; at += 2) {
      const [phase, start] = [marks[at], marks[at + 1]];
      const isLast = at + 2 === marks.length;
      if (!(isLast && phase === AWAY)) found.push([phase, start, isLast ? lanes.end : marks[at + 3]]);
    }
    return found;
  }

  const begin = (lane) => lanes.marks[lane][1];
  const during = (lane, phase) => sum(spans(lane).filter(([each]) => each === phase).map(([, start, stop]) => stop - start));
  const length = (lane) => sum(spans(lane).map(([, start, stop]) => stop - start));
  const computed = (lane) => sum(lanes.tokens[lane].slice(2));
  const again = (lane) => sum(lanes.tokens[lane].slice(2, 4));
  const ORDERS = {
    "most computed": (lane) => -computed(lane),
    "most computed again": (lane) => -again(lane),
    "longest waiting": (lane) => -during(lane, WAITING),
    "longest prefill": (lane) => -during(lane, PREFILL),
    "longest in all": (lane) => -length(lane),
    "in order of time": begin,
  };
  const seconds = (ms) => {
    if (ms < 120_000) return `${(ms / 1000).toLocaleString("en-US", { maximumFractionDigits: 3 })} s`;
    const units = [["d", 86_400_000], ["h", 3_600_000], ["min", 60_000], ["s", 1000]];
    const first = units.findIndex(([, length]) => ms >= length);
    return units.slice(first, first + 2).map(([unit, length], at) =>
      `${number(Math.floor((at ? ms % units[first][1] : ms) / length))} ${unit}`).join(" ");
  };

  const [order, most, scale, search] = ["order", "most", "scale", "search"].map(byId);

  function showLanes() {
    const wanted = search.value.trim();
    const all = lanes.ids.map((_, lane) => lane).filter((lane) => lanes.ids[lane].includes(wanted));
    const key = ORDERS[order.value];
    const keys = new Map(all.map((lane) => [lane, key(lane)]));
    all.sort((one, other) => keys.get(one) - keys.get(other) || one - other);
    const shown = all.slice(0, Number(most.value));
    const fromStart = scale.value === "since the log began";
    const stop = (lane) => begin(lane) + length(lane) - (fromStart ? 0 : begin(lane));
    const longest = Math.max(1, ...shown.map(stop));
    const widest = Math.max(1, ...shown.map((lane) => sum(lanes.tokens[lane])));
    const items = shown.map((lane) => laneItem(lane, fromStart ? 0 : begin(lane), longest, widest));
    byId("lanes").replaceChildren(...items);
    byId("shown").textContent = !all.length ? `No request's id contains “${wanted}”.` :
      `${number(shown.length)} of ${number(all.length)} requests; the upper bars are ${number(widest)} tokens wide, the lower ones ${seconds(longest)}`;
  }

  function laneItem(lane, zero, longest, widest) {
    const tokens = lanes.tokens[lane];
    const total = sum(tokens);
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    KINDS.forEach((kind, at) => bar.append(part(kind, 0, tokens[at] / widest)));
    const time = make("span", { class: "bar time", "aria-hidden": "true" });
    for (const [phase, start, stop] of spans(lane)) {
      time.append(part(PHASES[phase], (start - zero) / longest, (stop - start) / longest));
    }
    const reused = total ? ((100 * (tokens[0] + tokens[1])) / total).toFixed(1) : "0.0";
    const recomputed = again(lane) ? `, ${number(again(lane))} computed again` : "";
    const what = `${number(total)} tokens, ${reused} % reused${recomputed}; at ${seconds(begin(lane))}, ${seconds(length(lane))} long`;
    const panel = make("div", { class: "explanation", id: `explanation-${lane}`, hidden: "" });
    const button = make(
      "button",
      { type: "button", class: "lane", "aria-expanded": "false", "aria-controls": panel.id },
      make("span", {}, make("span", { class: "id" }, lanes.ids[lane]), make("br"), make("span", { class: "what" }, what)),
      make("span", {}, bar, time),
    );
    button.addEventListener("click", () => toggle(lane, button, panel));
    return make("li", {}, button, panel);
  }

  function part(kind, left, width) {
    const piece = make("i", { class: kind });
    piece.style.left = `${100 * left}%`;
    piece.style.width = `${100 * width}%`;
    return piece;
  }

  function toggle(lane, button, panel) {
    const opens = panel.hidden;
    if (opens && !panel.hasChildNodes()) {
      panel.append((byId(`explained-${lane}`) ?? byId("not-explained")).content.cloneNode(true));
    }
    panel.hidden = !opens;
    button.setAttribute("aria-expanded", String(opens));
  }

  // -- at last

  byId("theme").hidden = false;
  byId("theme").addEventListener("click", () => {
    chosen = isDark() ? "light" : "dark";
    applyTheme();
  });
  systemDark.addEventListener("change", applyTheme);
  function print(now) {
    printing = now;
    if (now) places.forEach(draw);
    applyTheme();
    const width = now ? { width: PAPER, autosize: false } : { width: null, autosize: true };
    for (const place of document.querySelectorAll(".chart.drawn")) Plotly.relayout(place, width);
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  applyTheme();
  setTimeout(drawNext);
  if (lanes) {
    for (const control of [order, most, scale, search]) control.addEventListener("input", showLanes);
    byId("controls").hidden = false;
    showLanes();
  }
})();
