// The figures: tokens a second with its line, what runs and waits, a step's time, restarts, the pages of the cache, adapters.

import { h, s, say } from "../dom.js";
import { count, duration, percent, rate } from "../numbers.js";

const WIDTH = 240;
const HEIGHT = 56;

/** An event of the document: adapters were loaded or unloaded. */
export const ADAPTERS_CHANGED = "adapters-changed";

export class Figures {
  constructor(container) {
    this.path = s("path", { class: "line" });
    this.area = s("path", { class: "area" });
    this.values = {};
    this.pages = Object.fromEntries(["used", "evictable", "free"].map((kind) => [kind, h("span", { class: kind })]));
    this.pagesText = h("p", { class: "words" });
    this.adapters = h("ul", { class: "adapters", id: "adapters", "aria-label": "Adapters", hidden: true });
    this.adapterWords = this.adapterNames = "";
    container.append(
      h(
        "div",
        { class: "speed" },
        this.figure("tokens", "tokens a second"),
        s(
          "svg",
          { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
          this.area,
          this.path,
        ),
      ),
      h(
        "dl",
        { class: "counts" },
        this.item("running", "running"),
        this.item("waiting", "waiting"),
        this.item("step", "a step"),
        this.item("restarts", "restarts"),
      ),
      h(
        "div",
        { class: "pages" },
        h("div", { class: "bar", "aria-hidden": "true" }, Object.values(this.pages)),
        this.pagesText,
      ),
      this.adapters,
    );
  }

  figure(name, label) {
    this.values[name] = h("b", { id: `figure-${name}` }, "–");
    return h("p", {}, this.values[name], h("span", {}, label));
  }

  item(name, label) {
    this.values[name] = h("dd", { id: `figure-${name}` }, "–");
    return h("div", {}, h("dt", {}, label), this.values[name]);
  }

  draw(frame, history) {
    const { load, cache } = frame;
    say(this.values.tokens, rate(history.line.at(-1) ?? 0));
    say(this.values.running, count(load.running));
    say(this.values.waiting, count(load.waiting));
    say(this.values.restarts, count(frame.restarts));
    this.values.restarts.classList.toggle("some", frame.restarts > 0);
    const step = history.stepSeconds;
    if (step !== null) say(this.values.step, duration(step));
    this.drawLine(history.line);
    this.drawPages(cache);
    this.drawAdapters(frame);
  }

  drawAdapters({ adapters, adapters_loaded: loaded }) {
    this.adapters.hidden = !adapters.length;
    const sorted = [...adapters].sort((a, b) => (a.name < b.name ? -1 : 1));
    const chips = sorted.map(({ name, requests, live, resident }) =>
      h(
        "li",
        { "data-resident": String(resident > 0), title: resident ? "on the device" : "in the host's memory" },
        h("b", {}, name),
        h("span", {}, [live ? `${count(live)} live` : null, `${count(requests)} in all`].filter(Boolean).join(", ")),
        h("small", {}, resident ? "on the device" : "in memory"),
      ),
    );
    if (loaded > adapters.length) chips.push(h("li", {}, `and ${count(loaded - adapters.length)} more`));
    const words = chips.map((chip) => chip.textContent).join();
    if (words !== this.adapterWords) this.adapters.replaceChildren(...chips);
    this.adapterWords = words;
    const names = sorted.map(({ name }) => name).join();
    if (names !== this.adapterNames) document.dispatchEvent(new Event(ADAPTERS_CHANGED));
    this.adapterNames = names;
  }

  drawLine(line) {
    const most = Math.max(10, ...line);
    const points = line.map((value, at) => {
      const x = WIDTH - (line.length - 1 - at) * (WIDTH / 119);
      return `${x.toFixed(1)},${(HEIGHT - 2 - (value / most) * (HEIGHT - 6)).toFixed(1)}`;
    });
    if (points.length < 2) return;
    this.path.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${points.join("L")}L${WIDTH},${HEIGHT}L${points[0].split(",")[0]},${HEIGHT}Z`);
  }

  drawPages(cache) {
    if (!cache || !cache.total) return say(this.pagesText, "No cache yet");
    for (const [kind, bar] of Object.entries(this.pages)) {
      bar.style.flexGrow = String(cache[kind] / cache.total);
    }
    const words = [
      `${count(cache.used)} pages in use`,
      `${count(cache.evictable)} kept for prefixes`,
      `${count(cache.free)} free`,
    ];
    if (cache.queried_tokens) words.push(`${percent(cache.hit_tokens, cache.queried_tokens)} of prompt tokens found`);
    for (const group of cache.groups.slice(1)) {
      words.push(`${group.name}: ${count(group.used)} of ${count(group.total)} pages in use`);
    }
    say(this.pagesText, words.join(" · "));
  }
}
