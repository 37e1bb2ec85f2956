"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);

  function legend(box, entries) {
    box.replaceChildren(...entries.map(([colour, text, mark]) => {
      const swatch = make("span", { class: "swatch" });
      if (mark) swatch.style.border = `1.5px ${mark} var(--muted)`;
      else swatch.style.background = colour;
      return make("span", {}, swatch, text);
    }));
  }

  /* The timeline. */

  function timelineSection() {
    const planned = data.timelines.filter((timeline) => timeline.name === "planned");
    const measured = data.timelines.filter((timeline) => timeline.name !== "planned");
    const chart = new Chart(by("chart"), (text) => { by("cause").textContent = text; });
    const step = by("step");
    step.append(...measured.map((timeline, k) => make("option", { value: k }, String(timeline.step))));
    step.value = String(measured.length - 1);
    by("step-label").classList.toggle("hidden", measured.length < 2);
    const legends = () => {
      const used = new Set(chart.timelines.flatMap((timeline) => timeline.ranks.flatMap((rank) => rank.spans.map((span) => span.kind))));
      const stages = [...new Set(chart.timelines.flatMap((timeline) => timeline.ranks.flatMap((rank) => rank.spans.map((span) => span.stage))))]
        .filter((stage) => stage !== undefined).sort((a, b) => a - b);
      const own = chart.byStage
        ? stages.slice(0, 24).map((stage) => [stageColour(stage), `stage ${stage}`])
        : TASKS.filter((kind) => used.has(kind)).map((kind) => [COLOURS.kinds[kind], `${kind} ${KIND_NAMES[kind]}`]);
      legend(by("legend"), [...own, [COLOURS.kinds.communication, "send, receive (thin)"], [COLOURS.kinds.host, "other"], ["", "bubble", "dashed"]]);
    };
    const show = () => {
      const chosen = measured[Number(step.value)];
      const shown = [...planned, ...(chosen ? [chosen] : [])];
      chart.show(shown);
      by("shared").classList.toggle("hidden", !shown.some((timeline) => timeline.shared_thread));
      legends();
      shares(shown);
      memory(planned[0], chosen);
    };
    const colourBy = (stage) => {
      chart.byStage = stage;
      by("by-stage").setAttribute("aria-pressed", String(stage));
      by("by-kind").setAttribute("aria-pressed", String(!stage));
      chart.render();
      legends();
    };
    step.addEventListener("change", show);
    by("zoom-in").addEventListener("click", () => chart.zoom(0.6));
    by("zoom-out").addEventListener("click", () => chart.zoom(1 / 0.6));
    by("zoom-reset").addEventListener("click", () => chart.look(0, chart.full));
    by("by-kind").addEventListener("click", () => colourBy(false));
    by("by-stage").addEventListener("click", () => colourBy(true));
    for (const button of document.querySelectorAll("button.link[data-start]")) {
      button.addEventListener("click", () => {
        if (Number(step.value) !== measured.length - 1) { step.value = String(measured.length - 1); show(); }
        chart.find(Number(button.dataset.rank), Number(button.dataset.start));
      });
    }
    show();
  }

  function shares(timelines) {
    const rows = [];
    const width = by("shares").clientWidth - (NARROW.matches ? 0 : 165);
    timelines[0].ranks.forEach((_, number) => {
      for (const timeline of timelines) {
        const found = timeline.ranks[number].shares;
        const bar = make("div", { class: "bar" });
        const told = [];
        for (const name of data.shares) {
          const part = found[name] / timeline.duration;
          if (!(part > 0)) continue;
          const percent = `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`;
          told.push(`${name} ${percent}`);
          const piece = make("span", { class: name, title: `${KIND_NAMES[name]}: ${showSeconds(found[name])}, ${percent}` },
            part * width > 7 * `${name} ${percent}`.length ? `${name} ${percent}` : "");
          piece.style.width = `${100 * part}%`;
          if (name !== "idle") piece.style.background = COLOURS.kinds[name];
          bar.append(piece);
        }
        bar.setAttribute("role", "img");
        bar.setAttribute("aria-label", told.join(", "));
        rows.push(make("div", { class: "share" }, make("span", {}, `rank ${number}, ${timeline.name}`), bar));
      }
    });
    by("shares").replaceChildren(...rows);
  }

  /* Memory over time: one scale for all ranks. */

  function memory(planned, measured) {
    const full = Math.max(planned ? planned.duration : 0, measured ? measured.duration : 0) || 1;
    const all = [planned, measured].filter(Boolean);
    const peakOf = (points) => points.reduce((most, [, size]) => Math.max(most, size), 0);
    const most = Math.max(1, ...all.flatMap((timeline) => timeline.ranks.map((rank) => peakOf(rank.memory))));
    legend(by("memory-legend"), [...(measured ? [[getComputedStyle(document.body).getPropertyValue("--accent"), "measured"]] : []), ...(planned ? [["", "planned", "dashed"]] : [])]);
    const path = (rank, closed) => {
      const points = rank.memory;
      if (!points.length) return null;
      const x = (time) => (300 * time / full).toFixed(2);
      const y = (size) => (112 - 104 * size / most).toFixed(2);
      let line = `M${x(points[0][0])} ${y(points[0][1])}`;
      for (const [time, size] of points.slice(1)) line += `H${x(time)}V${y(size)}`;
      line += `H${x(Math.max(points[points.length - 1][0], full))}`;
      return closed ? `${line}V112H${x(points[0][0])}Z` : line;
    };
    const figures = all[0].ranks.map((_, number) => {
      const svg = draw("svg", { viewBox: "0 0 300 120", preserveAspectRatio: "none", role: "img" });
      const told = [];
      svg.append(draw("line", { class: "axis", x1: 0, x2: 300, y1: 112, y2: 112, "vector-effect": "non-scaling-stroke" }));
      for (const [timeline, name] of [[measured, "measured"], [planned, "planned"]]) {
        const rank = timeline && timeline.ranks[number];
        if (!rank || !rank.memory.length) continue;
        told.push(`${name} ${showBytes(peakOf(rank.memory))}`);
        if (name === "measured") svg.append(draw("path", { class: "measured-area", d: path(rank, true) }));
        svg.append(draw("path", { class: `${name}-line`, d: path(rank, false), "vector-effect": "non-scaling-stroke" }));
      }
      const text = told.length ? `peak: ${told.join(", ")}` : "not known";
      svg.setAttribute("aria-label", `memory of rank ${number}, ${text}`);
      return make("figure", {}, make("figcaption", {}, make("span", {}, `rank ${number}`), make("span", { class: "muted" }, text)), svg);
    });
    by("memory-charts").replaceChildren(...figures);
  }

  /* Passes, each drawn when it is opened. */

  function passSection() {
    const panel = sourcePanel(data.dump.excerpts);
    const list = by("pass-list");
    const redraw = [];
    data.dump.passes.forEach((pass, k) => {
      const before = k ? data.dump.passes[k - 1] : { text: [], places: {} };
      const same = k > 0 && pass.changes.every(([tag]) => tag === "equal");
      const time = k && pass.seconds !== undefined ? showSeconds(pass.seconds) : "";
      const count = pass.total === undefined ? "" : `${pass.total} operators`;
      const body = make("div", { class: "body" });
      const summary = make("summary", {}, make("span", { class: "muted number" }, String(pass.number)),
        make("span", { class: same ? "name muted" : "name" }, pass.name, same ? " (no change)" : ""),
        make("span", { class: "muted number count" }, count), make("span", { class: "muted number" }, time));
      const details = make("details", { class: "pass", id: `pass-${pass.number}` }, summary, body);
      const fill = () => { if (details.open) body.replaceChildren(differenceView(before, pass, (...found) => { body.append(panel); panel.show(...found); })); };
      details.addEventListener("toggle", fill);
      redraw.push(fill);
      list.append(details);
    });
    for (const name of data.dump.off) list.append(make("div", { class: "pass-off" }, `${name}: off`));
    NARROW.addEventListener("change", () => redraw.forEach((fill) => fill()));
  }

  if (data.timelines.length) timelineSection();
  if (data.dump) passSection();
  const grid = by("grid");
  if (grid) grid.replaceChildren(...colouredActions(grid.textContent));
})();
