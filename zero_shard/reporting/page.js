"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const state = { x: "step", smooth: 0, isWhole: false, zoom: null, hidden: new Set() };
  const HEIGHT = 230, LEFT = 58, RIGHT = 14, TOP = 16, BOTTOM = 40;
  const UNITS = {
    ms: [["ms", 1], ["s", 1000]], MiB: [["KiB", 1 / 1024], ["MiB", 1], ["GiB", 1024], ["TiB", 1048576]],
    s: [["s", 1], ["min", 60], ["h", 3600], ["days", 86400]],
  };
  const FLAGS = { nonfinite: "N", drift: "D", skipped: "S", rollback: "B", resume: "R" };
  const PHASES = ["forward_ms", "backward_ms", "optimizer_ms"];
  const NAMES = {
    forward_ms: "forward", backward_ms: "backward", optimizer_ms: "optimizer", rest: "everything else", step_ms: "step", slowest_ms: "work of the slowest rank",
    held_mib: "model state held", peak_mib: "peak", exposed_ms: "exposed communication", sent_mib: "sent",
  };
  const rates = [...new Set(data.runs.flatMap((run) => Object.keys(run.kept.series)))].filter((key) => key.startsWith("lr "));
  const charts = [
    { title: "Loss", keys: ["loss"], isFree: true },
    { title: "Gradient norm", keys: ["grad_norm"], isFree: true },
    { title: "Learning rate", keys: rates },
    { title: "Throughput", unit: "tokens/s", keys: ["tokens_per_s"] },
    { title: "Step time", unit: "ms", keys: ["step_ms", "slowest_ms"] },
    ...data.runs.map((run) => ({ title: "Where the time goes" + (data.runs.length > 1 ? ": " + run.label : ""), unit: "ms",
      stacked: run })),
    { title: "Exposed communication", unit: "ms", keys: ["exposed_ms"] },
    { title: "Sent per step and rank", unit: "MiB", keys: ["sent_mib"], hasFloor: true },
    { title: "Memory per rank", unit: "MiB", keys: ["held_mib", "peak_mib"] },
  ];

  function make(tag, attributes = {}, ...children) {
    const isSvg = /^(svg|g|path|line|rect|text|circle|title|desc|clipPath|defs)$/.test(tag);
    const node = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  // --- numbers and axes ---

  function short(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3).replace(/\.?0*e\+?/, "e");
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  }
  function tickText(value, step) {
    const size = Math.abs(value);
    if (size < step * 1e-6) return "0";
    if (size < 1e-3 || size >= 1e12) return String(Number(value.toPrecision(3)).toExponential()).replace("e+", "e");
    for (const [suffix, scale] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (size >= scale * (suffix === "k" ? 10 : 1)) return decimals(value / scale, step / scale) + suffix;
    }
    return decimals(value, step);
  }
  function decimals(value, step) {
    let num = 0;
    while (num < 9 && Math.abs(step * 10 ** num - Math.round(step * 10 ** num)) > 1e-6) num++;
    return value.toFixed(num);
  }
  function linearTicks(low, high, most) {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 2.5, 5].find((each) => each * power >= rough) || 10);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push([n * step, tickText(n * step, step)]);
    return found;
  }
  function logTicks(low, high) {
    const all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const digit of [1, 2, 5]) all.push([digit, power]);
    }
    const inside = all.filter(([digit, power]) => digit * 10 ** power >= low * 0.999 && digit * 10 ** power <= high * 1.001);
    const tens = inside.filter(([digit]) => digit === 1);
    if (inside.length < 2) return linearTicks(low, high, 4);
    const stride = Math.ceil(tens.length / 6);
    const chosen = tens.length > 2 ? tens.filter((_, index) => index % stride === 0) : inside;
    return chosen.map(([digit, power]) => [digit * 10 ** power, tickText(digit * 10 ** power, 10 ** power)]);
  }
  function unitFor(unit, high, factor = 1.5) {
    const ladder = UNITS[unit];
    if (!ladder) return [unit || "", 1];
    return ladder.filter(([, scale]) => high >= factor * scale).pop() || ladder[0];
  }

  // --- the lines of a chart ---

  // Torch's and TensorBoard's users know this one: an exponential moving average, without the pull of its start.
  function smoothed(values) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * state.smooth + value * (1 - state.smooth);
      weight = weight * state.smooth + (1 - state.smooth);
      return sum / weight;
    });
  }
  function linesOf(chart) {
    const found = [];
    data.runs.forEach((run, number) => {
      if (state.hidden.has(number)) return;
      chart.keys.forEach((key, order) => {
        const series = run.kept.series[key];
        if (!series) return;
        const isSingle = data.runs.length === 1, isMany = chart.keys.length > 1;
        const name = NAMES[key] || key.replace("lr", "group").replace("_", " ");
        found.push({
          run, key, name: isSingle ? name : isMany ? `${run.label}: ${name}` : run.label, color: (isSingle ? order : number) % 8,
          dash: isSingle ? "" : [["", "6 4"], ["6 4", "2 3"]][Number(number > 7)][Number(order > 0)],
          part: run.kept, mean: series[0], low: series[1], high: series[2],
          shown: state.smooth ? smoothed(series[0]) : series[0],
          repeated: run.repeated && run.repeated.series[key] ? run.repeated : null,
        });
      });
    });
    // Param groups with one learning rate are one line.
    return found.filter((line, index) => !line.key.startsWith("lr ") || !found.slice(0, index).some(
      (other) => other.run === line.run && other.key.startsWith("lr ") && String(other.mean) === String(line.mean)));
  }
  function stackOf(chart) {
    const run = chart.stacked, series = run.kept.series;
    if (!PHASES.some((key) => series[key])) return [];
    const base = run.kept.step.map(() => 0);
    const parts = PHASES.filter((key) => series[key]).map((key) => ({ key, mean: series[key][0] }));
    if (series.step_ms) {
      parts.push({ key: "rest", mean: series.step_ms[0].map((step, at) => Math.max(0, (step || 0) - parts.reduce((sum, part) => sum + (part.mean[at] || 0), 0))) });
    }
    return parts.map(({ key, mean }) => {
      const values = state.smooth ? smoothed(mean) : mean;
      const bottom = [...base];
      values.forEach((value, at) => { base[at] += value || 0; });
      return { run, key, name: NAMES[key], color: [0, 1, 2, 7][[...PHASES, "rest"].indexOf(key)], part: run.kept, mean: values, shown: [...base], bottom };
    });
  }

  // --- drawing ---

  function pathOf(xs, ys, breaks = []) {
    let text = "", isDown = false, num = 0;
    xs.forEach((x, at) => {
      if (ys[at] === null || x === null) { isDown = false; return; }
      isDown = isDown && !breaks.includes(at);
      text += `${isDown ? "L" : "M"}${x.toFixed(1)} ${ys[at].toFixed(1)}`;
      isDown = true;
      num++;
    });
    return [text, num];
  }
  function areaOf(xs, tops, bottoms) {
    const at = xs.map((_, index) => index).filter((index) => tops[index] !== null && bottoms[index] !== null);
    if (!at.length) return "";
    const point = (ys) => (index) => `${xs[index].toFixed(1)} ${ys[index].toFixed(1)}`;
    return `M${at.map(point(tops)).join("L")}L${at.reverse().map(point(bottoms)).join("L")}Z`;
  }
  function extentX() {
    if (state.zoom) return state.zoom;
    const all = data.runs.flatMap((run, number) => state.hidden.has(number) ? [] : [run.kept[state.x], run.repeated ? run.repeated[state.x] : []]);
    const low = Math.min(...all.map((xs) => xs.length ? xs.reduce((a, b) => Math.min(a, b)) : Infinity));
    const high = Math.max(...all.map((xs) => xs.length ? xs.reduce((a, b) => Math.max(a, b)) : -Infinity));
    if (!(low <= high)) return [0, 1];
    return low < high ? [low, high] : [low - 1, high + 1];
  }
  function extentY(chart, lines, [from, to], isLog) {
    const shown = [], all = [];
    for (const line of lines) {
      line.part[state.x].forEach((x, at) => {
        if (x < from || x > to) return;
        for (const value of [line.shown[at], line.low ? line.low[at] : null, line.high ? line.high[at] : null]) {
          if (value !== null && (!isLog || value > 0)) all.push(value);
        }
        if (line.shown[at] !== null && (!isLog || line.shown[at] > 0)) shown.push(line.shown[at]);
      });
      if (line.repeated) all.push(...line.repeated.series[line.key].flat().filter((value) => value !== null && (!isLog || value > 0)));
    }
    if (!all.length) return null;
    all.sort((a, b) => a - b);
    shown.sort((a, b) => a - b);
    let low = all[0], high = all[all.length - 1];
    const isZero = !chart.isFree && !isLog && low >= 0;
    if (!state.isWhole && shown.length > 20) { // a slow first step must not press everything else flat
      const q = (share) => shown[Math.round(share * (shown.length - 1))];
      const room = isLog ? 0 : 0.6 * (q(0.98) - (isZero ? 0 : q(0.02)));
      const [least, most] = isLog ? [q(0.01) / 3, q(0.99) * 3] : [q(0.02) - room, q(0.98) + room];
      low = Math.max(low, least);
      high = most > low ? Math.min(high, most) : high;
    }
    const cut = all[all.length - 1] > high ? all[all.length - 1] : null;
    if (chart.hasFloor) for (const line of lines) high = Math.max(high, line.run.floor || 0);
    if (isZero) low = 0;
    if (low === high) return isLog ? [low / 2, high * 2, cut] : isZero ? [0, high * 1.25 || 1, cut] : [low - Math.abs(low) / 10 - 1e-12, high + Math.abs(high) / 10 + 1e-12, cut];
    const pad = isLog ? (high / low) ** 0.04 : (high - low) * 0.06;
    return isLog ? [low / pad, high * pad, cut] : [isZero ? 0 : low - pad, high + pad, cut];
  }
  function draw(chart) {
    const lines = chart.stacked ? stackOf(chart) : linesOf(chart);
    const width = Math.max(240, chart.plot.clientWidth), [from, to] = extentX();
    const extent = extentY(chart, lines, [from, to], chart.isLog);
    const svg = make("svg", { role: "img", viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-labelledby": `t${chart.id} d${chart.id}` });
    chart.plot.replaceChildren(svg);
    chart.legend.replaceChildren();
    chart.lines = lines;
    if (!extent) {
      svg.append(make("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, chart.isLog ? "no positive value here" : "no value here"));
      return;
    }
    const [low, high, cut] = extent, right = width - RIGHT, bottom = HEIGHT - BOTTOM;
    const [unit, scale] = unitFor(chart.unit, high), [timeUnit, timeScale] = state.x === "time" ? unitFor("s", to) : ["", 1];
    const toX = (x) => LEFT + (x - from) / (to - from) * (right - LEFT);
    const warp = chart.isLog ? Math.log10 : (y) => y;
    const toY = (y) => y === null || (chart.isLog && y <= 0) ? null : bottom - (warp(y) - warp(low)) / (warp(high) - warp(low)) * (bottom - TOP);
    Object.assign(chart, { toX, toY, from, to, width, unitText: unit, scale, timeUnit, timeScale, svg });
    chart.heading.textContent = chart.title + (unit ? ` (${unit})` : "");
    const clip = make("clipPath", { id: `clip${chart.id}` }, make("rect", { x: LEFT, y: TOP - 4, width: right - LEFT, height: bottom - TOP + 5 }));
    svg.append(make("title", { id: `t${chart.id}` }, chart.heading.textContent), make("desc", { id: `d${chart.id}` }, described(chart, lines)), make("defs", {}, clip));
    for (const [y, text] of chart.isLog ? logTicks(low, high) : linearTicks(low / scale, high / scale, 5)) {
      const at = toY(chart.isLog ? y : y * scale);
      svg.append(make("line", { class: "grid", x1: LEFT, x2: right, y1: at, y2: at }));
      svg.append(make("text", { x: LEFT - 7, y: at + 4, "text-anchor": "end" }, chart.isLog ? tickText(y / scale, y / scale) : text));
    }
    for (const [x, text] of linearTicks(from / timeScale, to / timeScale, Math.max(2, Math.floor((right - LEFT) / 64)))) {
      if (state.x === "step" && x % 1) continue;
      const at = toX(x * timeScale);
      svg.append(make("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 4 }));
      svg.append(make("text", { x: at, y: bottom + 17, "text-anchor": "middle" }, text));
    }
    svg.append(make("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom }));
    svg.append(make("text", { x: (LEFT + right) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, state.x === "step" ? "step" : `training time (${timeUnit})`));
    const inner = svg.appendChild(make("g", { "clip-path": `url(#clip${chart.id})` }));
    for (const line of lines) inner.append(...drawLine(chart, line));
    drawMarks(chart, lines, svg, bottom);
    for (const line of lines) addLegend(chart, line);
    if (cut !== null) chart.legend.append(make("span", { class: "quiet" }, `▲ up to ${short(cut / scale)}, beyond the chart`));
  }
  function drawLine(chart, line) {
    const xs = line.part[state.x].map(chart.toX), at = (values) => values.map(chart.toY), found = [];
    const name = { class: "line c" + line.color, "data-key": line.key, "data-run": line.run.label };
    if (line.bottom) {
      found.push(make("path", { ...name, class: "area c" + line.color, "data-points": xs.length, d: areaOf(xs, at(line.shown), at(line.bottom)) }));
      return found;
    }
    if (line.repeated) {
      const part = line.repeated, [d] = pathOf(part[state.x].map(chart.toX), at(part.series[line.key][0]), part.segments);
      found.push(make("path", { class: "repeated c" + line.color, d }));
    }
    if (line.low) found.push(make("path", { class: "band c" + line.color, d: areaOf(xs, at(line.high), at(line.low)) }));
    if (state.smooth) found.push(make("path", { class: "raw c" + line.color, d: pathOf(xs, at(line.mean))[0] }));
    const [d, num] = pathOf(xs, at(line.shown));
    found.push(make("path", { ...name, d, "data-points": num, "stroke-dasharray": line.dash }));
    if (num <= 40) xs.forEach((x, index) => { // a point between two gaps has no line
      const y = chart.toY(line.shown[index]);
      if (y !== null) found.push(make("circle", { class: "dot c" + line.color, cx: x, cy: y, r: 2.2 }));
    });
    return found;
  }
  function drawMarks(chart, lines, svg, bottom) {
    let last = null; // letters that would lie over each other are one text
    const runs = [...new Set(lines.map((line) => line.run))];
    for (const event of runs.flatMap((run) => run.events).sort((a, b) => a[state.x] - b[state.x])) {
      const x = chart.toX(event[state.x]);
      if (x < LEFT - 1 || x > chart.width - RIGHT + 1) continue;
      const kind = FLAGS[event.kind] ? event.kind : "other";
      svg.append(make("line", { class: "event " + kind, x1: x, x2: x, y1: TOP, y2: bottom }));
      const letter = FLAGS[event.kind] || "E";
      if (last && x - last.getAttribute("x") < 9) {
        if (!last.textContent.includes(letter)) last.append(letter);
        continue;
      }
      last = svg.appendChild(make("text", { class: "flag " + kind, x, y: TOP - 3, "text-anchor": "middle" }, letter));
    }
    for (const line of lines) {
      for (const [step, time] of line.run.bad[line.key] || []) {
        const x = chart.toX(state.x === "step" ? step : time);
        if (x >= LEFT - 1 && x <= chart.width - RIGHT + 1) svg.append(make("path", { class: "bad", d: `M${x - 4} ${bottom + 7}h8l-4 -7z` }, make("title", {}, "not finite")));
      }
    }
    if (!chart.hasFloor) return;
    for (const run of runs.filter((each) => each.floor)) {
      const y = chart.toY(run.floor);
      if (y !== null) svg.append(make("line", { class: "floor", x1: LEFT, x2: chart.width - RIGHT, y1: y, y2: y }, make("title", {}, "the least that a step must send")));
    }
  }
  function described(chart, lines) {
    return lines.map((line) => {
      const values = line.mean.filter((value) => value !== null);
      return `${line.name}: ${values.length} points, from ${short(values[0] / chart.scale)} to ${short(values[values.length - 1] / chart.scale)} ${chart.unitText}`;
    }).join("; ");
  }
  function addLegend(chart, line) {
    if (chart.lines.length === 1 && !(chart.hasFloor && line.run.floor)) return;
    const swatch = make("span", { class: `swatch c${line.color}${line.bottom ? " filled" : line.dash ? " dashed" : ""}`, "aria-hidden": "true" });
    chart.legend.append(make("span", {}, swatch, line.name));
    if (chart.hasFloor && line.run.floor && line === chart.lines[chart.lines.length - 1]) chart.legend.append(make("span", { class: "quiet" }, "– – the least that a step must send"));
  }

  // --- pointing and zooming ---

  function nearest(xs, x) {
    let best = 0;
    xs.forEach((each, at) => { if (Math.abs(each - x) < Math.abs(xs[best] - x)) best = at; });
    return best;
  }
  function pointAt(chart, event) {
    const box = chart.svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) * chart.width / box.width - LEFT) / (chart.width - RIGHT - LEFT);
    return chart.from + Math.min(1, Math.max(0, share)) * (chart.to - chart.from);
  }
  function hover(chart, event) {
    const x = pointAt(chart, event), rows = [];
    let place = null;
    for (const line of chart.lines) {
      const at = nearest(line.part[state.x], x), here = line.part[state.x][at];
      if (place === null || Math.abs(here - x) < Math.abs(place - x)) place = here;
      const range = line.low && line.low[at] !== null ? ` (${short(line.low[at] / chart.scale)} to ${short(line.high[at] / chart.scale)})` : "";
      const value = line.bottom ? line.mean[at] : line.shown[at];
      const swatch = make("span", { class: `swatch c${line.color}`, "aria-hidden": "true" });
      if (value !== null) rows.push(make("p", {}, swatch, `${line.name}: `, make("b", {}, short(value / chart.scale)), ` ${chart.unitText}${range}`));
      if (line === chart.lines[0]) {
        const mean = line.part.per_point > 1 ? `, mean of ${short(line.part.per_point)} steps` : "";
        rows.unshift(make("p", { class: "quiet" }, `step ${line.part.step[at].toLocaleString("en")}, ${duration(line.part.time[at])}${mean}`));
      }
    }
    const reach = (chart.to - chart.from) / 120;
    const near = [...new Set(chart.lines.map((line) => line.run))].flatMap((run) => run.events).filter((each) => Math.abs(each[state.x] - x) <= reach);
    for (const each of near.slice(0, 4)) rows.push(make("p", { class: "flag " + (FLAGS[each.kind] ? each.kind : "other") }, `${each.kind}: ${each.message}`));
    chart.tip.replaceChildren(...rows);
    chart.tip.hidden = !rows.length;
    const left = chart.toX(place) * chart.svg.clientWidth / chart.width;
    chart.tip.style.top = `${chart.plot.offsetTop + 22}px`;
    const isRight = left > chart.svg.clientWidth / 2;
    chart.tip.style.left = isRight ? "auto" : `${chart.plot.offsetLeft + left + 12}px`;
    chart.tip.style.right = isRight ? `${chart.card.clientWidth - chart.plot.offsetLeft - left + 12}px` : "auto";
    for (const other of charts) cursor(other, place);
  }
  function cursor(chart, x) {
    if (!chart.svg || !chart.svg.isConnected) return;
    chart.svg.querySelector(".cursor")?.remove();
    if (x !== null) chart.svg.append(make("line", { class: "cursor", x1: chart.toX(x), x2: chart.toX(x), y1: TOP, y2: HEIGHT - BOTTOM }));
  }
  function duration(seconds) {
    const [unit, scale] = unitFor("s", seconds, 2);
    return `${short(seconds / scale)} ${unit}`;
  }
  function listen(chart) {
    let start = null;
    const leave = () => { chart.tip.hidden = true; charts.forEach((other) => cursor(other, null)); };
    chart.plot.addEventListener("pointermove", (event) => {
      if (!chart.lines.length) return;
      hover(chart, event);
      if (start === null) return;
      const [low, high] = [start, pointAt(chart, event)].sort((a, b) => a - b).map(chart.toX);
      chart.svg.querySelector(".selection")?.remove();
      chart.svg.append(make("rect", { class: "selection", x: low, y: TOP, width: high - low, height: HEIGHT - BOTTOM - TOP }));
    });
    chart.plot.addEventListener("pointerleave", leave);
    chart.plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0 || !chart.lines.length) return;
      event.preventDefault();
      start = pointAt(chart, event);
      window.addEventListener("pointerup", (end) => {
        const range = [start, pointAt(chart, end)].sort((a, b) => a - b);
        start = null;
        chart.svg.querySelector(".selection")?.remove();
        if (chart.toX(range[1]) - chart.toX(range[0]) > 6) { state.zoom = range; drawAll(); }
      }, { once: true });
    });
    chart.plot.addEventListener("dblclick", () => { state.zoom = null; drawAll(); });
  }

  // --- the page ---

  function drawAll() {
    charts.forEach(draw);
    reset.disabled = state.zoom === null;
  }
  function control(text, input, listener) {
    input.addEventListener("input", listener);
    return make("label", {}, text, input);
  }
  const reset = make("button", { type: "button" }, "whole range");
  reset.addEventListener("click", () => { state.zoom = null; drawAll(); });
  function addControls() {
    const x = make("select", {}, make("option", { value: "step" }, "step"), make("option", { value: "time" }, "training time"));
    const smooth = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
    const whole = make("input", { type: "checkbox" });
    const bar = document.getElementById("controls");
    bar.append(
      control("x axis", x, () => { state.x = x.value; state.zoom = null; drawAll(); }),
      control("smoothing", smooth, () => { state.smooth = Number(smooth.value); drawAll(); }),
      control("show outliers", whole, () => { state.isWhole = whole.checked; drawAll(); }), reset);
    if (data.runs.length > 1) data.runs.forEach((run, number) => {
      const box = make("input", { type: "checkbox", checked: "" });
      const label = control("", box, () => {
        state.hidden[box.checked ? "delete" : "add"](number);
        drawAll();
      });
      label.append(make("span", { class: `swatch c${number % 8}${number > 7 ? " dashed" : ""}`, "aria-hidden": "true" }), run.label);
      bar.append(label);
    });
    const kinds = [...new Set(data.runs.flatMap((run) => run.events.map((event) => event.kind)))];
    for (const kind of kinds) {
      bar.append(make("span", { class: "quiet" }, make("span", { class: "flag " + (FLAGS[kind] ? kind : "other") }, FLAGS[kind] || "E"), ` ${kind}`));
    }
    bar.append(make("span", { class: "quiet" }, "drag over a chart to zoom"));
  }
  function addCard(chart, number) {
    chart.id = number;
    chart.heading = make("h3", {}, chart.title);
    chart.legend = make("div", { class: "legend" });
    chart.plot = make("div", { class: "plot" });
    chart.tip = make("div", { class: "tip", hidden: "" });
    const log = make("button", { type: "button", "aria-pressed": "false", title: "logarithmic scale" }, "log");
    log.addEventListener("click", () => {
      chart.isLog = !chart.isLog;
      log.setAttribute("aria-pressed", String(chart.isLog));
      draw(chart);
    });
    chart.card = make("article", { class: "chart" }, make("div", { class: "top" }, chart.heading, ...(chart.stacked ? [] : [log])), chart.legend, chart.plot, chart.tip);
    document.getElementById("charts").append(chart.card);
    listen(chart);
  }
  const isThere = (chart) => (chart.stacked ? stackOf(chart) : linesOf(chart)).length;
  charts.splice(0, charts.length, ...charts.filter(isThere));
  addControls();
  charts.forEach(addCard);
  drawAll();
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); } });
})();
