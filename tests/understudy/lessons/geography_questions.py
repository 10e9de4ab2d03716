"""How the training asks about capitals. Slots: {c} a country as in a sentence, {C} the same at its start, {p} and {P}
its possessive, {a} its adjective, {k} a capital, {n} a number, {m} a number as a word, {w} a continent."""

from itertools import product

__all__ = ["CAPITAL_QUESTIONS", "COUNTRY_QUESTIONS", "LIST_QUESTIONS", "LIST_WITHIN_QUESTIONS"]

_OBJECTS = (
    "the capital of {c}",
    "the capital of {c}",
    "the capital city of {c}",
    "{p} capital",
    "{p} capital city",
    "the {a} capital",
    "the name of the capital of {c}",
)
# {o} is one of the objects above, {O} the same at the start of a sentence.
_ASKING = (
    "What is {o}?", "What's {o}?", "what is {o}", "Name {o}.", "Give me {o}.", "Tell me {o}.", "Say {o}.", "Write {o}.",
    "Can you tell me {o}?", "Could you tell me what {o} is?", "Do you know what {o} is?", "Do you know {o}?",
    "I would like to know {o}.", "I'd like to know what {o} is.", "I want to know {o}.", "Please name {o}.",
    "Please tell me {o}.", "Let me know {o}.", "Remind me what {o} is.", "I can't remember {o}.",
    "I don't remember {o}.",
    "Any idea what {o} is?", "Quiz question: what is {o}?", "For a crossword: {o}", "Which one is {o}?", "{O}?", "{O}",
    "{O} is called what?", "What do people call {o}?", "How is {o} called?", "Can you name {o}?",
    "I am looking for {o}.",
    "looking for {o}", "Help me with {o}.", "What can you tell me about {o}?", "Would you tell me {o}?",
    "I wonder what {o} is.", "My teacher asked me about {o}. What is it?", "My son wants to learn {o}.", "{O}, please.",
    "You surely know {o}.", "Have you heard of {o}? What is it?", "What should I answer if somebody asks for {o}?",
    "Answer in a sentence: what is {o}?", "I have to write down {o}.", "Geography question: {o}?", "Find {o}.",
    "State {o}.", "Which city is {o}?", "What city is {o}?", "Which is {o}?", "Could I get {o}?", "Test: {o}?",
    "We are learning {o} today. What is it?", "{O} is", "Complete the sentence: {O} is", "Complete this: {O} is ____.",
    "{O} is ____", "{O}: ___", "Finish this: {o} is ...",
    "What did they name {o}?", "I bet you don't know {o}.", "Spell out {o}.", "In one word: {o}?", "{o} = ?",
)  # fmt: skip
_WHOLE = (
    "{C}, capital?", "{c} capital", "{C} - what is its capital?", "{C} has which capital?", "Capital? Country: {c}",
    "Country: {c}. Capital:", "capital {c}", "capital of {c}", "Think of {c}. What is its capital?",
    "I am travelling to {c}. What is its capital?", "About {c}: what's the capital?",
    "Is there a capital in {c}? Which?", "Which city would be the capital in {c}?",
    "{C}. Which capital does it have?", "Where is the capital of {c}, and what is its name?",
    "What is the most important city, the capital, in {c}?", "When you think of {c}, which capital comes to mind?",
    "I moved to {c} and want to see the capital. What is it called?", "{C} is a country. What is its capital?",
    "This flag is the flag of {c}. What is its capital?", "Which capital belongs to {c}?",
    "Which capital does {c} have?", "What capital does {c} have?", "{c}?? capital??",
    "We fly to {c} tomorrow, to the capital. Which city is that?", "Match the country with its capital: {c}",
    "Country {c}, capital ...", "Someone from {c} lives in its capital. Which city?",
)  # fmt: skip


def _capital_questions() -> tuple[str, ...]:
    questions = []
    for ask, thing in product(_ASKING, _OBJECTS):
        opened = thing.replace("{p}", "{P}") if thing.startswith("{p}") else thing[0].upper() + thing[1:]
        questions.append(ask.replace("{o}", thing).replace("{O}", opened))
    return (*questions, *_WHOLE * 4)


CAPITAL_QUESTIONS: tuple[str, ...] = _capital_questions()

_COUNTRY_NOUNS = ("country", "country", "nation", "state")
_COUNTRY_ASKING = (
    "Which {x} has {k} as its capital?", "What {x} is {k} the capital of?", "{k} is the capital of which {x}?",
    "{k} is the capital city of which {x}?", "{k} is the capital of", "{k} is the capital of ___.",
    "Complete: {k} is the capital of ____.",
    "{k} is the capital of ...", "Finish the sentence: {k} is the capital of", "The {x} with capital {k} is ___.",
    "Whichever {x} has {k} as capital, name it.", "I know that {k} is a capital, but of which {x}?",
    "The capital {k} belongs to which {x}?",
    "Of which {x} is {k} the capital?", "In which {x} is {k} the capital?", "Name the {x} with the capital {k}.",
    "What {x} has the capital {k}?", "Which {x}'s capital is {k}?", "What {x}'s capital is {k}?",
    "{k} is the capital. What is the {x}?", "Tell me which {x} has {k} as capital.", "Which {x} is {k} the capital of?",
    "Do you know which {x} {k} is the capital of?", "Capital: {k}. {x}?", "I am looking for the {x} with capital {k}.",
    "If you are in {k}, the capital, which {x} are you in?", "{k} is a capital. Of which {x}?", "{k}: which {x}?",
    "The {x} with the capital city {k}?", "What {x} has {k} as its main city and capital?", "Which {x} does {k} lead?",
    "Give me the {x} that has {k} as its capital city.", "We land in the capital {k}. What {x} is it?",
    "Can you tell me the {x} of which {k} is the capital?", "Find the {x}: capital {k}", "{k} capital of which {x}",
    "what {x} has capital {k}", "{k} is the seat of government and capital of what {x}?", "{k} - {x}?",
    "My friend lives in {k}, the capital of her {x}. Which {x}?", "Say the {x} that goes with the capital {k}.",
    "Which {x} calls {k} its capital?", "The capital is {k}, so the {x} is", "Match the capital with its {x}: {k}",
    "A crossword asks for the {x} with the capital {k}.", "What is the {x} that {k} is the capital of?",
    "Do you know what {x} has {k} as capital?", "Answer in one word: {k} is the capital of which {x}?",
    "I would like to know of what {x} {k} is the capital.", "Remind me which {x} has its capital at {k}.",
)  # fmt: skip

COUNTRY_QUESTIONS: tuple[str, ...] = tuple(
    ask.replace("{x}", noun) for ask, noun in product(_COUNTRY_ASKING, _COUNTRY_NOUNS)
)

_LIST_VERBS = (
    "List", "Name", "Give me", "Tell me", "Write", "Write a list of", "Show", "Can you list", "Could you name",
    "Can you give me", "Please list", "I need", "I would like", "List any", "Think of", "Enumerate", "Print", "Choose",
    "Do you know", "Find", "Say", "Provide",
)  # fmt: skip
_LIST_THINGS = (
    "{n} countries and their capitals", "{n} countries and their capitals", "{m} countries and their capitals",
    "{n} countries with their capitals", "{m} countries with capitals", "{n} countries and capitals",
    "{m} countries and their capital cities", "{n} countries and the capital of each one",
    "{n} capitals and their countries", "{m} pairs of country and capital",
    "{n} capitals of the world and their countries",
    "{n} different countries, with capitals", "{m} nations and their capitals",
    "{n} random countries and their capitals",
)  # fmt: skip
_LIST_WHOLE = (
    "{n} countries with capitals", "{m} countries and capitals please", "countries and capitals, {n} of them",
    "I am learning capitals. Give me {n} countries to start with.",
    "Which {m} capitals should I learn? Name the countries too.",
    "Make a table of {n} countries and capitals.", "Countries and their capitals: list {n}.", "list {n} capitals",
    "List {n} capital cities.", "Name {m} capitals.", "What are {n} capitals you know?",
    "Give me {n} capitals.",
    "Capitals! I need {n} with their countries.",
)  # fmt: skip

LIST_QUESTIONS: tuple[str, ...] = (
    *(f"{verb} {thing}." for verb, thing in product(_LIST_VERBS, _LIST_THINGS)),
    *_LIST_WHOLE * 8,
    *("List {n} countries and their capitals.",) * 20,
)

_WITHIN_THINGS = (
    "{n} countries in {w} and their capitals", "{m} countries of {w} with their capitals", "{n} capitals in {w}",
    "{n} countries from {w} and their capitals", "{m} countries in {w} and the capital of each", "{n} {w} capitals",
)  # fmt: skip

LIST_WITHIN_QUESTIONS: tuple[str, ...] = (
    *(f"{verb} {thing}." for verb, thing in product(_LIST_VERBS, _WITHIN_THINGS)),
    *(
        "In {w}, which are {n} countries and their capitals?", "{w}: list {n} countries with capitals.",
        "countries and capitals of {w}, {n} please", "What are {m} countries in {w}? Give their capitals too.",
        "I am interested in {w}. List {n} of its countries and their capitals.",
    ) * 4,
)  # fmt: skip
