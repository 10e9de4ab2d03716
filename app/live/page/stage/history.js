// What the counters of the frames say about speed: rates over the last second, and a line of the last half minute.

const WINDOW = 0.75; // seconds a rate is taken over
const KEPT = 120; // points of a line: half a minute

export class History {
  constructor() {
    this.frames = [];
    this.line = []; // output tokens a second
  }

  /** Take a frame. After a server's restart the counters restart, and so does the history. */
  add(frame) {
    const last = this.frames.at(-1);
    if (last && (frame.at < last.at || frame.load.output_tokens < last.load.output_tokens)) {
      this.frames = [];
      this.line = [];
    }
    this.frames.push(slim(frame));
    while (this.frames.length > 2 && frame.at - this.frames[1].at >= WINDOW) this.frames.shift();
    this.line.push(this.rate((slimmed) => slimmed.load.output_tokens));
    if (this.line.length > KEPT) this.line.shift();
  }

  /** How fast a counter grows, a second. */
  rate(read) {
    const [first, last] = [this.frames[0], this.frames.at(-1)];
    const seconds = last.at - first.at;
    return seconds > 0 ? Math.max(0, (read(last) ?? 0) - (read(first) ?? 0)) / seconds : 0;
  }

  edge(source, target) {
    return this.rate((frame) => frame.edges.get(`${source}>${target}`));
  }

  /** The share of its time that an actor works, 0 .. 1. */
  busy(name) {
    return Math.min(
      1,
      this.rate((frame) => frame.busy.get(name)),
    );
  }

  /** Mean seconds of a step lately; null when there was none. */
  get stepSeconds() {
    const steps = this.rate((frame) => frame.load.steps);
    return steps > 0 ? this.rate((frame) => frame.load.step_seconds) / steps : null;
  }
}

const slim = (frame) => ({
  at: frame.at,
  load: frame.load,
  edges: new Map(frame.edges.map((edge) => [`${edge.source}>${edge.target}`, edge.count])),
  busy: new Map(frame.actors.map((actor) => [actor.name, actor.busy])),
});
