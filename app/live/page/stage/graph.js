// The actors as a graph that lives: boxes with their state, mailbox and work, ways with what goes over them.

import { byId, s, say } from "../dom.js";
import { count, duration, rate } from "../numbers.js";
import { LABELS, NARROW, TITLES, WIDE, wayPath } from "./places.js";
import { Pulses } from "./pulses.js";

const PIPS = 8;
const NARROW_BELOW = 620;
const REMEMBERED = 6000; // milliseconds that a restart stays marked

export class Graph {
  constructor(container) {
    this.container = container;
    this.pulses = new Pulses();
    this.restarts = new Map();
    this.struck = new Map(); // by actor: when it was last restarted
    this.roles = "";
    new ResizeObserver(() => this.frame && this.lay()).observe(container);
  }

  draw(frame, history) {
    this.frame = frame;
    this.history = history;
    const members = this.members(frame);
    const plan = this.container.clientWidth < NARROW_BELOW ? NARROW : WIDE;
    const roles = `${plan.width} ${members.map(({ name }) => name).join()}`;
    if (roles !== this.roles) {
      this.roles = roles;
      this.build(plan, members);
    }
    for (const member of members) this.drawBox(member);
    this.drawWays();
    say(this.title, `The actors. ${members.map(({ name }) => this.spoken(name)).join(" ")}`);
  }

  /** The label of a box for screen readers. */
  spoken(name) {
    const { group, title, words, depth } = this.boxes.get(name);
    const labels = [title.textContent, group.dataset.state, words.textContent, depth.textContent];
    return `${labels.filter(Boolean).join(", ")}.`;
  }

  lay() {
    this.draw(this.frame, this.history);
  }

  /** One box a role: several actors of a role share it. The two ends of the server are no actors, but are seen. */
  members(frame) {
    const roles = new Map();
    for (const actor of frame.actors) {
      if (!TITLES[actor.role]) continue;
      if (!roles.has(actor.role)) roles.set(actor.role, []);
      roles.get(actor.role).push(actor);
    }
    return [
      { name: "http", actors: [] },
      ...[...roles].map(([name, actors]) => ({ name, actors })),
      { name: "streams", actors: [] },
    ];
  }

  build(plan, members) {
    this.boxes = new Map();
    this.ways = [];
    const names = new Set(members.map(({ name }) => name));
    const back = s("g", { class: "ways" });
    const lights = s("g", { class: "pulses" });
    const labels = s("g", { class: "rates" });
    const front = s("g", { class: "boxes" });
    for (const way of plan.ways) {
      const [source, , , target, , , side] = way;
      if (!names.has(source) || !names.has(target)) continue;
      const path = s("path", { d: wayPath(plan, way), "data-way": `${source}-${target}`, "marker-end": "url(#arrow)" });
      back.append(path);
      this.ways.push({ source, target, path, label: labels.appendChild(labelOf(path, side, `${source}-${target}`)) });
    }
    for (const { name } of members) front.append(this.box(name, plan.places[name], plan.box));
    const picture = s(
      "svg",
      { viewBox: `0 0 ${plan.width} ${plan.height}`, role: "img", "aria-labelledby": "graph-words" },
      (this.title = s("title", { id: "graph-words" })),
      s(
        "marker",
        {
          id: "arrow",
          viewBox: "0 0 8 8",
          refX: 6,
          refY: 4,
          markerWidth: 8,
          markerHeight: 8,
          orient: "auto",
          markerUnits: "userSpaceOnUse",
        },
        s("path", { d: "M1.5 1 6 4 1.5 7", class: "head" }),
      ),
      back,
      lights,
      labels,
      front,
    );
    this.container.replaceChildren(picture);
    this.pulses.stand(lights, this.ways);
  }

  box(name, [x, y], { width, height }) {
    const left = x - width / 2;
    const top = y - height / 2;
    this.inside = width - 28;
    const parts = {
      title: s("text", { class: "title", x: left + 26, y: top + 24 }, TITLES[name]),
      badge: s("text", { class: "badge", x: left + width - 12, y: top + 24, "text-anchor": "end" }),
      words: s("text", { class: "words", x: left + 14, y: top + 44 }),
      busy: s("rect", { class: "busy", x: left + 14, y: top + height - 13, height: 3, width: 0, rx: 1.5 }),
      depth: s("text", { class: "depth", x: left + width - 12, y: top + 44, "text-anchor": "end" }),
      pips: Array.from({ length: PIPS }, (_, at) =>
        s("rect", { class: "pip", x: left - 9, y: top + height - 13 - at * 6.6, width: 4, height: 4, rx: 1 }),
      ),
    };
    parts.group = s(
      "g",
      { class: "box", "data-actor": name },
      s("rect", { class: "face", x: left, y: top, width, height, rx: 12 }),
      s("circle", { class: "state", cx: left + 16, cy: top + 19.5, r: 4 }),
      s("rect", { class: "track", x: left + 14, y: top + height - 13, height: 3, width: width - 28, rx: 1.5 }),
      parts.title,
      parts.badge,
      parts.words,
      parts.depth,
      parts.busy,
      parts.pips,
    );
    this.boxes.set(name, parts);
    return parts.group;
  }

  drawBox({ name, actors }) {
    const box = this.boxes.get(name);
    if (!actors.length) return this.drawEnd(name, box);
    const now = performance.now();
    for (const actor of actors) {
      const before = this.restarts.get(actor.name);
      if (before !== undefined && actor.restarts > before) {
        this.struck.set(actor.name, now);
        say(byId("stage-status"), `${actor.name} was restarted`);
      }
      this.restarts.set(actor.name, actor.restarts);
    }
    const state = worst(actors);
    const struck = actors.some((actor) => now - (this.struck.get(actor.name) ?? -Infinity) < REMEMBERED);
    const depth = actors.reduce((sum, actor) => sum + actor.depth, 0);
    const restarts = actors.reduce((sum, actor) => sum + actor.restarts, 0);
    const busy = Math.max(...actors.map((actor) => this.history.busy(actor.name)));
    box.group.dataset.state = state;
    box.group.classList.toggle("struck", struck);
    say(box.badge, restarts ? `↻ ${restarts}` : "");
    say(box.words, this.wordsOf(name, state, actors));
    // Of several actors the pips alone show the mail: a line has no room for both.
    say(box.depth, actors.length > 1 ? `×${actors.length}` : depth ? `${count(depth)} in mail` : "");
    box.busy.setAttribute("width", String((name === "worker" ? this.device() : busy) * this.inside));
    box.pips.forEach((pip, at) => pip.classList.toggle("on", at < pipsOf(depth)));
  }

  /** The share of time that the device computes: its steps are not handled in this process. */
  device() {
    return Math.min(
      1,
      this.history.rate((frame) => frame.load.step_seconds),
    );
  }

  wordsOf(name, state, actors) {
    if (state !== "running") return state;
    const { load, model } = this.frame;
    const stuck = actors.find((actor) => actor.message_age > 1);
    if (stuck) return `${stuck.message} ${duration(stuck.message_age)}`;
    if (name === "scheduler") return `${count(load.running)} run, ${count(load.waiting)} wait`;
    if (name === "worker") return model.device ?? "loading";
    if (name === "cache" && this.frame.cache?.total) {
      return `${Math.round((100 * this.frame.cache.used) / this.frame.cache.total)} % in use`;
    }
    return `${count(actors.reduce((sum, actor) => sum + actor.handled, 0))} done`;
  }

  drawEnd(name, box) {
    const { frame } = this;
    const fine = frame.model.phase === "ready";
    box.group.dataset.state = fine ? "running" : "starting";
    const open = name === "http" ? frame.http : frame.live;
    say(box.words, name === "http" ? `${count(open)} open` : `${count(open)} live`);
    box.pips.forEach((pip, at) => pip.classList.toggle("on", at < pipsOf(open)));
  }

  drawWays() {
    for (const one of this.ways) {
      const speed = this.history.edge(one.source, one.target);
      const unit = one.source === "streams" || one.target === "streams" ? " tok/s" : "/s";
      say(one.label, speed > 0.04 ? `${rate(speed)}${unit}` : "");
      one.path.style.setProperty("--flow", String(Math.min(1, Math.log10(1 + speed) / 3)));
      one.speed = speed;
    }
    this.pulses.run();
  }
}

/** The label of a way, by its middle. */
function labelOf(path, side, name) {
  const [dx, dy, anchor] = LABELS[side] ?? [0, 0, "middle"];
  const middle = path.getPointAtLength(path.getTotalLength() / 2);
  const hidden = side === "none" ? "hidden" : "visible";
  return s("text", {
    x: middle.x + dx,
    y: middle.y + dy,
    "text-anchor": anchor,
    "data-rate": name,
    visibility: hidden,
  });
}

const ORDER = ["restarting", "stopped", "stopping", "starting", "running"];
const worst = (actors) => ORDER.find((state) => actors.some((actor) => actor.state === state)) ?? "running";

/** Mailboxes differ by thousands: each pip is about twice the one before. */
const pipsOf = (depth) => (depth ? Math.min(PIPS, 1 + Math.floor(Math.log2(depth))) : 0);

/** The name of the model and its state, in the page's head. */
export function drawBilling(frame) {
  const { model } = frame;
  byId("state-dot").dataset.state = model.phase;
  say(byId("model-name"), model.name);
  const calm = model.phase === "ready" && model.stage === "ready";
  if (model.phase === "ready" && !calm) byId("state-dot").dataset.state = "starting"; // a worker comes back
  const facts = [calm ? model.device : model.phase === "ready" ? model.stage : `${model.phase}: ${model.stage}`];
  if (model.phase === "starting") facts.push(`${Math.round(100 * model.progress)} %`);
  if (calm) facts.push(model.dtype, model.parameters ? `${count(model.parameters)} parameters` : null);
  say(byId("model-facts"), facts.filter(Boolean).join(" · "));
}
