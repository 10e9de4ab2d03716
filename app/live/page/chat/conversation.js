// A conversation: its messages, kept for this tab only.

const NAME = "troupe.conversation";
const MAX_CHARACTERS = 2_000_000;

/**
 * Turns are {role, content, calls?, thoughts?, requestId?, facts?}: `calls` are tool calls that came apart from the
 * text, `thoughts` reasoning that did, and `facts` what is sent below an answer.
 */
export class Conversation {
  constructor() {
    this.turns = [];
    try {
      const kept = JSON.parse(sessionStorage.getItem(NAME) ?? "[]");
      if (Array.isArray(kept)) this.turns = kept;
    } catch {
      // What cannot be read is not missed.
    }
  }

  keep() {
    const text = JSON.stringify(this.turns);
    if (text.length > MAX_CHARACTERS) return;
    try {
      sessionStorage.setItem(NAME, text);
    } catch {
      // The tab's store is full: the conversation goes on without it.
    }
  }

  clear() {
    this.turns = [];
    sessionStorage.removeItem(NAME);
  }

  add(turn) {
    this.turns.push(turn);
    this.keep();
    return turn;
  }

  /** What the API gets. Templates drop the thoughts of earlier turns, but models go on with those before a call. */
  messages(system) {
    const sent = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns) {
      if (turn.role === "assistant" && !turn.content && !turn.calls?.length) continue;
      const message = { role: turn.role, content: turn.content };
      if (turn.calls?.length) {
        message.tool_calls = turn.calls.map((call) => ({
          id: call.id,
          type: "function",
          function: { name: call.name, arguments: call.arguments },
        }));
        if (turn.thoughts) message.reasoning_content = turn.thoughts;
      }
      if (turn.callId) message.tool_call_id = turn.callId;
      sent.push(message);
    }
    return sent;
  }
}
