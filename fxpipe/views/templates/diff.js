"use strict";
/* The program before and after a pass: side by side, or one below the other where that is narrow. */
const NARROW = matchMedia("(max-width: 760px)");
const CONTEXT = 3;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function stageColour(stage) {
  return COLOURS.stages[stage % COLOURS.stages.length];
}

/* Task -> where on this page its compiled code is; a page that shows code fills it. */
const CODE_LINKS = new Map();

/* A line of a program; the value that it makes is a button that shows the model's line. */
function codeLine(text, places, show) {
  const match = /^(\s+)%(\w+)(?=[:\s])(.*)$/s.exec(text);
  const task = /^graph (\d+[FIWB])(?=\()/.exec(text);
  if (task && CODE_LINKS.has(task[1])) {
    return ["graph ", make("a", { href: CODE_LINKS.get(task[1]), title: "the code that Inductor made of it" }, task[1]), text.slice(task[0].length)];
  }
  const place = match && places && Object.hasOwn(places, match[2]) ? places[match[2]] : null;
  if (!place) return [text];
  const node = make("button", { class: "node", type: "button", tabindex: "-1" }, "%" + match[2]);
  const [line, stage] = place;
  if (stage !== null) node.style.setProperty("--stage", stageColour(stage));
  const facts = [stage === null ? "no stage" : `stage ${stage}`, line === null ? "no source line" : ""];
  node.setAttribute("aria-label", `%${match[2]}, ${facts.filter(Boolean).join(", ")}: show its source line`);
  node.addEventListener("click", () => show(match[2], line, stage));
  return [match[1], node, match[3]];
}

function differenceView(before, pass, show) {
  const unified = NARROW.matches;
  const view = make("div", { class: unified ? "diff unified" : "diff" });
  const head = unified ? ["before (\u2212) and after (+)"] : ["before", "after"];
  view.append(make("div", { class: "diff-head" }, ...head.map((text) => make("div", {}, text))));
  const line = (text, kind, places) => make("div", { class: `cell ${kind}` }, ...codeLine(text, places, show));
  const row = (left, right) => make("div", { class: "diff-row" }, ...[left, right].filter(Boolean));
  const equal = (i, j) => {
    const after = line(pass.text[j], "", pass.places);
    return unified ? row(after) : row(line(before.text[i], "", before.places), after);
  };
  const changed = ([, a, b, c, d]) => {
    const gone = before.text.slice(a, b).map((text) => line(text, "gone", before.places));
    const come = pass.text.slice(c, d).map((text) => line(text, "come", pass.places));
    if (unified) return [...gone, ...come].map((cell) => row(cell));
    return Array.from({ length: Math.max(gone.length, come.length) }, (_, k) =>
      row(gone[k] || make("div", { class: "cell none" }), come[k] || make("div", { class: "cell none" })));
  };
  pass.changes.forEach((stretch, number) => {
    const [tag, a, b, c] = stretch;
    if (tag !== "equal") return view.append(...changed(stretch));
    const first = number === 0 ? 0 : CONTEXT;
    const last = number === pass.changes.length - 1 ? 0 : CONTEXT;
    const rows = (from, to) => Array.from({ length: to - from }, (_, k) => equal(a + from + k, c + from + k));
    if (b - a <= first + last + 3) return view.append(...rows(0, b - a));
    const hidden = b - a - first - last;
    const fold = make("button", { class: "fold", type: "button" }, `\u22ef ${hidden} equal lines`);
    fold.addEventListener("click", () => fold.replaceWith(...rows(first, b - a - last)));
    view.append(...rows(0, first), fold, ...rows(b - a - last, b - a));
  });
  roveNodes(view);
  return view;
}

/* One stop of the Tab key for all values; arrows go from one to the next. */
function roveNodes(view) {
  const nodes = () => [...view.querySelectorAll(".node")];
  const first = nodes()[0];
  if (first) first.tabIndex = 0;
  view.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.classList.contains("node")) return;
    const all = nodes();
    const next = all[all.indexOf(event.target) + step];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

function sourcePanel(excerpts) {
  const panel = make("section", { class: "source-panel hidden", "aria-live": "polite", "aria-label": "Source line" });
  let opener = null;
  const close = () => {
    panel.classList.add("hidden");
    if (opener) opener.focus();
  };
  panel.show = (name, line, stage) => {
    opener = document.activeElement;
    const found = line === null ? null : excerpts[line];
    const title = make("div", {}, make("strong", { class: "mono" }, "%" + name));
    if (stage !== null) {
      const chip = make("span", { class: "chip" }, `stage ${stage}`);
      chip.style.background = stageColour(stage);
      title.append(" ", chip);
    }
    if (found && found.file) {
      title.append(" ", make("a", { href: "file://" + encodeURI(found.file) }, `${found.file}:${found.line}`));
    } else {
      title.append(" " + (found ? found.text : "made by the compiler: no line of the model"));
    }
    const close_button = make("button", { type: "button", onclick: close }, "Close");
    panel.replaceChildren(make("header", {}, title, close_button));
    if (found && found.source.length) {
      panel.append(make("pre", {}, ...found.source.map((text, k) => make("span",
        { class: found.first + k === found.line ? "source-line here" : "source-line" },
        make("span", {}, String(found.first + k)), text + "\n"))));
    } else if (found && found.file) {
      panel.append(make("pre", {}, found.text));
    }
    panel.classList.remove("hidden");
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !panel.classList.contains("hidden")) close();
  });
  return panel;
}

/* Actions such as 2F5 in a grid or a line of a schedule, in the colour of their stage. */
function colouredActions(text) {
  const parts = text.split(/(\b\d+(?:SEND_|RECV_)?[FIWB]\d+\b)/);
  return parts.map((part, k) => {
    if (k % 2 === 0) return part;
    const chip = make("span", { class: "chip" }, part);
    chip.style.background = stageColour(parseInt(part, 10));
    return chip;
  });
}
