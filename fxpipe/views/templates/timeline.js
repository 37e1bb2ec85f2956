"use strict";
/* Timelines below each other on one scale of time, zoomed and panned together. */
const SVG = "http://www.w3.org/2000/svg";

function draw(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function showSeconds(value, digits = 3) {
  for (const [size, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]) {
    if (value >= size) return `${Number((value / size).toPrecision(digits))} ${unit}`;
  }
  return value > 0 ? `${Number((value * 1e9).toPrecision(digits))} ns` : "0 s";
}

function showBytes(value) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

const KIND_NAMES = {
  F: "forward", I: "input gradient", W: "weight gradient", B: "backward", pair: "forward and backward as one",
  communication: "communication", idle: "idle", host: "host",
};
const TASKS = ["F", "I", "W", "B", "pair"];

class Chart {
  constructor(box, tell) {
    this.box = box;
    this.tell = tell;
    this.timelines = [];
    this.byStage = false;
    this.chosen = null;
    this.current = null;
    this.svg = draw("svg", {});
    box.append(this.svg);
    this.listen();
  }

  show(timelines) {
    this.timelines = timelines;
    this.full = Math.max(...timelines.map((timeline) => timeline.duration)) || 1e-9;
    this.chosen = this.current = null;
    this.view = [0, this.full];
    this.render();
  }

  get left() { return this.box.clientWidth < 600 ? 46 : 58; }
  get plot() { return Math.max(50, this.box.clientWidth - this.left - 10); }
  x(time) { return ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.plot; }
  time(x) { return this.view[0] + (x / this.plot) * (this.view[1] - this.view[0]); }

  /* Zooming and panning. */

  look(start, end) {
    const span = Math.min(this.full, Math.max(end - start, this.full / 5000));
    const first = Math.min(Math.max(0, start), this.full - span);
    this.view = [first, first + span];
    this.schedule();
  }

  zoom(factor, at = this.plot / 2) {
    const centre = this.time(at);
    const [start, end] = this.view;
    this.look(centre - (centre - start) * factor, centre + (end - centre) * factor);
  }

  pan(part) {
    const span = this.view[1] - this.view[0];
    this.look(this.view[0] + part * span, this.view[1] + part * span);
  }

  get isWhole() { return this.view[1] - this.view[0] > this.full * 0.999; }

  schedule() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => { this.frame = null; this.render(); });
  }

  listen() {
    this.svg.addEventListener("wheel", (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      if (!sideways && this.isWhole && event.deltaY > 0) return;
      if (sideways && this.isWhole) return;
      event.preventDefault();
      if (sideways) this.pan((event.deltaX || event.deltaY) / this.plot);
      else this.zoom(Math.exp(event.deltaY * 0.002), event.clientX - this.svg.getBoundingClientRect().left - this.left);
    }, { passive: false });
    let drag = null;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button === 0) drag = { x: event.clientX, view: this.view, moved: false };
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!drag) return;
      const moved = event.clientX - drag.x;
      if (!drag.moved && Math.abs(moved) < 5) return;
      if (!drag.moved) { drag.moved = true; this.svg.setPointerCapture(event.pointerId); this.svg.classList.add("dragging"); }
      const [start, end] = drag.view;
      const shift = (-moved / this.plot) * (end - start);
      this.look(start + shift, end + shift);
    });
    const stop = () => { drag = null; this.svg.classList.remove("dragging"); };
    this.svg.addEventListener("pointerup", stop);
    this.svg.addEventListener("pointercancel", stop);
    this.box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.timelines.length && this.schedule()).observe(this.box);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const bubble = event.target.closest(".bubble");
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (bubble && (event.key === "Enter" || event.key === " ")) this.choose(bubble.dataset.key);
    else if (event.key === "+" || event.key === "=") this.zoom(0.6);
    else if (event.key === "-") this.zoom(1 / 0.6);
    else if (event.key === "0") this.look(0, this.full);
    else if (bubble && steps[event.key]) this.step(bubble.dataset.key, ...steps[event.key]);
    else if (event.key === "ArrowLeft") this.pan(-0.2);
    else if (event.key === "ArrowRight") this.pan(0.2);
    else return;
    event.preventDefault();
  }

  /* Bubbles: `timeline:rank:number`. */

  bubble(key) {
    const [timeline, rank, number] = key.split(":").map(Number);
    return { timeline, rank, number, ...this.timelines[timeline].ranks[rank].bubbles[number] };
  }

  /* To the next bubble of the rank, or to the nearest one of the rank above or below. */
  step(key, lanes, numbers) {
    const from = this.bubble(key);
    let { timeline, rank, number } = from;
    if (numbers) number += numbers;
    else {
      do {
        rank += lanes;
        if (rank < 0) { timeline -= 1; rank = timeline >= 0 ? this.timelines[timeline].ranks.length - 1 : 0; }
        else if (rank >= this.timelines[timeline].ranks.length) { timeline += 1; rank = 0; }
        if (timeline < 0 || timeline >= this.timelines.length) return;
      } while (!this.timelines[timeline].ranks[rank].bubbles.length);
      const distance = (b) => Math.abs(b.start - from.start);
      const all = this.timelines[timeline].ranks[rank].bubbles;
      number = all.reduce((best, b, k) => (distance(b) < distance(all[best]) ? k : best), 0);
    }
    const target = this.timelines[timeline].ranks[rank].bubbles[number];
    if (!target) return;
    this.current = `${timeline}:${rank}:${number}`;
    if (target.end < this.view[0] || target.start > this.view[1]) {
      const span = this.view[1] - this.view[0];
      this.view = [target.start - span / 4, target.start + (3 * span) / 4];
      this.look(...this.view);
    }
    this.render(true);
  }

  choose(key) {
    const found = this.bubble(key);
    const timeline = this.timelines[found.timeline];
    this.chosen = this.current = key;
    const why = found.cause ? `waits for ${found.cause}` : "has nothing left to do in this step";
    this.tell(`${timeline.name === "planned" ? "Planned" : "Measured"}: rank ${found.rank} is idle for `
      + `${showSeconds(found.end - found.start)} at ${showSeconds(found.start)}: it ${why}.`);
    const match = /^(.*) of rank (\d+)$/.exec(found.cause || "");
    this.awaited = match ? { timeline: found.timeline, rank: Number(match[2]), name: match[1] } : null;
    this.render();
  }

  /* The bubble of the last timeline that begins at this time, brought into view. */
  find(rank, start) {
    const timeline = this.timelines.length - 1;
    const number = this.timelines[timeline].ranks[rank].bubbles.findIndex((b) => Math.abs(b.start - start) < 1e-12);
    if (number < 0) return;
    const { end } = this.timelines[timeline].ranks[rank].bubbles[number];
    const span = Math.max(4 * (end - start), this.full / 20);
    this.look((start + end - span) / 2, (start + end + span) / 2);
    this.choose(`${timeline}:${rank}:${number}`);
    this.box.scrollIntoView({ block: "nearest" });
  }

  /* Drawing. */

  colour(span) {
    if (span.kind === "other") return COLOURS.kinds.host;
    if (this.byStage) return span.stage === undefined ? COLOURS.kinds.host : stageColour(span.stage);
    return COLOURS.kinds[span.kind];
  }

  render(refocus = false) {
    const focused = refocus || (document.activeElement && document.activeElement.closest && document.activeElement.closest(".bubble"));
    const most = Math.max(...this.timelines.map((timeline) => timeline.ranks.length));
    const height = most <= 8 ? 24 : most <= 16 ? 16 : 10;
    const strip = 5;
    const gap = most <= 16 ? 6 : 3;
    const parts = [draw("defs", {}, draw("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      draw("line", { class: "hatch-line", x1: 0, y1: 0, x2: 0, y2: 6 })))];
    let y = 6;
    let stops = 0;
    this.timelines.forEach((timeline, index) => {
      const title = timeline.name === "planned" ? "Planned" : `Measured, step ${timeline.step}`;
      parts.push(draw("text", { class: "title", x: 10, y: y + 13 }, `${title}: ${showSeconds(timeline.duration)}`));
      y += 22;
      timeline.ranks.forEach((rank, number) => {
        const label = this.left < 50 ? `r${number}` : `rank ${number}`;
        if (height >= 10) parts.push(draw("text", { x: 10, y: y + height / 2 + 4 }, label));
        const lane = draw("svg", { x: this.left, y, width: this.plot, height: height + strip + 2, overflow: "hidden" });
        lane.append(draw("rect", { class: "lane", x: this.x(0), y: 0, width: Math.max(0, this.x(timeline.duration) - this.x(0)), height }));
        this.drawBubbles(lane, index, number, rank, height);
        this.drawSpans(lane, rank, height, strip);
        this.drawAwaited(lane, index, number, rank, height);
        parts.push(lane);
        y += height + strip + gap;
      });
      y += 8;
    });
    parts.push(...this.axis(y));
    this.svg.setAttribute("height", y + 24);
    this.svg.replaceChildren(...parts);
    const bubbles = [...this.svg.querySelectorAll(".bubble")];
    const stop = bubbles.find((b) => b.dataset.key === this.current) || bubbles[0];
    if (stop) stop.setAttribute("tabindex", "0");
    if (stop && focused && (stop.dataset.key === this.current || refocus)) stop.focus({ preventScroll: !refocus });
    this.box.dataset.start = this.view[0];
    this.box.dataset.end = this.view[1];
  }

  drawBubbles(lane, timeline, number, rank, height) {
    rank.bubbles.forEach((bubble, k) => {
      const left = this.x(bubble.start);
      const width = this.x(bubble.end) - left;
      const key = `${timeline}:${number}:${k}`;
      if (left > this.plot || left + width < 0 || (width < 1.5 && key !== this.current)) return;
      const why = bubble.cause ? `waits for ${bubble.cause}` : "nothing left to do";
      const label = `bubble, rank ${number}, ${showSeconds(bubble.end - bubble.start)}: ${why}`;
      const group = draw("g", { class: key === this.chosen ? "bubble chosen" : "bubble", tabindex: "-1", role: "button", "aria-label": label, "data-key": key },
        draw("rect", { x: left + 1, y: 1, width: Math.max(1, width - 2), height: height - 2 }), draw("title", {}, label));
      group.addEventListener("click", () => { this.choose(key); });
      group.addEventListener("focus", () => { this.current = key; });
      lane.append(group);
    });
  }

  drawSpans(lane, rank, height, strip) {
    const edges = { compute: -1e9, send: -1e9, receive: -1e9 };
    for (const span of rank.spans) {
      if (span.kind === "wait" && span.track === "compute") continue;
      const left = this.x(span.start);
      const right = this.x(span.end);
      if (left > this.plot || right < 0) continue;
      if (right - left < 0.6 && left - edges[span.track] < 0.6) continue;
      edges[span.track] = Math.max(left, right);
      const width = Math.max(0.6, right - left);
      const facts = [span.name, KIND_NAMES[span.kind], `${showSeconds(span.end - span.start)} at ${showSeconds(span.start)}`,
        span.bytes === undefined ? "" : showBytes(span.bytes)].filter(Boolean).join(", ");
      if (span.track !== "compute") {
        const fill = this.byStage && span.stage !== undefined ? stageColour(span.stage) : COLOURS.kinds.communication;
        lane.append(draw("rect", { x: left, y: height + 1, width: Math.max(1.5, width), height: strip, fill }, draw("title", {}, facts)));
        continue;
      }
      const box = { class: "span", x: left, y: 0, width, height, fill: this.colour(span) };
      lane.append(draw("rect", box, draw("title", {}, facts)));
      if (span.kind === "pair" && !this.byStage) {
        lane.append(draw("rect", { ...box, height: height / 2, fill: COLOURS.kinds.F, "pointer-events": "none" }));
      }
      const label = this.byStage ? span.name : span.microbatch === undefined ? "" : String(span.microbatch);
      const seen = [Math.max(0, left), Math.min(this.plot, left + width)];
      const room = seen[1] - seen[0];
      const text = room > 6.5 * span.name.length + 6 ? span.name : label;
      if (span.kind !== "other" && height >= 16 && room > 6.5 * text.length + 4) {
        const middle = (seen[0] + seen[1]) / 2;
        lane.append(draw("text", { class: "box", x: middle, y: height / 2 + 4 }, text));
      }
    }
  }

  drawAwaited(lane, timeline, number, rank, height) {
    const { awaited } = this;
    if (!this.chosen || !awaited || awaited.timeline !== timeline || awaited.rank !== number) return;
    const span = rank.spans.find((s) => s.name === awaited.name && s.kind !== "wait");
    if (!span) return;
    const left = this.x(span.start);
    lane.append(draw("rect", { class: "awaited", x: left, y: 1, width: Math.max(3, this.x(span.end) - left), height: height - 2 }));
  }

  axis(y) {
    const span = this.view[1] - this.view[0];
    const rough = span / Math.max(3, Math.floor(this.plot / 100));
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((k) => k * power >= rough);
    const parts = [draw("line", { class: "axis", x1: this.left, x2: this.left + this.plot, y1: y, y2: y })];
    for (let tick = Math.ceil(this.view[0] / step) * step; tick <= this.view[1] + step * 1e-6; tick += step) {
      const x = this.left + this.x(tick);
      if (x > this.left + this.plot - 18 && tick > 0) break;
      parts.push(draw("line", { class: "axis", x1: x, x2: x, y1: y, y2: y + 4 }));
      parts.push(draw("text", { x, y: y + 17, "text-anchor": tick > 0 ? "middle" : "start" }, showSeconds(tick, 4)));
    }
    return parts;
  }
}
