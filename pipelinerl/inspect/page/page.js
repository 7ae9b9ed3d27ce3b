// The report's program. Draws charts as SVG, filters rollouts, shows tokens. Loads nothing, keeps nothing.
"use strict";
(async () => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const SVG = "http://www.w3.org/2000/svg";
  // Elements are made, never parsed: what a model says is text and nothing else.
  const make = (name, attributes = {}, ...children) => {
    const svg = ["svg", "path", "line", "text", "circle", "g"].includes(name);
    const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value === true) node.setAttribute(key, "");
      else if (value !== false && value != null) node.setAttribute(key, value);
    }
    node.append(...children.filter((child) => child != null));
    return node;
  };
  const color = (index) => `var(--run${index % 6})`;
  const DASHES = ["", "5 3", "2 3", "8 3 2 3", "1 2", "12 3"];
  const short = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
    return String(Number(value.toPrecision(4)));
  };
  const unpack = async (bytes) =>
    JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());

  // Theme
  const root = document.documentElement;
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  $("#theme").addEventListener("click", () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });

  const packed = Uint8Array.from(atob($("#data").textContent), (char) => char.charCodeAt(0));
  let runs = [], made = "";
  const state = { run: 0, sort: "step", down: true, shown: 50, open: [], paint: "version" };

  function load(document_) {
    runs = document_.runs;
    made = document_.made;
    header(); alarms(); figures(); charts(); filters(); table(); survivorship(); time(); config();
  }

  function header() {
    $("#title").textContent = runs.map((run) => run.name).join("  ·  ");
    $("#subtitle").textContent = runs.map((run) => `${run.path}: ${run.state}`).join("; ") + `. Made ${made}.`;
    $("#legend").replaceChildren(...(runs.length < 2 ? [] : runs.map((run, index) =>
      make("span", {}, make("i", { class: "key", style: `background:${color(index)}` }), run.name))));
  }

  function alarms() {
    const found = runs.flatMap((run, index) => run.alarms.map((alarm) => ({ ...alarm, run: index })));
    $("#alarms").replaceChildren(...(found.length ? found.map((alarm) =>
      make("div", { class: alarm.level === "slow" ? "alarm speed" : "alarm", "data-alarm": alarm.title },
        make("b", {}, alarm.title), ` ${runs.length > 1 ? `(${runs[alarm.run].name}) ` : ""}${
          alarm.step == null ? "" : `since step ${alarm.step}: `}${alarm.evidence}. `,
        make("button", { type: "button", onclick: () => goto(alarm.run, alarm.step) }, "show rollouts"),
        make("span", {}, alarm.fix)))
      : [make("p", { class: "fine" }, "No alarm.")]));
  }

  function figures() {
    const labels = [...new Set(runs.flatMap((run) => run.figures.map(([label]) => label)))];
    $("#figures").replaceChildren(...labels.map((label) => {
      const values = runs.map((run) => (run.figures.find(([name]) => name === label) || [])[1] || "–");
      const shown = runs.length === 1 ? [make("b", {}, values[0])]
        : values.map((value, index) => make("small", {}, make("i", { class: "key", style: `background:${color(index)}` }), value));
      return make("div", { class: "figure" }, ...shown, make("span", {}, label));
    }));
  }

  // Charts. A chart has lines {label, x, y, run, dash} and maybe a band {x, low, high}.
  function charts() {
    const titles = [...new Set(runs.flatMap((run) => run.charts.map((one) => one.title)))];
    const drawn = titles.map((title) => {
      const own = runs.map((run) => run.charts.find((one) => one.title === title));
      const labels = [...new Set(own.flatMap((one) => (one ? one.lines.map((line) => line.label) : [])))];
      const lines = own.flatMap((one, run) => (one ? one.lines.map((line) =>
        ({ ...line, run, number: labels.indexOf(line.label) })) : []));
      return chart(title, own.find(Boolean).unit, lines, labels);
    });
    const evaluated = runs.some((run) => run.evaluations.length);
    if (evaluated) drawn.splice(Math.min(2, drawn.length), 0, evaluations());
    $("#charts").replaceChildren(...drawn);
  }

  function evaluations() {
    const parts = [...new Set(runs.flatMap((run) => run.evaluations.flatMap((one) => Object.keys(one.parts))))];
    const labels = ["success", ...parts];
    const lines = runs.flatMap((run, index) => labels.map((label, number) => {
      const own = run.evaluations.filter((one) => number === 0 || label in one.parts);
      return { label, number, run: index, dots: true, x: own.map((one) => one.version),
        y: own.map((one) => (number ? one.parts[label] : one.success)),
        band: number ? null : { low: own.map((one) => one.low), high: own.map((one) => one.high) } };
    })).filter((line) => line.x.length);
    return chart("Evaluation", "success, 95 % interval", lines, labels);
  }

  const WIDTH = 400, HEIGHT = 190, LEFT = 44, RIGHT = 8, TOP = 10, BOTTOM = 22;
  function chart(title, unit, lines, labels) {
    const xs = lines.flatMap((line) => line.x);
    const ys = lines.flatMap((line) => [...line.y, ...(line.band ? [...line.band.low, ...line.band.high] : [])]);
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
    if (y0 > 0 && y0 < 0.6 * y1) y0 = 0;
    if (y0 === y1) { y0 -= Math.abs(y0) / 2 || 0.5; y1 += Math.abs(y1) / 2 || 0.5; }
    const px = (x) => LEFT + (WIDTH - LEFT - RIGHT) * (x1 === x0 ? 0.5 : (x - x0) / (x1 - x0));
    const py = (y) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y0) / (y1 - y0);
    const at = (line, y = line.y) => line.x.map((x, i) => `${px(x).toFixed(1)},${py(y[i]).toFixed(1)}`);
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title, tabindex: 0 });
    for (const y of ticks(y0, y1, 4)) {
      svg.append(make("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y) }),
        make("text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, short(y)));
    }
    for (const x of ticks(x0, x1, 5)) svg.append(make("text", { x: px(x), y: HEIGHT - 6, "text-anchor": "middle" }, short(x)));
    const alone = runs.length === 1;
    const paint = (line) => color(alone ? line.number : line.run);
    for (const line of lines) {
      if (line.band) svg.append(make("path", { fill: paint(line), opacity: 0.16,
        d: `M${[...at(line, line.band.high), ...at(line, line.band.low).reverse()].join("L")}Z` }));
      svg.append(make("path", { d: `M${at(line).join("L")}`, fill: "none", stroke: paint(line), "stroke-width": 1.6,
        "stroke-linejoin": "round", "stroke-dasharray": alone ? "" : DASHES[line.number % 6] }));
      if (line.dots || line.x.length === 1) line.x.forEach((x, i) =>
        svg.append(make("circle", { cx: px(x), cy: py(line.y[i]), r: 2.6, fill: paint(line) })));
    }
    const cross = make("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    svg.append(cross);
    const steps = [...new Set(xs)].sort((a, b) => a - b);
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const x = x0 + ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0);
      return steps.reduce((best, step) => (Math.abs(step - x) < Math.abs(best - x) ? step : best), steps[0]);
    };
    svg.addEventListener("pointermove", (event) => {
      const step = nearest(event);
      cross.setAttribute("x1", px(step)); cross.setAttribute("x2", px(step)); cross.setAttribute("visibility", "visible");
      const values = lines.map((line) => [line, line.x.indexOf(step)]).filter(([, i]) => i >= 0)
        .map(([line, i]) => `${alone ? "" : runs[line.run].name + " "}${line.label}: ${short(line.y[i])}${
          line.band ? ` (${short(line.band.low[i])} to ${short(line.band.high[i])})` : ""}`);
      tip(event, [`${title === "Evaluation" ? "version" : "step"} ${step}`, ...values, "click: its rollouts"].join("\n"));
    });
    svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); $("#tip").hidden = true; });
    svg.addEventListener("click", (event) => {
      const step = nearest(event);
      const run = (lines.find((line) => line.x.includes(step)) || lines[0]).run;
      goto(run, title === "Evaluation" ? step : nearestStep(run, step), title === "Evaluation");
    });
    return make("div", { class: "chart", "data-chart": title },
      make("h3", {}, title, " ", make("small", {}, unit)), svg,
      make("div", { class: "labels" }, ...(labels.length < 2 ? [] : labels.map((label, index) => make("span", {},
        make("i", { class: "key", style: `background:${alone ? color(index) : "var(--soft)"}` }), label)))));
  }

  function ticks(low, high, count) {
    const raw = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step / 1e6 ? 0 : value);
    return found;
  }

  function tip(event, text) {
    const node = $("#tip");
    node.textContent = text;
    node.hidden = false;
    const width = node.offsetWidth;
    node.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    node.style.top = `${Math.min(event.clientY + 14, innerHeight - node.offsetHeight - 8)}px`;
  }

  // Rollouts. A metric of optimizer step n is reported after it, as n + 1 steps: its batch has number n.
  const nearestStep = (run, point) => {
    const known = runs[run].rollouts.filter((one) => one.outcome !== "evaluation" && one.step != null).map((one) => one.step);
    return known.length ? known.reduce((best, step) => (Math.abs(step - point + 1) < Math.abs(best - point + 1) ? step : best)) : null;
  };
  const COLUMNS = [
    ["step", "step", true], ["id", "rollout"], ["domain", "domain"], ["reward", "reward", true], ["success", "success"],
    ["advantage", "advantage", true], ["lag", "lag", true], ["tokens", "tokens", true], ["outcome", "outcome"],
    ["finish", "ended by"], ["flags", "flags"], ["said", "said"],
  ];

  function goto(run, step, evaluation = false) {
    const form = $("#filters");
    state.run = run; state.shown = 50;
    filters();
    form.elements.from.value = step ?? "";
    form.elements.to.value = step ?? "";
    form.elements.outcome.value = evaluation ? "evaluation" : "";
    if (step != null && !selected().length) { form.elements.from.value = form.elements.to.value = ""; }
    table();
    $("#rollouts").scrollIntoView();
  }

  function filters() {
    const form = $("#filters"), run = runs[state.run];
    const options = (values, all) => [make("option", { value: "" }, all), ...values.map((value) => make("option", { value }, value))];
    const unique = (pick) => [...new Set(run.rollouts.flatMap(pick))].sort();
    $("#note").textContent = run.note;
    form.replaceChildren(
      ...(runs.length > 1 ? [make("select", { name: "run", "aria-label": "run" }, ...runs.map((one, index) =>
        make("option", { value: index, selected: index === state.run }, one.name)))] : []),
      make("label", {}, "step ", make("input", { name: "from", type: "number", "aria-label": "first step" }), " to ",
        make("input", { name: "to", type: "number", "aria-label": "last step" })),
      make("select", { name: "domain", "aria-label": "domain" }, ...options(unique((one) => [one.domain]), "all domains")),
      make("select", { name: "outcome", "aria-label": "outcome" },
        ...options(unique((one) => [one.outcome, ...one.flags]), "all of training")),
      make("label", {}, make("select", { name: "field", "aria-label": "number" },
        ...["reward", "advantage", "lag", "tokens"].map((name) => make("option", { value: name }, name))), " ",
        make("input", { name: "low", type: "number", step: "any", "aria-label": "at least" }), " to ",
        make("input", { name: "high", type: "number", step: "any", "aria-label": "at most" })),
      make("input", { name: "text", type: "search", placeholder: "text", "aria-label": "text" }));
    form.oninput = (event) => {
      if (event.target.name === "run") { state.run = Number(event.target.value); filters(); }
      state.shown = 50;
      table();
    };
    form.onsubmit = (event) => event.preventDefault();
  }

  const said = (one) => (one.said ??= one.sequences.map((sequence) =>
    sequence.at.map((place) => sequence.pieces[place]).join("")).join(" ⏎ "));
  const whole = (one) => (one.whole ??= one.sequences.map((sequence) => sequence.pieces.join("")).join("\n").toLowerCase());

  function selected() {
    const form = $("#filters").elements;
    const bound = (name) => (form[name].value === "" ? null : Number(form[name].value));
    const [from, to, low, high] = ["from", "to", "low", "high"].map(bound);
    const [domain, outcome, field, text] = [form.domain.value, form.outcome.value, form.field.value, form.text.value.toLowerCase()];
    const inside = (value, least, most) => (least == null || (value != null && value >= least)) && (most == null || (value != null && value <= most));
    return runs[state.run].rollouts.filter((one) =>
      inside(one.step, from, to) && inside(one[field], low, high) && (!domain || one.domain === domain)
      && (outcome ? one.outcome === outcome || one.flags.includes(outcome) : one.outcome !== "evaluation") && (!text || whole(one).includes(text)));
  }

  function table() {
    const value = (one) => (state.sort === "said" ? said(one) : state.sort === "flags" ? one.flags.join() : one[state.sort]);
    const rows = selected().sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x == null || y == null) return (x == null) - (y == null);
      return (x < y ? -1 : x > y ? 1 : 0) * (state.down ? -1 : 1);
    });
    $("#table thead").replaceChildren(make("tr", {}, ...COLUMNS.map(([key, label, number]) =>
      make("th", { class: number ? "number" : "", "aria-sort": state.sort === key ? (state.down ? "descending" : "ascending") : null },
        make("button", { type: "button", onclick: () => { state.down = state.sort === key ? !state.down : true; state.sort = key; table(); } },
          label + (state.sort === key ? (state.down ? " ↓" : " ↑") : ""))))));
    $("#table tbody").replaceChildren(...rows.slice(0, state.shown).map((one) => make("tr",
      { tabindex: 0, "data-id": one.id, class: state.open.includes(one) ? "open" : "",
        onclick: () => open(one), onkeydown: (event) => { if (event.key === "Enter") open(one); } },
      ...COLUMNS.map(([key, , number]) => cell(one, key, number)))));
    if (!rows.length) $("#table tbody").append(make("tr", {}, make("td", { colspan: COLUMNS.length }, "No rollout matches.")));
    $("#more").hidden = rows.length <= state.shown;
    $("#more").textContent = `more (${rows.length - state.shown} left)`;
    $("#more").onclick = () => { state.shown += 200; table(); };
  }

  function cell(one, key, number) {
    if (key === "success") return make("td", { class: one.success == null ? "" : one.success ? "yes" : "no" }, one.success == null ? "–" : one.success ? "yes" : "no");
    if (key === "said") return make("td", { class: "said" }, said(one));
    if (key === "flags") return make("td", {}, one.flags.join(", "));
    return make("td", { class: number ? "number" : "" }, number ? short(one[key]) : one[key]);
  }

  function open(one, beside = false) {
    state.open = beside ? [state.open[0], one] : [one];
    table();
    detail();
    if (!beside) $("#detail").scrollIntoView({ block: "nearest" });
  }

  // The detail: one or two attempts, token by token.
  const PAINTS = { version: "weight version", logprob: "server's log-probability", ratio: "ratio trainer / server", entropy: "entropy" };
  function detail() {
    const [first, second] = state.open, box = $("#detail");
    box.hidden = !first;
    box.className = second ? "two" : "";
    if (!first) return;
    const others = runs[state.run].rollouts.filter((one) => one.group === first.group && one !== first);
    box.replaceChildren(
      make("div", { class: "bar" },
        make("label", {}, "colour: ", make("select", { "aria-label": "colour", onchange: (event) => { state.paint = event.target.value; detail(); } },
          ...Object.entries(PAINTS).map(([value, label]) => make("option", { value, selected: state.paint === value }, label)))),
        others.length ? make("span", {}, "beside it: ") : null,
        ...others.map((one) => make("button", { type: "button", "data-beside": one.id, "aria-pressed": String(one === second),
          onclick: () => open(one, true) }, `${one.id.slice(one.group.length + 1)} (${short(one.reward)})`)),
        make("button", { type: "button", onclick: () => { state.open = []; table(); detail(); } }, "close")),
      ...state.open.map(attempt),
      make("div", { class: "token", id: "token" }, make("span", { class: "facts" }, "Point at a sampled token.")));
  }

  function attempt(one) {
    const facts = [["reward", one.reward], ["advantage", one.advantage], ["lag", one.lag], ["tokens", one.tokens]]
      .filter(([, value]) => value != null);
    return make("article", { class: "panel", "data-attempt": one.id },
      make("h3", {}, `${one.id}, ${one.outcome}${one.step == null ? "" : one.outcome === "evaluation" ? ` of version ${one.step}` : `, step ${one.step}`}`),
      make("div", { class: "facts" }, ...facts.flatMap(([name, value]) => [`${name} `, make("b", {}, short(value)), "  "]),
        `ended by ${one.finish}  `, one.servers.length ? `on ${one.servers.join(", ")}  ` : "",
        Object.entries(one.metrics).map(([name, value]) => `${name} ${short(value)}`).join("  ")),
      ...Object.entries(one.problem).map(([name, value]) => make("div", { class: "facts" }, `${name}: `, make("b", {}, value))),
      make("div", { class: "facts" }, "versions ", ...one.versions.map((version, index) =>
        make("b", { style: `background:var(--band${index % 6});padding:0 5px;border-radius:3px;margin-right:4px` }, String(version)))),
      ...one.sequences.map((sequence, index) => tokens(one, sequence, index)));
  }

  function tokens(one, sequence, index) {
    const place = new Map(sequence.at.map((position, number) => [position, number]));
    const altered = new Set(sequence.altered || []);
    const nodes = [];
    let quiet = "";
    const flush = () => { if (quiet) nodes.push(make("i", {}, quiet)); quiet = ""; };
    sequence.pieces.forEach((piece, position) => {
      if (sequence.omitted && position === sequence.omitted[0]) { flush(); nodes.push(make("span", { class: "gap" }, `… ${sequence.omitted[1]} tokens left out …`)); }
      const number = place.get(position);
      if (number === undefined) { quiet += piece; return; }
      flush();
      const show = (event) => describeToken(one, sequence, number, piece, event.currentTarget);
      nodes.push(make("u", { class: altered.has(number) ? "altered" : "", style: `background:${paint(one, sequence, number)}`,
        "data-token": number, onpointerenter: show, onclick: show }, piece));
    });
    flush();
    return make("div", { class: "tokens", "data-sequence": index }, ...nodes);
  }

  const scale = (share, hue) => `hsl(${hue} 80% 50% / ${(0.06 + 0.6 * Math.max(0, Math.min(1, share))).toFixed(2)})`;
  function paint(one, sequence, number) {
    if (state.paint === "version") return `var(--band${one.versions.indexOf(sequence.versions[number]) % 6})`;
    if (state.paint === "logprob") return scale(-sequence.logprobs[number] / 4000, 20);
    if (state.paint === "entropy") return sequence.entropy ? scale(sequence.entropy[number] / 3000, 280) : "none";
    if (!sequence.trained) return "none";
    const moved = (sequence.trained[number] - sequence.logprobs[number]) / 1000;
    return scale(Math.abs(moved) / 0.7, moved > 0 ? 140 : 0);
  }

  function describeToken(one, sequence, number, piece, node) {
    document.querySelectorAll(".tokens u.on").forEach((other) => other.classList.remove("on"));
    node.classList.add("on");
    const version = sequence.versions[number], server = sequence.logprobs[number] / 1000;
    const trainer = sequence.trained ? sequence.trained[number] / 1000 : null;
    const facts = [
      ["token", JSON.stringify(piece)], ["version", version],
      ["lag", one.outcome === "evaluation" || one.step == null ? null : one.step - version],
      ["log-prob of the server", server.toFixed(3)],
      ["of the trainer", trainer == null ? "not archived" : trainer.toFixed(3)],
      ["ratio", trainer == null ? null : Math.exp(trainer - server).toFixed(4)],
      ["entropy", sequence.entropy ? (sequence.entropy[number] / 1000).toFixed(3) : null],
      ["clipped or corrected", sequence.trained ? ((sequence.altered || []).includes(number) ? "yes" : "no") : null],
      ["advantage", sequence.advantage == null ? null : short(sequence.advantage)],
    ];
    $("#token").replaceChildren(...facts.filter(([, value]) => value != null)
      .map(([name, value]) => make("span", {}, make("span", { class: "facts" }, `${name} `), make("b", {}, String(value)))));
  }

  function survivorship() {
    const panels = runs.map((run) => {
      const { outcomes, deciles } = run.survivorship;
      const [head, ...drops] = run.drops;
      if (!outcomes.length && !drops.length) return null;
      const total = outcomes.reduce((sum, outcome) => sum + outcome.count, 0);
      return make("div", { class: "panel" }, make("h3", {}, run.name),
        make("div", { class: "stack" }, ...outcomes.map((outcome, index) => make("div",
          { style: `flex:${outcome.count};background:${color(index)}`, title: `${outcome.outcome} ${outcome.count}` }))),
        !outcomes.length ? null : make("table", {}, make("tbody", {}, make("tr", {}, ...["outcome", "rollouts", "share", "mean tokens", "mean reward"].map((text, i) =>
          make("th", { class: i ? "number" : "" }, text))),
          ...outcomes.map((outcome, index) => make("tr", {}, make("td", {}, make("i", { class: "key", style: `background:${color(index)}` }), outcome.outcome),
            ...[outcome.count, `${(100 * outcome.count / total).toFixed(1)} %`, short(outcome.tokens), short(outcome.reward)].map((text) =>
              make("td", { class: "number" }, String(text))))))),
        deciles.some((share) => share > 0) ? make("div", {}, make("div", { class: "bars", role: "img", "aria-label": "loss by length" },
          ...deciles.map((share, index) => make("div", { style: `height:${100 * share}%`, title: `decile ${index + 1}: ${(100 * share).toFixed(1)} %` }))),
          make("p", { class: "note" }, `Share of sampled tokens that max_lag_steps took away, shortest tenth of the rollouts to the longest: ${deciles.map((share) => `${(100 * share).toFixed(0)}`).join(", ")} %.`)) : null,
        !drops.length ? null : make("div", { class: "scroll" }, make("table", {}, make("tbody", {},
          make("tr", {}, ...head.map((text) => make("th", {}, text))),
          ...drops.map((row) => make("tr", {}, ...row.map((text) => make("td", {}, text))))))));
    }).filter(Boolean);
    $("#survivorship").hidden = !panels.length;
    $("#survivorship .grid").replaceChildren(...panels);
  }

  function time() {
    const panels = runs.flatMap((run) => run.time.map(({ role, parts }) => {
      const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
      const share = (seconds) => `${(100 * seconds / total).toFixed(0)} %`;
      return make("div", { class: "panel" }, make("h3", {}, runs.length > 1 ? `${run.name}: ${role}` : role),
        make("div", { class: "stack" }, ...parts.map(([name, seconds], index) =>
          make("div", { style: `flex:${seconds / total};background:${index === parts.length - 1 ? "var(--line)" : color(index)}`, title: `${name} ${share(seconds)}` }))),
        ...parts.map(([name, seconds], index) => make("div", { class: "facts" }, make("i", { class: "key",
          style: `background:${index === parts.length - 1 ? "var(--line)" : color(index)}` }), `${name} `, make("b", {}, `${share(seconds)}, ${short(seconds)} s`))));
    }));
    $("#time").hidden = !panels.length;
    $("#time .grid").replaceChildren(...panels);
  }

  function config() {
    const rows = (head, body) => make("div", { class: "scroll" }, make("table", { class: "config" },
      make("thead", {}, make("tr", {}, ...head.map((text) => make("th", {}, text)))),
      make("tbody", {}, ...body.map((row) => make("tr", {}, ...row.map((text) => make("td", {}, text)))))));
    const parts = [];
    if (runs.length > 1) {
      const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
      const differing = keys.filter((key) => new Set(runs.map((run) => run.config[key])).size > 1);
      parts.push(make("p", { class: "note" }, "What differs between the runs:"),
        rows(["key", ...runs.map((run) => run.name)], differing.map((key) => [key, ...runs.map((run) => run.config[key] ?? "–")])));
    }
    for (const run of runs) {
      parts.push(make("p", { class: "note" }, `What differs from the defaults${runs.length > 1 ? ` in ${run.name}` : ""}:`),
        rows(["key", "value", "default"], run.changed),
        make("details", {}, make("summary", {}, "all keys"), rows(["key", "value"], Object.entries(run.config))));
    }
    $("#config > div").replaceChildren(...parts);
  }

  load(await unpack(packed));
  document.body.dataset.ready = "true";
  if (document.body.dataset.live === "true") setInterval(async () => {
    const answer = await fetch("data", { cache: "no-store" });
    if (!answer.ok) return;
    const fresh = await unpack(await answer.arrayBuffer());
    if (fresh.made === made) return;
    const form = $("#filters").elements, kept = [...form].map((input) => input.value);
    const ids = state.open.map((one) => one.id);
    load(fresh);
    [...$("#filters").elements].forEach((input, index) => { input.value = kept[index] ?? ""; });
    state.open = ids.map((id) => runs[state.run].rollouts.find((one) => one.id === id)).filter(Boolean);
    table();
  }, 3000);
})();
