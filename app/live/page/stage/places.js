// Where the actors stand: wide, a loop that leaves the server at the top and returns to it below; narrow, the same
// loop standing upright. A way leaves one box and enters another at a side, moved along it by a shift.

export const TITLES = {
  http: "HTTP",
  renderer: "Renderer",
  tokenizer: "Tokenizer",
  scheduler: "Scheduler",
  worker: "Worker",
  cache: "Cache",
  detokenizer: "Detokenizer",
  streams: "Streams",
};

// [from, side, shift, to, side, shift, where its label stands]
export const WIDE = {
  width: 908,
  height: 344,
  box: { width: 164, height: 68 },
  places: {
    http: [92, 170],
    renderer: [92, 46],
    tokenizer: [330, 46],
    scheduler: [568, 46],
    worker: [818, 46],
    cache: [818, 180],
    detokenizer: [568, 294],
    streams: [330, 294],
  },
  ways: [
    ["http", "top", 0, "renderer", "bottom", 0, "right"],
    ["renderer", "right", 0, "tokenizer", "left", 0, "above"],
    ["http", "right", 0, "tokenizer", "bottom", 0, "below"],
    ["tokenizer", "right", 0, "scheduler", "left", 0, "above"],
    ["scheduler", "right", -10, "worker", "left", -10, "above"],
    ["worker", "left", 12, "scheduler", "right", 12, "below"],
    ["scheduler", "bottom", 46, "cache", "left", 0, "below"],
    ["scheduler", "bottom", 0, "detokenizer", "top", 0, "left"],
    ["detokenizer", "left", 0, "streams", "right", 0, "above"],
    ["streams", "left", 0, "http", "bottom", 0, "below"],
  ],
};

export const NARROW = {
  width: 392,
  height: 560,
  box: { width: 146, height: 68 },
  places: {
    http: [104, 42],
    renderer: [318, 42],
    tokenizer: [318, 160],
    scheduler: [318, 278],
    worker: [104, 278],
    cache: [104, 396],
    detokenizer: [318, 514],
    streams: [104, 514],
  },
  ways: [
    ["http", "right", 0, "renderer", "left", 0, "above"],
    ["renderer", "bottom", 0, "tokenizer", "top", 0, "right"],
    ["http", "bottom", 0, "tokenizer", "left", 0, "below"],
    ["tokenizer", "bottom", 0, "scheduler", "top", 0, "right"],
    ["scheduler", "left", -10, "worker", "right", -10, "above"],
    ["worker", "right", 12, "scheduler", "left", 12, "below"],
    ["scheduler", "bottom", -40, "cache", "right", 0, "below"],
    ["scheduler", "bottom", 20, "detokenizer", "top", 20, "right"],
    ["detokenizer", "left", 0, "streams", "right", 0, "above"],
    ["streams", "left", -14, "http", "left", -14, "none"],
  ],
};

const SIDES = { left: [-1, 0], right: [1, 0], top: [0, -1], bottom: [0, 1] };
const GAP = 4;

/** A way as an SVG path. */
export function wayPath(plan, [from, leave, leaveShift, to, enter, enterShift]) {
  const start = anchor(plan, from, leave, leaveShift);
  const end = anchor(plan, to, enter, enterShift);
  const far = Math.hypot(end[0] - start[0], end[1] - start[1]);
  const reach = leave === enter ? 38 : 0.45 * far;
  const first = moved(start, SIDES[leave], reach);
  const second = moved(end, SIDES[enter], reach);
  return `M${start}C${first} ${second} ${end}`;
}

function anchor({ places, box }, name, side, shift) {
  const [x, y] = places[name];
  const [dx, dy] = SIDES[side];
  return [x + dx * (box.width / 2 + GAP) + (dx ? 0 : shift), y + dy * (box.height / 2 + GAP) + (dx ? shift : 0)];
}

const moved = ([x, y], [dx, dy], by) => [x + dx * by, y + dy * by];

/** Where a label stands by the middle of its way: [dx, dy, text-anchor]. */
export const LABELS = {
  above: [0, -8, "middle"],
  below: [0, 19, "middle"],
  left: [-10, 4, "end"],
  right: [10, 4, "start"],
};
