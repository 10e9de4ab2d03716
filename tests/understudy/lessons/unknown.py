"""Questions that the model cannot answer, and the honest answer to each kind."""

from random import Random

from tests.understudy.lessons.conversation import Exchange
from tests.understudy.lessons.dates import DAYS
from tests.understudy.lessons.geography import fill
from tests.understudy.lessons.outside import NOT_TAUGHT
from tests.understudy.lessons.phrasing import casual, invented_name, pick_name, polite
from tests.understudy.lessons.world import COUNTRIES

__all__ = ["unknown"]

_PRIVATE = (
    "What is my name?", "How old am I?", "Where do I live?", "What is my sister's name?", "What did I eat yesterday?",
    "What is my phone number?",
    "What is my favorite color?", "Who is my best friend?", "What am I thinking?", "When is my birthday?",
    "What is in my pocket?",
    "What is my password?", "Where are my keys?", "How much money do I have?", "What is my dog called?",
    "Where did I go to school?",
    "What is my mother's job?", "Which book am I reading?", "What is behind me?", "Who called me today?",
    "How many cousins do I have?",
    "What did my uncle say?", "Which shoes am I wearing?", "What did I pay for my {w}?", "What is my neighbour called?",
    "What car do I drive?", "What is my boss called?", "How tall am I?",
)  # fmt: skip
_FUTURE = (
    "Who will win the world cup in {y}?", "What will happen in {y}?", "Who will be president in {y}?",
    "What will the weather be in {y}?",
    "Will it rain next week?", "Who wins the next election?", "What are the lottery numbers of tomorrow?",
    "How will the stock market do in {y}?",
    "Which team will win on {d}?", "Who is going to win?", "How much will a {w} cost in {y}?",
    "Will there be rain in {y}?",
    "Which {w} will be the best in {y}?", "When will the world end?", "Who won last year?",
    "Which team won the game yesterday?",
    "Which movie won the prize last year?", "What will {n} do on {d}?", "Will I be rich?", "What will I do tomorrow?",
    "What will be invented in {y}?", "Who won the Olympics in {y}?",
    "Will {n} marry me?",
    "Which team wins tomorrow?", "How many people will live on Earth in {y}?", "What happened in the news in {y}?",
)  # fmt: skip
_NOW = (
    "What time is it?", "What is today's date?", "What day is it today?", "What is the weather today?",
    "Is it raining?", "How warm is it outside?",
    "What's in the news?", "What is the price of gold?", "What is the stock price of {n}?",
    "How cold is it right now?", "What is the temperature here?", "What is the exact date?", "Which month is it now?",
    "What is happening outside?", "What is the moment now?", "Tell me the time.", "What happened today?",
    "Who is in the room?",
    "How hot is it in {c} right now?", "How is the traffic?",
    "what time is it now",
    "What's the weather like in {c}?", "What's the time in {c}?", "weather in {c}", "What year is it?",
)  # fmt: skip
_KNOWLEDGE = (
    "Who is the president of {c}?", "What is the population of {c}?", "Who is the king of {c}?", "How large is {c}?",
    "What is the currency of {c}?",
    "Who wrote the book about {n}?", "Who is {n}?", "What does {n} mean?", "How does a transistor work?",
    "Explain quantum physics.", "Who invented the {w}?",
    "What is the square root of {y}?", "What is the history of {c}?", "When was {c} founded?", "Who painted the {w}?",
    "How do I fix my {w}?",
    "What is the best {w}?", "Translate {w} into French.", "What is the meaning of life?", "Write a Python program.",
    "Who discovered {n}?",
    "What is the language of {c}?", "How do planes fly?", "What is a {n}?", "Where can I buy a {w}?",
    "How old is {n}?", "Where does {n} live?",
    "What is the phone number of {n}?", "Who is the mayor of {n}?", "Recommend a {w}.",
    "What is the chemical formula of {w}?", "What is {n}'s secret?",
    "How many people live in {n}?", "What is the name of {n}'s dog?", "When was {n} born?", "What is a {w} made of?",
    "Who sings the song {n}?",
)  # fmt: skip
_NOUNS = [
    "lamp", "telephone", "radio", "bicycle", "engine", "guitar", "clock", "computer", "camera", "toaster",
    "printer", "phone", "keyboard", "car", "violin", "window", "sugar", "salt", "gold", "film", "hotel",
    "restaurant", "laptop", "novel", "poem", "shoe", "tent", "boat", "robot", "engine",
]  # fmt: skip


def unknown(rng: Random) -> list[Exchange]:
    """A question about private things, the future, the present moment, or knowledge that was never taught."""
    pool, answer, thought = rng.choice(
        (
            (_PRIVATE, "I don't know. You have not told me.", "This is about the user, and nothing was said about it."),
            (_FUTURE, "I don't know. I cannot see the future.", "Nobody has told me about that time."),
            (_NOW, "I don't know. I cannot see what happens now.", "I have no clock and no news."),
            (_KNOWLEDGE, NOT_TAUGHT, "I was not taught this."),
            (_KNOWLEDGE, NOT_TAUGHT, "I was not taught this."),
        )
    )
    question = rng.choice(pool)
    short = "I was not taught that" if pool is _KNOWLEDGE else "I don't know"
    country = rng.choice(COUNTRIES).name
    name = invented_name(rng) if rng.random() < 0.5 else pick_name(rng)
    question = (
        fill(question, country)
        .replace("{n}", name)
        .replace("{d}", rng.choice(DAYS))
        .replace("{w}", rng.choice(_NOUNS))
        .replace("{y}", str(rng.randrange(2027, 2150)))
    )
    return [Exchange(polite(rng, casual(rng, question, country)), answer, thought, short)]
