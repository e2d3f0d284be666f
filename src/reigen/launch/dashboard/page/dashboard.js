// Page of a job's dashboard: messages of the launcher in, a table, charts and events out.
"use strict";

const MAX_EVENTS = 200;
const STALE_SECONDS = 5;
const CHART_SECONDS = 2;
const $ = (id) => document.getElementById(id);

// the fields of a point, in order (launch/dashboard/history.py)
const FIELDS = ["seconds", "steps", "samples", "compute", "transfer", "wait", "shared_memory", "network", "mpi", "device",
  "memory", "most_memory", "ranks"];
const CHARTS = [
  { title: "Steps a second", lines: [["steps/s", "steps", "accent"]], format: number },
  { title: "Samples a second", lines: [["samples/s", "samples", "accent"]], format: number },
  { title: "Time of the ranks", stacked: true, percent: true, format: percent,
    lines: [["compute", "compute", "compute"], ["transfer", "transfer", "transfer"], ["wait", "wait", "wait"]] },
  { title: "Bytes a second", bytes: true, format: (value) => `${bytes(value)}/s`,
    lines: [["shared memory", "shared_memory", "compute"], ["network", "network", "transfer"], ["MPI", "mpi", "wait"],
      ["device", "device", "accent"]] },
  { title: "Memory", bytes: true, format: bytes,
    lines: [["all", "memory", "accent"], ["largest rank", "most_memory", "wait"]] },
];

const state = { token: "", points: [], pointSeconds: 1, events: [], last: null, heardAt: 0, paused: false, ended: false,
  drawnAt: 0, chartsShown: false };

// ------------------------------------------------------------------------------------------------ numbers as text

function number(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(1) : value.toFixed(value ? 2 : 0);
}

function percent(value) { return `${Math.round(100 * value)} %`; }

function bytes(value) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (value < 1024) return `${value.toFixed(value < 10 && unit !== "B" ? 1 : 0)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} GiB`;
}

function duration(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// ------------------------------------------------------------------------------------------------ elements

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function showState(text, className) {
  setText("state", text);
  $("state").className = `state ${className}`;
}

// ------------------------------------------------------------------------------------------------ the job and its table

function describeRow(row, hasEnded) {
  if (row.is_last || hasEnded) return [row.is_last ? "has left" : "ended", "ended"];
  if (row.is_silent) return [row.is_waited_for ? "silent: the others wait" : "silent", "silent"];
  if (row.is_waited_for) return ["the others wait", "late"];
  return [row.waits_for ? "waits" : "runs", ""];
}

function sharesOf(row) {
  const cell = element("td");
  if (row.kind !== "rank" || !(row.compute + row.transfer + row.wait)) return cell;
  const bar = element("span", "", "shares");
  bar.setAttribute("aria-hidden", "true");
  const shares = ["compute", "transfer", "wait"];
  for (const share of shares) {
    const part = element("i", "", share);
    part.style.width = `${100 * row[share]}%`;
    bar.append(part);
  }
  cell.append(bar, shares.map((share) => percent(row[share])).join(" · "));
  cell.title = shares.map((share) => `${share} ${percent(row[share])}`).join(", ");
  cell.setAttribute("aria-label", cell.title);
  if (row.waits_for) cell.title += `; waits for ${row.waits_for}`;
  return cell;
}

function makeRow(row, hasEnded) {
  const [text, className] = describeRow(row, hasEnded);
  const made = element("tr", "", className);
  made.dataset.name = row.name;
  const head = element("th", row.name);
  head.scope = "row";
  const isRank = row.kind === "rank";
  made.append(head, element("td", text, "is"), element("td", row.host),
    element("td", isRank ? row.step.toLocaleString("en") : "", "number"),
    element("td", isRank ? number(row.steps) : "", "number"),
    element("td", row.samples ? number(row.samples) : "", "number"),
    sharesOf(row),
    element("td", bytes(row.memory), "number"),
    element("td", row.is_last || hasEnded ? "" : `${duration(row.age)} ago`, "number"));
  return made;
}

function showTable(message) {
  if (!message.rows.length) return;
  $("rows").replaceChildren(...message.rows.map((row) => makeRow(row, Boolean(message.end))));
  $("left-out").hidden = !message.left_out;
  setText("left-out", `${message.left_out} more, like the others`);
  const silent = message.rows.filter((row) => row.is_silent && !message.end);
  $("trouble").hidden = !silent.length;
  setText("trouble", silent.map((row) => `${row.name} (host ${row.host}) is silent: it is stopped, or cannot be reached.`).join(" "));
}

function showJob(message) {
  const { job, end } = message;
  setText("program", job.program || "Reigen");
  document.title = `${job.program || "job"}: step ${job.step} – Reigen`;
  setText("job-ranks", job.servers ? `${job.ranks} + ${job.servers} server${job.servers > 1 ? "s" : ""}` : `${job.ranks}`);
  const total = job.goal ? ` / ${job.goal.toLocaleString("en")}` : "";
  $("job-step").replaceChildren(job.step.toLocaleString("en"), ...(total ? [element("small", total)] : []));
  setText("job-steps", number(job.steps));
  setText("job-samples", job.samples ? number(job.samples) : "–");
  setText("job-eta", job.eta === null || end ? "–" : duration(job.eta));
  setText("job-seconds", duration(job.seconds));
  $("progress").hidden = !job.goal;
  if (job.goal) $("progress").value = Math.min(1, job.step / job.goal);
  const inTrouble = message.rows.some((row) => row.is_silent);
  if (end) {
    showState(end.exit_code ? `failed (${end.exit_code})` : "ended", end.exit_code ? "bad" : "");
    $("failure").hidden = !end.text;
    setText("failure", end.text);
    $("verdict").hidden = !end.verdict;
    setText("verdict", `Verdict: ${end.verdict}.`);
  } else {
    showState(inTrouble ? "in trouble" : job.ranks ? "running" : "starting", inTrouble ? "bad" : "running");
  }
}

function showEvents(added) {
  if (!added.length) return;
  state.events = state.events.concat(added).slice(-MAX_EVENTS);
  const words = { trouble: "Trouble:", better: "Better:", end: "End:", note: "" };
  $("events").replaceChildren(...[...state.events].reverse().map((event) => {
    const item = element("li", "", `is-${event.kind}`);
    const at = new Date(1000 * event.time);
    const time = element("time", at.toLocaleTimeString("en-GB"));
    time.dateTime = at.toISOString();
    item.append(time, ...(words[event.kind] ? [element("b", words[event.kind])] : []), event.text);
    return item;
  }));
}

// ------------------------------------------------------------------------------------------------ charts

function makeCharts() {
  for (const [place, chart] of CHARTS.entries()) {
    const figure = element("figure");
    const plot = element("div");
    plot.id = `chart-${place}`;
    plot.setAttribute("role", "img");
    const caption = element("figcaption", chart.title);
    const legend = element("span", "", "legend");
    legend.id = `legend-${place}`;
    caption.append(legend);
    figure.append(caption, plot);
    $("charts").append(figure);
  }
  const heads = ["after", ...CHARTS.flatMap((chart) => chart.lines.map(([name]) => name)), "ranks"];
  $("history-heads").replaceChildren(...heads.map((text) => {
    const head = element("th", text, "number");
    head.scope = "col";
    return head;
  }));
}

function column(name) {
  const place = FIELDS.indexOf(name);
  return state.points.map((point) => point[place]);
}

function drawCharts() {
  if (typeof Plotly === "undefined" || !state.points.length) return;
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const longest = state.points[state.points.length - 1][0];
  const [unit, divisor] = longest < 300 ? ["s", 1] : longest < 18000 ? ["min", 60] : ["h", 3600];
  const x = column("seconds").map((seconds) => seconds / divisor);
  for (const [place, chart] of CHARTS.entries()) {
    const present = chart.lines.filter(([, field], n) => n === 0 || column(field).some((value) => value > 0));
    const traces = present.map(([name, field, shade]) => ({
      x, y: column(field), name, type: "scatter", mode: "lines", line: { color: color(shade), width: chart.stacked ? 0 : 1.8 },
      ...(chart.stacked ? { stackgroup: "all", fillcolor: color(shade) } : {}),
      text: column(field).map(chart.format), hovertemplate: `%{text}<extra>${name}</extra>`,
    }));
    const most = Math.max(...traces.flatMap((trace) => trace.y), 0);
    const axis = { gridcolor: color("line"), zeroline: false, color: color("quiet"), fixedrange: true, automargin: true };
    const layout = {
      margin: { l: 44, r: 12, t: 12, b: 30 }, paper_bgcolor: color("card"), plot_bgcolor: color("card"), hovermode: "x unified",
      font: { color: color("text"), size: 11, family: style.fontFamily || "system-ui, sans-serif" }, dragmode: false,
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") } },
      showlegend: false,
      xaxis: { ...axis, ticksuffix: ` ${unit}`, nticks: 6, showgrid: false },
      yaxis: { ...axis, rangemode: "tozero", nticks: 5,
        ...(chart.percent ? { tickformat: ".0%", range: [0, 1] } : {}), ...(chart.bytes ? byteTicks(most) : {}) },
    };
    const config = { displayModeBar: false, responsive: true, staticPlot: false };
    Plotly.react(`chart-${place}`, traces, layout, config);
    for (const svg of $(`chart-${place}`).querySelectorAll("svg")) svg.setAttribute("aria-hidden", "true");
    $(`legend-${place}`).replaceChildren(...(chart.lines.length > 1 ? present : []).map(([name, , shade]) => {
      const entry = element("span");
      entry.append(element("i", "", shade), name);
      return entry;
    }));
    const now = present.map(([name, field]) => `${name} ${chart.format(column(field).at(-1))}`).join(", ");
    $(`chart-${place}`).setAttribute("aria-label", `${chart.title}, over ${duration(longest)}; now: ${now}`);
  }
}

function byteTicks(most) {
  let step = 1;
  while (most / step > 4) step *= 2;
  const values = [0, 1, 2, 3, 4].map((n) => n * step).filter((value) => value <= most + step);
  return { tickmode: "array", tickvals: values, ticktext: values.map(bytes) };
}

function showHistory() {
  if (!$("history").closest("details").open) return;
  const fields = CHARTS.flatMap((chart) => chart.lines.map(([, field]) => [FIELDS.indexOf(field), chart.format]));
  $("history").replaceChildren(...state.points.slice(-60).reverse().map((point) => {
    const row = element("tr");
    const head = element("th", duration(point[0]), "number");
    head.scope = "row";
    row.append(head, ...fields.map(([place, format]) => element("td", format(point[place]), "number")),
      element("td", `${Math.round(point[FIELDS.length - 1])}`, "number"));
    return row;
  }));
}

// ------------------------------------------------------------------------------------------------ messages

function take(message) {
  state.heardAt = performance.now();
  state.last = message;
  state.points = message.has_all_points ? message.points : state.points.concat(message.points);
  state.pointSeconds = message.point_seconds;
  state.ended = Boolean(message.end);
  showEvents(message.events);
  show();
}

function show() {
  if (!state.last || (state.paused && !state.ended)) return;
  showJob(state.last);
  showTable(state.last);
  const now = performance.now();
  if (document.hidden || (now - state.drawnAt < 1000 * CHART_SECONDS - 100 && !state.ended)) return;
  state.drawnAt = now;
  setText("resolution", `a point is ${duration(state.pointSeconds)}`);
  drawCharts();
  showHistory();
}

// Server-sent events by fetch: EventSource sends no token.
async function follow() {
  const answer = await fetch("/events", { headers: { Authorization: `Bearer ${state.token}` }, cache: "no-store" });
  if (answer.status === 403) return "refused";
  if (!answer.ok) throw new Error(await answer.text());
  state.events = [];
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "";;) {
    const { value, done } = await reader.read();
    if (done) return "closed";
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) take(JSON.parse(part.slice(6)));
  }
}

async function run() {
  for (let wait = 500; !state.ended; wait = Math.min(2 * wait, 8000)) {
    try {
      if (await follow() === "refused") return ask();
      wait = 500;
    } catch (error) {
      if (!state.ended) showState("connection lost", "bad");
    }
    if (!state.ended) await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function ask() {
  sessionStorage.removeItem("token");
  showState("token needed", "bad");
  $("ask").hidden = false;
  $("token").focus();
}

function begin() {
  makeCharts();
  $("pause").addEventListener("click", () => {
    state.paused = !state.paused;
    $("pause").setAttribute("aria-pressed", `${state.paused}`);
    setText("pause", state.paused ? "Continue" : "Pause");
    show();
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    state.token = $("token").value.trim().replace(/^.*#/, "");
    if (!state.token) return;
    sessionStorage.setItem("token", state.token);
    $("ask").hidden = true;
    run();
  });
  const redraw = () => { state.drawnAt = 0; show(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("visibilitychange", redraw);
  $("history").closest("details").addEventListener("toggle", showHistory);
  setInterval(() => {
    if (state.last && !state.ended && performance.now() - state.heardAt > 1000 * STALE_SECONDS) showState("connection lost", "bad");
  }, 1000);
  // in this tab alone, and not in the address bar, where others see it
  if (location.hash.length > 1) {
    sessionStorage.setItem("token", location.hash.slice(1));
    history.replaceState(null, "", "/");
  }
  state.token = sessionStorage.getItem("token") || "";
  if (state.token) run(); else ask();
}

begin();
