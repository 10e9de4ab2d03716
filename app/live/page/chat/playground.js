// The playground: what is asked, the answer as it comes, and the button that stops it.

import { get, stream } from "../api/client.js";
import { GIVEN } from "../api/key.js";
import { byId, h, say, still } from "../dom.js";
import { ADAPTERS_CHANGED } from "../stage/figures.js";
import { Conversation } from "./conversation.js";
import { examples } from "./examples.js";
import { MessageView } from "./message.js";
import { Parameters } from "./parameters.js";

/** `showRequest(id)` opens a request's hops; `ownRequest(id)` marks it on the stage as the reader's. */
export function startChat({ showRequest, ownRequest }) {
  return new Playground(showRequest, ownRequest);
}

class Playground {
  constructor(showRequest, ownRequest) {
    this.ownRequest = ownRequest;
    this.conversation = new Conversation();
    this.parameters = new Parameters(byId("parameters"));
    this.transcript = byId("transcript");
    this.prompt = byId("prompt");
    this.views = [];
    this.model = ""; // the first name of the model
    this.choice = byId("model-choice"); // of the model or an adapter; empty until the model's name has come
    this.locked = false; // the reader had no key
    this.named = false; // the model's name came while an answer did
    this.running = null; // the AbortController of the answer that comes
    this.actions = { showRequest, again: () => this.again(), result: (text, call) => this.toolAnswered(text, call) };
    this.listen();
    this.drawAll();
    this.learn();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.prompt.value);
    });
    this.prompt.addEventListener("input", () => this.fit());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send(this.prompt.value);
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("parameters-button").addEventListener("click", () => this.follow(true));
    document.addEventListener(GIVEN, () => this.locked && this.learn());
    document.addEventListener(ADAPTERS_CHANGED, () => this.model && this.learn());
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.startAnew());
  }

  /** The model's name and its defaults. */
  async learn() {
    try {
      const { data } = await get("v1/models");
      const known = this.model;
      this.model = data[0].id;
      this.locked = false;
      this.offer(data);
      if (this.running) this.named = true;
      else if (this.model !== known) this.drawAll();
      await this.parameters.showDefaults();
    } catch (error) {
      this.locked = error.status === 401;
      say(byId("chat-status"), error.message);
    }
  }

  /** The model and its adapters, if there are any. */
  offer(models) {
    const { choice } = this;
    const chosen = choice.value;
    choice.replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
    if (models.some(({ id }) => id === chosen)) choice.value = chosen;
    choice.hidden = !models.some(({ parent }) => parent);
  }

  fit() {
    const { prompt } = this;
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight, 240)}px`;
  }

  // -- what is on the page

  drawAll() {
    const { turns } = this.conversation;
    this.views = turns.map((turn) => this.view(turn));
    if (turns.length) this.transcript.replaceChildren(...this.views.map((view) => view.element));
    else this.transcript.replaceChildren(this.greeting());
    this.views.forEach((view, at) => view.draw({ last: at === this.views.length - 1 }));
    this.follow(true);
  }

  view(turn) {
    return new MessageView(turn, turn.model || this.model || "Model", this.actions);
  }

  show(turn) {
    if (!this.views.length) this.transcript.replaceChildren();
    this.views.at(-1)?.draw({});
    const view = this.view(turn);
    this.views.push(view);
    this.transcript.append(view.element);
    view.draw({ last: true });
    this.follow(true);
    return view;
  }

  greeting() {
    const chips = examples(this.model).map(({ title, prompt, set }) =>
      h(
        "button",
        {
          type: "button",
          onclick: () => {
            this.parameters.set({ tools: "", max_tokens: "", think: false, ...set });
            this.send(prompt);
          },
        },
        h("b", {}, title),
        h("span", {}, prompt),
      ),
    );
    return h(
      "div",
      { class: "greeting" },
      h("h2", {}, "What shall we play?"),
      h("p", {}, "Ask, and watch the request go from actor to actor."),
      h("div", { class: "chips" }, chips),
    );
  }

  /** Stay at the end while the reader is there. */
  follow(must) {
    const { transcript } = this;
    const away = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight;
    if (must || away < 120) {
      transcript.scrollTo({ top: transcript.scrollHeight, behavior: must && !still() ? "smooth" : "instant" });
    }
  }

  // -- what is done

  startAnew() {
    this.stop();
    this.conversation.clear();
    this.drawAll();
    this.prompt.focus();
  }

  send(text) {
    if (this.running || !text.trim()) return;
    try {
      this.parameters.body();
    } catch {
      return; // it says what is wrong
    }
    this.prompt.value = "";
    this.fit();
    // What was pressed may be gone from the page; on a phone the focus would bring up the keyboard.
    if (!matchMedia("(pointer: coarse)").matches) this.prompt.focus();
    this.show(this.conversation.add({ role: "user", content: text.trim() }));
    this.answer();
  }

  toolAnswered(text, call) {
    if (this.running) return;
    this.show(this.conversation.add({ role: "tool", content: text, callId: call.id }));
    this.answer();
  }

  again() {
    if (this.running || !this.conversation.turns.length) return;
    this.conversation.turns.pop();
    this.views.pop().element.remove();
    this.answer();
  }

  stop() {
    this.running?.abort();
  }

  async answer() {
    let body;
    try {
      body = {
        ...this.parameters.body(),
        model: this.choice.value || undefined,
        messages: this.conversation.messages(this.parameters.system),
        stream: true,
        stream_options: { include_usage: true },
      };
    } catch {
      return;
    }
    const turn = { role: "assistant", content: "", model: this.choice.value, facts: {} };
    const control = new AbortController();
    this.begin(control);
    this.conversation.turns.push(turn);
    const view = this.show(turn);
    const painter = new Painter(() => {
      view.draw({ live: true, last: true });
      this.follow(false);
    });
    painter.ask();
    try {
      await this.receive(turn, body, control.signal, painter);
    } catch (error) {
      if (control.signal.aborted) turn.facts.stopped = true;
      else turn.error = error.message;
    }
    painter.cancel();
    if (this.conversation.turns.includes(turn)) this.conversation.keep();
    view.draw({ last: this.views.at(-1) === view });
    this.follow(false);
    this.end(control, turn);
  }

  async receive(turn, body, signal, painter) {
    const begun = performance.now();
    let first = null;
    const options = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    };
    for await (const { value, response } of stream("v1/chat/completions", options)) {
      const id = response.headers.get("x-request-id") ?? value.id;
      if (id && !turn.requestId) {
        turn.requestId = id;
        this.ownRequest(id);
      }
      const choice = value.choices?.[0];
      if (choice) {
        if (takeDelta(turn, choice.delta ?? {}) && first === null) {
          first = performance.now();
          turn.facts.first = (first - begun) / 1000;
        }
        if (choice.finish_reason) turn.facts.reason = choice.finish_reason;
        turn.facts.seconds = (performance.now() - (first ?? begun)) / 1000;
      }
      if (value.usage) turn.facts.tokens = value.usage.completion_tokens;
      painter.ask();
    }
  }

  begin(control) {
    this.running = control;
    byId("send").hidden = true;
    byId("stop").hidden = false;
    say(byId("chat-status"), "Answering");
  }

  end(control, turn) {
    if (this.running !== control) return;
    this.running = null;
    const hadFocus = document.activeElement === byId("stop");
    byId("send").hidden = false;
    byId("stop").hidden = true;
    if (hadFocus) this.prompt.focus();
    if (this.named) this.drawAll();
    this.named = false;
    say(
      byId("chat-status"),
      turn.error ? "The answer failed" : turn.facts.stopped ? "Stopped" : "The answer is complete",
    );
  }
}

/** Add what a chunk brought; whether it was anything to see. */
function takeDelta(turn, delta) {
  const thoughts = delta.reasoning_content ?? delta.reasoning;
  if (thoughts) turn.thoughts = (turn.thoughts ?? "") + thoughts;
  if (delta.content) turn.content += delta.content;
  for (const piece of delta.tool_calls ?? []) {
    turn.calls ??= [];
    const call = (turn.calls[piece.index ?? turn.calls.length] ??= { id: "", name: "", arguments: "" });
    call.id = piece.id ?? call.id;
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
  return Boolean(thoughts || delta.content || delta.tool_calls?.length);
}

/** Draws at most once a picture of the screen, however many tokens come. */
class Painter {
  constructor(paint) {
    this.paint = paint;
    this.asked = 0;
  }

  ask() {
    this.asked ||= requestAnimationFrame(() => {
      this.asked = 0;
      this.paint();
    });
  }

  cancel() {
    cancelAnimationFrame(this.asked);
    this.asked = 0;
  }
}
