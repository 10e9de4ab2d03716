// A little Markdown, made of text nodes: headings, lists, tables, quotes, code, emphasis and links.

import { copy, h } from "../dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+•]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/;

/** Blocks of a text, each with the source that it came from: a block whose source stays need not be made again. */
export function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let index = 0;
  const while_ = (test) => {
    const start = index;
    while (index < lines.length && test(lines[index])) index += 1;
    return lines.slice(start, index);
  };
  while (index < lines.length) {
    const line = lines[index];
    const fence = FENCE.exec(line);
    if (fence) {
      index += 1;
      const body = while_((other) => !other.trimStart().startsWith(fence[1]));
      index += 1;
      found.push({ kind: "code", language: fence[2], lines: body });
    } else if (!line.trim()) {
      index += 1;
    } else if (HEADING.test(line)) {
      index += 1;
      found.push({ kind: "heading", lines: [line] });
    } else if (RULE.test(line)) {
      index += 1;
      found.push({ kind: "rule", lines: [line] });
    } else if (line.startsWith(">")) {
      found.push({ kind: "quote", lines: while_((other) => other.startsWith(">")) });
    } else if (line.includes("|") && TABLE_RULE.test(lines[index + 1] ?? "")) {
      found.push({ kind: "table", lines: while_((other) => other.includes("|")) });
    } else if (ITEM.test(line)) {
      found.push({ kind: "list", lines: while_((other) => ITEM.test(other) || /^\s{2,}\S/.test(other)) });
    } else {
      const start = index;
      index += 1;
      while (index < lines.length && isProse(lines[index])) index += 1;
      found.push({ kind: "prose", lines: lines.slice(start, index) });
    }
  }
  return found.map((block) => ({
    ...block,
    source: `${block.kind} ${block.language ?? ""} ${block.lines.join("\n")}`,
  }));
}

const isProse = (line) =>
  line.trim() && !FENCE.test(line) && !HEADING.test(line) && !RULE.test(line) && !ITEM.test(line) && line[0] !== ">";

const MAKERS = {
  prose: ({ lines }) =>
    h(
      "p",
      {},
      lines.flatMap((line, at) => (at ? [h("br"), ...inline(line)] : inline(line))),
    ),
  rule: () => h("hr"),
  quote: ({ lines }) => h("blockquote", {}, blocks(lines.map((line) => line.slice(1).trim()).join("\n")).map(element)),
  heading: ({ lines: [line] }) => {
    const [, marks, text] = HEADING.exec(line);
    return h(`h${Math.min(6, marks.length + 2)}`, {}, inline(text));
  },
  code: ({ lines, language }) => {
    const text = lines.join("\n");
    const button = h("button", { type: "button", class: "quiet", onclick: () => copy(text, button) }, "Copy");
    return h(
      "div",
      { class: "code" },
      h("header", {}, h("span", {}, language || "text"), button),
      h("pre", { tabindex: "0" }, h("code", {}, text)),
    );
  },
  table: ({ lines }) => {
    const [head, , ...rows] = lines.map(cells);
    return h(
      "div",
      { class: "table" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            head.map((cell) => h("th", {}, inline(cell))),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map((row) =>
            h(
              "tr",
              {},
              row.map((cell) => h("td", {}, inline(cell))),
            ),
          ),
        ),
      ),
    );
  },
  list: ({ lines }) => list(lines),
};

/** The element of a block. */
export const element = (block) => MAKERS[block.kind](block);

const cells = (line) =>
  line
    .trim()
    .replace(/^\||\|$/g, "")
    .split("|")
    .map((cell) => cell.trim());

/** Items by their indentation, at most six levels deep. */
function list(lines) {
  const root = { indent: -1, element: null, last: null };
  const open = [root];
  let first = null;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (!found) {
      open.at(-1).last?.append(h("br"), ...inline(line.trim()));
      continue;
    }
    const [, space, marker, text] = found;
    while (open.length > 2 && space.length < open.at(-1).indent) open.pop();
    let level = open.at(-1);
    if (level === root || (space.length > level.indent + 1 && open.length < 7)) {
      const ordered = /\d/.test(marker);
      const made = h(ordered ? "ol" : "ul", ordered ? { start: parseInt(marker, 10) } : {});
      (level.last ?? null)?.append(made);
      first ??= made;
      level = { indent: space.length, element: made, last: null };
      open.push(level);
    }
    level.last = h("li", {}, inline(text));
    level.element.append(level.last);
  }
  return first;
}

const LONGEST_LINE = 20_000;

const EMPHASIS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/** Nodes of one line. What is not closed stays as it was written. */
export function inline(text, depth = 0) {
  if (text.length > LONGEST_LINE) return [document.createTextNode(text)];
  const nodes = [];
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  while (at < text.length) {
    const taken = depth < 4 ? special(text, at, depth) : null;
    if (taken) {
      flush();
      nodes.push(taken.node);
      at = taken.end;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return nodes;
}

function special(text, at, depth) {
  const mark = text[at];
  if (mark === "`") {
    const end = text.indexOf("`", at + 1);
    return end > at + 1 ? { node: h("code", {}, text.slice(at + 1, end)), end: end + 1 } : null;
  }
  if (mark === "[") return link(text, at, depth);
  if (mark !== "*" && mark !== "_" && mark !== "~") return null;
  if (mark === "_" && /\w/.test(text[at - 1] ?? "")) return null;
  for (const [sign, tag] of EMPHASIS) {
    if (!text.startsWith(sign, at) || /\s/.test(text[at + sign.length] ?? " ")) continue;
    const end = text.indexOf(sign, at + sign.length + 1);
    if (end < 0 || /\s/.test(text[end - 1]) || (mark === "_" && /\w/.test(text[end + sign.length] ?? ""))) continue;
    return { node: h(tag, {}, inline(text.slice(at + sign.length, end), depth + 1)), end: end + sign.length };
  }
  return null;
}

/** Only to the web, and in a tab of its own that knows nothing of this one. */
function link(text, at, depth) {
  const middle = text.indexOf("](", at);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0) return null;
  const address = text.slice(middle + 2, end).trim();
  if (!/^https?:\/\/[^\s]+$/i.test(address)) return null;
  const attributes = { href: address, target: "_blank", rel: "noopener noreferrer nofollow" };
  return { node: h("a", attributes, inline(text.slice(at + 1, middle), depth + 1)), end: end + 1 };
}
