// The requests on a moving axis of time. A lane is used again when its request is over, as a slot of the device is.

import { h, say, still } from "../dom.js";
import { duration } from "../numbers.js";

const SHOWN = 24; // seconds of the axis
const MAX_LANES = 18;
const LANE = matchMedia("(pointer: coarse)").matches ? 30 : 20; // pixels from one to the next
const GAP = 0.4; // seconds between two requests of a lane
const TICK = 4;
const MAX_HELD_SECONDS = 8; // seconds that a focused request keeps the axis still

export class Timeline {
  /** `onOpen(handle)`: a request was chosen. */
  constructor(container, onOpen) {
    this.onOpen = onOpen;
    this.requests = new Map(); // by handle: {view, lane, button, drawn}
    this.own = new Set();
    this.zero = null; // the server's time at the left end of the layer
    this.layer = h("div", { class: "layer" });
    this.ticks = h("div", { class: "ticks", "aria-hidden": "true" });
    this.window = h("div", { class: "window" }, this.ticks, this.layer);
    this.empty = h("p", { class: "empty" }, "Nothing is playing. Ask something, and its request appears here.");
    this.more = h("p", { class: "more" });
    container.append(this.window, this.empty, this.more);
    this.handle = 0;
    this.held = null; // the moment the axis stands still at, while the reader points at it
    for (const kind of ["pointerenter", "focusin"]) this.window.addEventListener(kind, () => this.hold());
    for (const kind of ["pointerleave", "focusout"]) this.window.addEventListener(kind, () => this.release());
    new ResizeObserver(() => this.resize()).observe(this.window);
  }

  /** Moving bars cannot be clicked. */
  hold() {
    if (this.zero !== null) this.held ??= this.now();
  }

  release() {
    const pointed = this.window.matches(":hover") || this.window.contains(document.activeElement);
    if (!pointed) this.held = null;
  }

  get scale() {
    return this.width / SHOWN; // pixels a second
  }

  resize() {
    const width = this.window.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    this.ticks.replaceChildren();
    for (const one of this.requests.values()) this.place(one, true);
    this.move();
  }

  draw(frame) {
    this.clock = frame.at - performance.now() / 1000;
    this.unix = frame.unix - frame.at;
    if (this.zero === null || frame.at < this.last) this.startAnew(frame.at);
    this.last = frame.at;
    const seen = new Set();
    for (const view of [...frame.requests].sort((a, b) => a.start - b.start)) {
      seen.add(view.handle);
      this.take(view);
    }
    const begin = (this.held ?? frame.at) - SHOWN - 2;
    for (const [handle, one] of this.requests) {
      const gone = one.view.end !== null ? one.view.end < begin : frame.whole && !seen.has(handle);
      if (gone) {
        one.button?.remove();
        this.requests.delete(handle);
      }
    }
    this.empty.hidden = this.requests.size > 0;
    const hidden = [...this.requests.values()].filter((one) => one.lane === null && one.view.end === null).length;
    const left = hidden + Math.max(0, frame.live - this.liveShown());
    say(this.more, left > 0 ? `and ${left} more` : "");
    this.more.hidden = left <= 0;
    this.move();
    this.run();
  }

  liveShown() {
    let live = 0;
    for (const one of this.requests.values()) live += one.view.end === null;
    return live;
  }

  startAnew(at) {
    for (const one of this.requests.values()) one.button?.remove();
    this.requests.clear();
    this.ticks.replaceChildren();
    this.zero = at - SHOWN;
  }

  mark(handle) {
    this.own.add(handle);
    this.requests.get(handle)?.button?.classList.add("own");
  }

  take(view) {
    let one = this.requests.get(view.handle);
    if (!one) {
      if (view.end !== null && view.end < this.last - SHOWN) return;
      one = { view, lane: this.freeLane(view.start), button: null };
      this.requests.set(view.handle, one);
    }
    one.view = view;
    this.place(one, true);
  }

  freeLane(start) {
    const taken = new Array(MAX_LANES).fill(-Infinity);
    for (const { view, lane } of this.requests.values()) {
      if (lane !== null) taken[lane] = Math.max(taken[lane], view.end ?? Infinity);
    }
    const lane = taken.findIndex((end) => end + GAP < start);
    return lane < 0 ? null : lane;
  }

  place(one) {
    if (one.lane === null || !this.width) return;
    const { view } = one;
    if (!one.button) {
      one.button = h("button", { type: "button", class: "request", onclick: () => this.onOpen(view.handle) });
      one.button.classList.toggle("own", this.own.has(view.handle));
      this.layer.append(one.button);
    }
    const { button } = one;
    button.style.top = `${one.lane * LANE}px`;
    button.style.left = `${(view.start - this.zero) * this.scale}px`;
    button.classList.toggle("live", view.end === null);
    button.classList.toggle("failed", Boolean(view.error));
    button.setAttribute("aria-label", words(view));
    button.title = words(view);
    button.replaceChildren(...this.pieces(view));
    this.stretch(one);
    this.layer.style.height = `${(1 + this.lanes()) * LANE}px`;
  }

  lanes() {
    return Math.max(3, ...[...this.requests.values()].map((one) => one.lane ?? 0));
  }

  /** Phases and marks. What goes on has no width of its own: it reaches to the end of the button, which is now. */
  pieces(view) {
    const at = (time) => `${Math.max(0, time - view.start) * this.scale}px`;
    const choices = 1 + Math.min(3, Math.max(0, ...view.spans.map(([, , , choice]) => choice)));
    const pieces = view.spans
      .filter(([, , , choice]) => choice < choices)
      .map(([name, start, end, choice]) => {
        const style = { left: at(start), top: `${(100 * choice) / choices}%`, height: `${100 / choices}%` };
        if (end === null) style.right = "0";
        else style.width = `max(${(end - start) * this.scale}px, 1.5px)`;
        return h("i", { "data-phase": name, style });
      });
    if (choices === 1 && view.output_tokens && (view.end - view.start) * this.scale > 48) {
      pieces.push(h("span", {}, String(view.output_tokens)));
    }
    for (const [name, time] of view.marks) {
      if (MARKED[name]) pieces.push(h("i", { class: "mark", "data-mark": MARKED[name], style: { left: at(time) } }));
    }
    return pieces;
  }

  stretch(one) {
    const end = one.view.end ?? this.now();
    one.button.style.width = `${Math.max(6, (end - one.view.start) * this.scale)}px`;
  }

  now() {
    return performance.now() / 1000 + this.clock;
  }

  move() {
    if (!this.width || this.zero === null) return;
    const now = this.now();
    if (this.held !== null && now - this.held > MAX_HELD_SECONDS && !this.window.matches(":hover")) this.held = null;
    for (const one of this.requests.values()) if (one.button && one.view.end === null) this.stretch(one);
    const shift = `translateX(${(SHOWN - ((this.held ?? now) - this.zero)) * this.scale}px)`;
    this.layer.style.transform = shift;
    this.ticks.style.transform = shift;
    this.drawTicks(this.held ?? now);
  }

  /** Lines at round moments of the wall clock; old ones go. */
  drawTicks(now) {
    const first = Math.ceil((now - SHOWN + this.unix) / TICK) * TICK;
    for (let unix = first; unix <= now + this.unix + TICK; unix += TICK) {
      const id = String(unix);
      if ([...this.ticks.children].some((tick) => tick.dataset.unix === id)) continue;
      const left = (unix - this.unix - this.zero) * this.scale;
      const label = new Date(unix * 1000).toLocaleTimeString("en-GB");
      this.ticks.append(h("span", { "data-unix": id, style: { left: `${left}px` } }, label));
    }
    for (const tick of [...this.ticks.children]) if (Number(tick.dataset.unix) < first - TICK) tick.remove();
  }

  /** Between frames the axis moves by itself, while there is anything on it. */
  run() {
    if (this.handle || still() || !this.requests.size) return;
    const step = () => {
      this.move();
      this.handle = this.requests.size && !still() ? requestAnimationFrame(step) : 0;
    };
    this.handle = requestAnimationFrame(step);
  }
}

const MARKED = { preempted: "preempted", worker_died: "died", resumed: "resumed", aborted: "aborted" };

function words(view) {
  const now = view.spans.findLast(([, , end]) => end === null)?.[0];
  const state = view.end === null ? (now ?? "arriving") : view.error ? `ended: ${view.error}` : "complete";
  const tokens = `${view.prompt_tokens} tokens in${view.output_tokens ? `, ${view.output_tokens} out` : ""}`;
  const time = view.end === null ? "" : `, ${duration(view.end - view.start)}`;
  const adapter = view.adapter ? `, ${view.adapter}` : "";
  return `Request ${view.handle}: ${state}, ${tokens}${adapter}${time}`;
}
