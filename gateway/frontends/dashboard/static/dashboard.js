// Theme, keys, copying, and the charts of the page Now. Everything else is HTML and htmx.
"use strict";

const root = document.documentElement;
try { if (localStorage.theme) root.dataset.theme = localStorage.theme; } catch { /* storage is off */ }

function changeTheme() {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.theme = root.dataset.theme; } catch { /* storage is off */ }
  dispatchEvent(new Event("theme"));
}

// The list remembers its episodes, so that the page of an episode can go to the next.
function listed() {
  try { return JSON.parse(sessionStorage.episodes || "[]"); } catch { return []; }
}

function goTo(offset) {
  const here = document.getElementById("episode")?.dataset.id, known = listed(), place = known.indexOf(here);
  if (here && known[place + offset] && place >= 0) location.href = `/dashboard/episodes/${known[place + offset]}${location.hash}`;
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "/") {
    const search = document.querySelector("[role=search] input");
    if (search) search.focus(); else location.href = "/dashboard/episodes";
    event.preventDefault();
  }
  else if (event.key === "ArrowLeft") goTo(-1);
  else if (event.key === "ArrowRight") goTo(1);
  else if (event.key === "t") changeTheme();
  else document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`)?.click();
});

addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme")?.addEventListener("click", changeTheme);
  const table = document.getElementById("episodes");
  if (table) {
    const ids = [...table.querySelectorAll("td:first-child a")].map((link) => link.getAttribute("href").split("/").pop());
    try { sessionStorage.episodes = JSON.stringify(ids); } catch { /* storage is off */ }
  }
  const charts = document.getElementById("charts");
  if (charts) follow(charts);
});

addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = document.querySelector(button.dataset.copy);
  if (navigator.clipboard) await navigator.clipboard.writeText(source.value);
  else { // over plain HTTP from another machine
    source.hidden = false;
    source.select();
    document.execCommand("copy");
    source.hidden = true;
  }
  button.textContent = "Copied";
});

// A button with data-method changes something. It asks first, shows why the gateway refused, and loads the page again.
addEventListener("click", async (event) => {
  const button = event.target.closest("[data-method]");
  if (!button || !confirm(button.dataset.question)) return;
  const { method, url, body } = button.dataset;
  const headers = { "HX-Request": "true", ...(body && { "Content-Type": "application/json" }) };
  try {
    const answer = await fetch(url, { method, headers, body });
    if (!answer.ok) alert(`The gateway refused this (${answer.status}): ${await answer.text()}`);
  } catch (error) { alert(`The gateway does not answer: ${error}`); }
  location.reload();
});

const POINTS = 150, PAUSE_MS = 2000;
const COLORS = { used: "#3b82c4", waiting: "#d08700", opens: "#3b82c4", steps: "#1a9e55" };

async function follow(charts) {
  const data = { at: [], used: [], waiting: [], opens: [], steps: [] };
  const plots = [...charts.querySelectorAll(".chart")].map((place) => plot(place, place.dataset.series.split(" "), data));
  addEventListener("theme", () => plots.forEach((one) => one.redraw()));
  for (let before = null; ;) {
    try {
      const now = await (await fetch(charts.dataset.source)).json();
      const sum = (name) => now.environments.reduce((total, row) => total + row[name], 0);
      const totals = { at: now.at, opened: sum("opened"), calls: sum("calls") };
      const past = before ? totals.at - before.at : 0;
      data.at.push(now.at);
      data.used.push(sum("used"));
      data.waiting.push(sum("waiting"));
      data.opens.push(past > 0 ? Math.max(0, totals.opened - before.opened) / past : null);
      data.steps.push(past > 0 ? Math.max(0, totals.calls - before.calls) / past : null);
      for (const values of Object.values(data)) if (values.length > POINTS) values.shift();
      for (const one of plots) one.show();
      before = totals;
    } catch { /* the gateway restarts; the next look shows it again */ }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

function plot(place, names, data) {
  const text = () => getComputedStyle(root).getPropertyValue("--soft");
  const axis = { stroke: text, grid: { stroke: () => getComputedStyle(root).getPropertyValue("--line"), width: 1 } };
  const series = [{}, ...names.map((name) => ({ label: name, stroke: COLORS[name], width: 2, value: (_, value) => value?.toFixed(1) ?? "" }))];
  const size = () => ({ width: Math.max(240, place.clientWidth), height: 160 });
  const options = { ...size(), series, axes: [axis, { ...axis, size: 44 }], scales: { x: { range: () => { const last = data.at.at(-1) ?? Date.now() / 1000; return [last - POINTS * PAUSE_MS / 1000, last]; } }, y: { range: (_, low, high) => [0, Math.max(1, high)] } } };
  const made = new uPlot(options, [[], ...names.map(() => [])], place);
  addEventListener("resize", () => made.setSize(size()));
  return { show: () => made.setData([data.at, ...names.map((name) => data[name])]), redraw: () => made.redraw() };
}
