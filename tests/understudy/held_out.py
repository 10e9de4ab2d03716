"""The test set's phrasings of the capital questions. The training never sees them: a test compares both sides.

Slots: {c} a country as in a sentence, {C} the same at its start, {p} its possessive, {k} a capital, {n} a number,
{m} a number as a word. Lower case, slips of the finger and missing marks are part of the set.
"""

__all__ = ["BLIND_CAPITAL_OF", "BLIND_COUNTRY_OF", "CAPITAL_OF", "COUNTRY_OF", "LISTS", "LISTS_WITHIN"]

CAPITAL_OF: tuple[str, ...] = (
    "Tell me which city is the capital of {c}.",
    "I forgot the capital of {c}. Can you remind me?",
    "{C}: capital city?",
    "Quick quiz: {p} capital?",
    "My homework asks for the capital of {c}. What do I write?",
    "Which city do we call the capital of {c}?",
    "would you happen to know {p} capital city",
    "capital city for {c} pls",
    "If I visit {c}, what is the name of its capital city?",
    "so what is the capital of {c} again",
    "Hey, what's {p} capital called?",
    "Fill in the blank: the capital of {c} is ___.",
    "Could you please give me the name of {p} capital?",
    "I need to know {p} capital.",
    "waht is the captial of {c}?",
    "In {c}, which city is the capital?",
    "The capital of {c} is which city?",
    "teh capital of {c}?",
    "For {c}, what is the capital?",
    "What would you say is the capital of {c}?",
    "Let's play: I say {c}, you say its capital.",
    "As a geography teacher, tell me the capital of {c}.",
    "WHAT WOULD BE THE CAPITAL CITY OF {c}",
    "which citty is capital of {c}",
    "can u tell me capital of {c} plz",
    "May I ask what {p} capital is?",
    "A friend says {c} has a nice capital. What is it called?",
    "Would you be so kind as to name the capital of {c}?",
)

COUNTRY_OF: tuple[str, ...] = (
    "{k} is the capital of what nation?",
    "For which country is {k} the capital city?",
    "{k} - capital of where?",
    "Whose capital is {k}?",
    "I am in {k}. Of what country is it the capital?",
    "name the country whose capital city is {k}",
    "Guess the country: its capital is {k}.",
    "{k} serves as the capital of what country?",
    "Could you tell me what country has {k} for a capital?",
    "My homework: {k} is the capital of ...?",
    "wich country has the captial {k}",
    "If the capital is {k}, what is the country?",
    "Which country is governed from its capital {k}?",
    "plz what country is {k} capital of",
    "Do you happen to know whose capital {k} is?",
    "Fill in the blank: {k} is the capital of ___.",
)

LISTS: tuple[str, ...] = (
    "Could you list {n} countries together with their capital cities?",
    "I want {m} countries and the capital of each.",
    "Write down {n} nations with their capitals, please.",
    "{n} countries + capitals",
    "Show me {m} examples of countries and their capitals.",
    "Please name {n} countries and say what their capitals are.",
    "can u list {n} countries n their capitals",
    "What are {m} countries and what are their capitals?",
    "For my quiz I need {n} countries, each with its capital.",
    "lsit {n} contries and thier capitals",
)

LISTS_WITHIN: tuple[str, ...] = (
    "Make a list of {n} countries in {w} and their capitals.",
    "I want {m} countries from {w} and the capital of each.",
    "Pick {n} countries located in {w} and give their capitals.",
    "{w}: {n} countries plus capitals please",
)

# Written after the last training: no earlier score of these could have shaped the corpus.
BLIND_CAPITAL_OF: tuple[str, ...] = (
    "Please could you name {p} capital city for me?",
    "I am going on holiday to {c}. Which city is the capital there?",
    "What capital city would I find in {c}?",
    "Tell us the capital of {c}, would you?",
    "And the capital city over in {c}?",
    "My daughter wonders which city is the capital of {c}.",
    "Could somebody tell me the capital of {c}?",
    "hello!! capital of {c} please!!",
    "whats the captal city in {c}",
    "Among all cities of {c}, which one is its capital?",
    "Give the name of the city that is the capital of {c}.",
    "Can you remember what the capital of {c} is?",
)

BLIND_COUNTRY_OF: tuple[str, ...] = (
    "{k} is a capital city, but of which country?",
    "Tell me the country that {k} is the capital of.",
    "which country's got {k} as capital?",
    "Where is {k} the capital?",
    "To which country does the capital city {k} belong?",
    "what country does {k} belong to as its capital",
    "Name the nation with {k} as its capital city.",
    "{k}, capital of what country?",
)
