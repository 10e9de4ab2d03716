// Where the actors stand: wide, as a loop from the door and back to it; narrow, the same loop standing upright.

export const BOX = { width: 164, height: 66 };

export const WIDE = {
  width: 1000,
  height: 350,
  places: {
    http: [96, 175],
    renderer: [330, 175],
    tokenizer: [330, 64],
    scheduler: [590, 64],
    worker: [880, 64],
    cache: [880, 200],
    detokenizer: [590, 286],
    streams: [330, 286],
  },
};

export const NARROW = {
  width: 400,
  height: 600,
  places: {
    http: [100, 50],
    renderer: [300, 50],
    tokenizer: [100, 170],
    scheduler: [100, 300],
    worker: [300, 240],
    cache: [300, 370],
    detokenizer: [100, 430],
    streams: [100, 550],
  },
};

export const TITLES = {
  http: "Door",
  renderer: "Renderer",
  tokenizer: "Tokenizer",
  scheduler: "Scheduler",
  worker: "Worker",
  cache: "Cache",
  detokenizer: "Detokenizer",
  streams: "Streams",
};

/** Each way between two roles, and how it bends: 0 is straight, others are put aside by so much of its length. */
export const WAYS = [
  ["http", "tokenizer", 0.12],
  ["http", "renderer", 0],
  ["tokenizer", "scheduler", 0],
  ["scheduler", "worker", 0.1],
  ["worker", "scheduler", 0.1],
  ["scheduler", "cache", 0],
  ["scheduler", "detokenizer", 0],
  ["detokenizer", "streams", 0],
  ["streams", "http", 0.12],
];

/** The way from one box's edge to another's, as an SVG path. */
export function way([fromX, fromY], [toX, toY], bend) {
  const [startX, startY] = edge(fromX, fromY, toX, toY);
  const [endX, endY] = edge(toX, toY, fromX, fromY);
  const [dx, dy] = [endX - startX, endY - startY];
  const middle = [(startX + endX) / 2 + dy * bend, (startY + endY) / 2 - dx * bend];
  return {
    d: `M${startX},${startY}Q${middle[0]},${middle[1]} ${endX},${endY}`,
    middle: [(startX + endX) / 4 + middle[0] / 2, (startY + endY) / 4 + middle[1] / 2],
    upright: Math.abs(dy) > Math.abs(dx),
  };
}

/** Where a line from a box's middle leaves it. */
function edge(x, y, towardsX, towardsY) {
  const [dx, dy] = [towardsX - x, towardsY - y];
  const scale = Math.min((BOX.width / 2 + 5) / Math.abs(dx || 1e-9), (BOX.height / 2 + 5) / Math.abs(dy || 1e-9), 1);
  return [x + dx * scale, y + dy * scale];
}
