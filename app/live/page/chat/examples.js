// First questions. The first row suits the small included model, which knows little else.

const WEATHER = JSON.stringify(
  {
    name: "get_weather",
    description: "Get the current weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
  null,
  1,
);

const IN_THE_BOX = [
  { title: "Three countries", prompt: "List 3 countries and their capitals." },
  { title: "A sum", prompt: "What is 17 + 25?" },
  { title: "A story", prompt: "Tell me a short story about a fox.", set: { max_tokens: "200" } },
  { title: "Think first", prompt: "Tom has 12 apples and buys 7 more. How many apples has he?", set: { think: true } },
  { title: "Use a tool", prompt: "What is the weather in Oslo?", set: { tools: WEATHER, think: false } },
  { title: "Who are you?", prompt: "Who are you, and what can you do?" },
];

const ANY_MODEL = [
  { title: "Explain", prompt: "Explain to a curious child why the sky is blue." },
  { title: "Code", prompt: "Write a Python function that merges two sorted lists, with a test." },
  { title: "Compare", prompt: "Compare trains and planes for a trip of 600 km, as a table." },
  { title: "Use a tool", prompt: "What is the weather in Oslo?", set: { tools: WEATHER } },
];

export const examples = (model) => (model === "understudy" ? IN_THE_BOX : ANY_MODEL);
