"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main");
  const panel = sourcePanel(data.excerpts);
  const entries = new Map();

  const milliseconds = (seconds) => seconds >= 1 ? `${seconds.toFixed(1)} s` : `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

  function add(list, id, label, note, view, number = null, same = false) {
    const name = make("span", { class: same ? "name same" : "name" }, label);
    const place = number === null ? null : make("span", { class: "muted number place" }, String(number));
    const link = make("a", { href: "#" + id }, place, name, make("span", { class: "muted number" }, note));
    document.getElementById(list).append(make("li", {}, link));
    entries.set(id, { link, view });
  }

  function heading(title, ...facts) {
    const shown = facts.filter(Boolean).map((fact) => make("span", {}, fact));
    return make("header", {}, make("h1", {}, title), make("div", { class: "facts" }, ...shown));
  }

  function counts(pass) {
    const nodes = Object.entries(pass.nodes || {});
    const shown = nodes.slice(0, 12).map(([graph, count]) => `${graph} ${count}`).join(", ");
    return shown && `operators: ${shown}${nodes.length > 12 ? ", ..." : ""}`;
  }

  data.passes.forEach((pass, k) => {
    const before = k ? data.passes[k - 1] : { text: [], places: {}, total: null };
    const delta = k && pass.total !== undefined ? pass.total - before.total : 0;
    const same = pass.changes.every(([tag]) => tag === "equal");
    const changed = pass.changes.filter(([tag]) => tag !== "equal").length;
    const note = pass.seconds === undefined ? "" : milliseconds(pass.seconds);
    const view = () => [
      heading(
        `${String(pass.number).padStart(2, "0")} ${pass.name}`,
        pass.description,
        k ? `took ${note}` : "the program as it was captured",
        pass.total === undefined ? "" : plural(pass.total, "operator") + (k ? ` (${delta >= 0 ? "+" : "\u2212"}${Math.abs(delta)})` : ""),
        k ? (same ? "changed nothing in the text" : `${plural(changed, "place")} changed`) : "",
        counts(pass),
      ),
      differenceView(before, pass, panel.show),
      panel,
    ];
    add("passes", `pass-${pass.number}`, pass.name, k ? note : "", view, pass.number, k > 0 && same);
  });
  for (const name of data.off) {
    document.getElementById("passes").append(make("li", { class: "off" },
      make("span", { class: "place" }), make("span", { class: "name" }, name), "off"));
  }
  const page = (title, text, note) => () => [
    heading(title, note), make("pre", { class: "page" }, ...colouredActions(text))];
  if (data.schedule) {
    add("more", "schedule", "schedule", "", page("Schedule", data.schedule, "a row a step, a column a rank; colours are stages"));
  }
  for (const { rank, text } of data.ranks) {
    add("more", `rank-${rank}`, `rank ${rank}`, "", () => [
      heading(`Rank ${rank}`, "what it executes in a step"), make("pre", { class: "page" }, text)]);
  }
  for (const { rank, text } of data.memory) {
    add("more", `memory-${rank}`, `memory of rank ${rank}`, "", () => [
      heading(`Memory of rank ${rank}`), make("pre", { class: "page" }, text)]);
  }
  for (const [task, { file, text }] of Object.entries(data.codes)) {
    CODE_LINKS.set(task, `#code-${task}`);
    add("more", `code-${task}`, `output code of ${task}`, "", () => [
      heading(`Output code of ${task}`, file),
      make("pre", { class: "page" }, text === null ? "the file is gone" : text)]);
  }
  if (!entries.size || ![...entries.keys()].some((id) => !id.startsWith("pass-"))) {
    document.getElementById("more-title").classList.add("hidden");
  }

  function show(focus) {
    const wanted = location.hash.slice(1);
    const id = entries.has(wanted) ? wanted : entries.keys().next().value;
    if (id === undefined) return main.replaceChildren(make("p", {}, "This folder holds no pass."));
    for (const [other, { link }] of entries) {
      if (other === id) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    panel.classList.add("hidden");
    main.replaceChildren(...entries.get(id).view());
    entries.get(id).link.scrollIntoView({ block: "nearest", inline: "nearest" });
    if (focus) { main.focus({ preventScroll: true }); window.scrollTo(0, 0); }
  }
  addEventListener("hashchange", () => show(true));
  NARROW.addEventListener("change", () => show(false));
  show(false);
})();
