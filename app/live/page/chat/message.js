// One turn on the page. An answer is drawn again while it grows, block by block: what did not change is left alone.

import { copy, h, say } from "../dom.js";
import { duration, rate } from "../numbers.js";
import { callCard } from "./calls.js";
import { blocks, element } from "./markdown.js";
import { parts, readCall } from "./parts.js";

const WHO = { user: "You", tool: "The tool" };

export class MessageView {
  /** `actions`: {result(text, call), again(), showRequest(id)} for what can be done with an answer. */
  constructor(turn, model, actions) {
    this.turn = turn;
    this.actions = actions;
    this.drawn = new Map(); // by place: {source, node}
    this.body = h("div", { class: "body" });
    this.foot = h("footer", { hidden: true });
    this.element = h(
      "article",
      { class: `turn ${turn.role}`, "aria-label": WHO[turn.role] ?? model },
      h("h3", { class: "who" }, WHO[turn.role] ?? model),
      this.body,
      this.foot,
    );
    this.last = false;
  }

  /** Draw what the turn holds now. `live`: it still grows. `last`: nothing follows it. */
  draw({ live = false, last = false } = {}) {
    this.element.setAttribute("aria-busy", String(live));
    this.element.classList.toggle("live", live);
    this.place = 0;
    if (this.turn.role === "assistant") this.drawAnswer(live, last);
    else this.put("plain", this.turn.content, () => h("p", { class: "said" }, this.turn.content));
    for (const [place, { node }] of this.drawn) {
      if (place >= this.place) {
        node.remove();
        this.drawn.delete(place);
      }
    }
    this.drawFoot(live, last);
  }

  drawAnswer(live, last) {
    const { turn } = this;
    const answering = last && !live && !turn.error;
    if (turn.thoughts) this.drawThought(turn.thoughts, live && !turn.content);
    for (const part of parts(turn.content ?? "")) {
      if (part.kind === "text") {
        for (const block of blocks(part.text)) this.put("text", block.source, () => element(block));
      } else if (part.kind === "thought") {
        this.drawThought(part.text, part.open && live);
      } else {
        this.drawCall(readCall(part.text), part.text, part.open && live, answering ? {} : null);
      }
    }
    for (const call of turn.calls ?? []) {
      this.drawCall(
        { ...readCall(JSON.stringify(call)), name: call.name },
        call.arguments,
        live,
        answering ? call : null,
      );
    }
    if (turn.error) this.put("error", turn.error, () => h("p", { class: "trouble", role: "alert" }, turn.error));
    if (live && !this.place) this.put("wait", "", () => h("p", { class: "waiting", "aria-hidden": "true" }, "…"));
  }

  drawThought(text, open) {
    // Open while it is written; when it is done it folds, once. After that it is the reader's.
    const known = this.drawn.get(this.place);
    if (known?.kind === "thought") {
      const { summary, inside } = known.parts;
      say(inside, text.trim());
      say(summary, open ? "Thinking …" : "Thought");
      if (known.open && !open) known.node.open = false;
      known.open = open;
      this.place += 1;
      return;
    }
    const summary = h("summary", {}, open ? "Thinking …" : "Thought");
    const inside = h("p", {}, text.trim());
    this.put("thought", "", () => h("details", { class: "thought", open }, summary, inside), {
      open,
      parts: { summary, inside },
    });
  }

  drawCall(call, source, open, finished) {
    const onResult = finished && this.actions.result ? (text) => this.actions.result(text, finished) : null;
    this.put("call", `${open} ${Boolean(onResult)} ${source}`, () => callCard(call, source, open, onResult));
  }

  /** The next block: kept when its source is the one that stands there already. */
  put(kind, source, make, more = {}) {
    const known = this.drawn.get(this.place);
    if (known?.kind !== kind || known.source !== source) {
      const node = make();
      if (known) known.node.replaceWith(node);
      else this.body.append(node);
      this.drawn.set(this.place, { kind, source, node, ...more });
    }
    this.place += 1;
  }

  drawFoot(live, last) {
    const { turn, actions } = this;
    const finished = turn.role === "assistant" && !live;
    this.foot.hidden = !finished;
    if (!finished) return;
    const facts = turn.facts ?? {};
    const words = [];
    if (facts.tokens) words.push(`${facts.tokens} tokens`);
    if (facts.tokens > 1 && facts.seconds > 0) words.push(`${rate(facts.tokens / facts.seconds)} a second`);
    if (facts.first !== undefined) words.push(`first after ${duration(facts.first)}`);
    if (facts.reason === "length") words.push("cut at the longest answer");
    if (facts.stopped) words.push("stopped by you");
    const copyButton = h(
      "button",
      { type: "button", class: "quiet", onclick: () => copy(turn.content, copyButton) },
      "Copy",
    );
    this.foot.replaceChildren(
      h("span", { class: "facts" }, words.join(" · ")),
      turn.requestId
        ? h(
            "button",
            { type: "button", class: "quiet", onclick: () => actions.showRequest(turn.requestId) },
            "Its hops",
          )
        : "",
      turn.content ? copyButton : "",
      last ? h("button", { type: "button", class: "quiet", onclick: () => actions.again() }, "Again") : "",
    );
  }
}
