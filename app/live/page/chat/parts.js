// What a model wrote, taken apart: text, thoughts and tool calls. The end may be missing: it is still being written.

const MARKS = [
  ["<think>", "</think>", "thought"],
  ["<tool_call>", "</tool_call>", "call"],
];

/** [{kind: "text" | "thought" | "call", text, open}] in the order of the text. */
export function parts(source) {
  const found = [];
  let rest = source;
  while (rest) {
    const [at, mark] = MARKS.map((mark) => [rest.indexOf(mark[0]), mark])
      .filter(([at]) => at >= 0)
      .sort((a, b) => a[0] - b[0])[0] ?? [-1, null];
    const text = at < 0 ? withoutBegunMark(rest) : rest.slice(0, at);
    if (text.trim()) found.push({ kind: "text", text, open: false });
    if (at < 0) break;
    const inside = rest.slice(at + mark[0].length);
    const end = inside.indexOf(mark[1]);
    found.push({ kind: mark[2], text: end < 0 ? inside : inside.slice(0, end), open: end < 0 });
    rest = end < 0 ? "" : inside.slice(end + mark[1].length);
  }
  return found.filter((part) => part.open || part.text.trim());
}

/** Do not show "<thi" for a moment while "<think>" arrives. */
function withoutBegunMark(text) {
  const at = text.lastIndexOf("<");
  if (at < 0 || text.length - at > 12) return text;
  const tail = text.slice(at);
  return MARKS.some(([begin]) => begin.startsWith(tail)) ? text.slice(0, at) : text;
}

/** A call as {name, arguments}: arguments are a value where the text is JSON, else null. */
export function readCall(text) {
  try {
    const parsed = JSON.parse(text);
    const given = typeof parsed.arguments === "string" ? JSON.parse(parsed.arguments) : parsed.arguments;
    return { name: String(parsed.name ?? "?"), arguments: given ?? {} };
  } catch {
    return { name: /"name"\s*:\s*"([^"]*)"/.exec(text)?.[1] ?? "", arguments: null };
  }
}
