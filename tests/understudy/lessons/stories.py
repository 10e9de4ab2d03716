"""Short stories from a small grammar: a hero, a place, a wish, a trouble, a help, an end."""

from random import Random

from tests.understudy.lessons.conversation import Exchange
from tests.understudy.lessons.phrasing import casual, invented_name, pick_name, polite

__all__ = ["story", "tell"]

_HEROES = [
    "fox", "bear", "mouse", "owl", "rabbit", "cat", "dog", "turtle", "frog", "hedgehog", "squirrel", "robot",
    "dragon", "knight", "girl", "boy", "sailor", "baker", "painter", "farmer", "king", "queen", "wizard", "actor",
    "bird", "horse", "goat", "penguin", "whale", "lion", "elephant", "star", "cloud",
]  # fmt: skip
_TRAITS = ("little", "young", "brave", "shy", "clever", "old", "kind", "curious", "hungry", "sleepy", "merry", "lonely")
_PLACES = (
    "in a forest", "by the sea", "on a hill", "in a small town", "near a river", "in an old castle",
    "under a large tree", "on an island",
    "at the edge of a village", "behind a theatre", "in a quiet valley", "in a house with a red door",
)  # fmt: skip
_WISHES = (
    ("wanted to see the stars", "saw the stars"), ("wanted to find a friend", "found a friend"),
    ("looked for a golden key", "held the golden key"),
    ("wanted to learn to sing", "sang the first song"), ("dreamed of the sea", "stood at the sea"),
    ("wished for a warm coat", "wore a warm coat"),
    ("wanted to bake a cake", "ate a piece of cake"), ("looked for the lost bell", "rang the bell"),
    ("wanted to stand on a stage", "stood on the stage"),
    ("wanted to cross the river", "reached the other side"), ("hoped for rain", "danced in the rain"),
    ("searched for honey", "tasted the honey"),
)  # fmt: skip
_TROUBLES = (
    "But a storm came and the path was gone.", "But the bridge was broken.", "But it was dark and very cold.",
    "But nobody knew the way.",
    "But a high wall stood in the way.", "But the door was locked.", "But the night was long.",
    "But the map had a hole in it.",
    "But a loud noise was heard and everyone ran away.", "But the road went on and on.",
)  # fmt: skip
_HELPS = (
    "a {o} came by and showed the way", "a {o} gave a lamp", "an idea came while looking at the moon",
    "a {o} said: Do not give up",
    "a {o} shared some bread", "a {o} opened a secret gate", "a small light shone far away",
    "a {o} told a story and all was well again",
)  # fmt: skip
_ENDS = (
    "From that day on, nobody was afraid of the dark.", "They laughed until the sun went down.",
    "And they stayed friends for ever.",
    "Then it was time to go home and sleep.", "And if you listen at night, you can still hear them laugh.",
    "It was the best day of the year.",
    "So a small heart found a large joy.", "And everyone in the village heard about it.",
    "The next morning the sun shone for all.",
)  # fmt: skip


def tell(rng: Random, hero: str, name: str) -> str:
    """The text of one story, five or six sentences long."""
    trait = rng.choice(_TRAITS)
    others = [other for other in _HEROES if other != hero and other[0] not in "aeiou"]
    wish, granted = rng.choice(_WISHES)
    article = "an" if trait[0] in "aeiou" else "a"
    opening = rng.choice(("Once upon a time there was", "Long ago there lived", "There once was", "One day there was"))
    when = rng.choice(("Every day", "For a long time", "Each morning", "All winter long"))
    turn = rng.choice(("Then", "At last", "After a while", "Just then"))
    final = rng.choice(("In the end", "Soon", "Before midnight", "So"))
    opening = f"{opening} {article} {trait} {hero} named {name} who lived {rng.choice(_PLACES)}."
    trouble = f"{when} {name} {wish}. {rng.choice(_TROUBLES)}"
    helped = f"{turn} {rng.choice(_HELPS).replace('{o}', rng.choice(others))}."
    return f"{opening} {trouble} {helped} {final} {name} {granted}. {rng.choice(_ENDS)}"


_PET_NAMES = [
    "Pip", "Moss", "Bella", "Rufus", "Tilly", "Otto", "Hazel", "Milo", "Luna", "Finn", "Poppy", "Bruno", "Juno",
    "Sage", "Toby", "Nell", "Coco", "Max", "Ruby", "Jasper",
]  # fmt: skip


def story(rng: Random) -> list[Exchange]:
    """A story about anything, about a given hero, or about a hero with a given name."""
    hero = rng.choice(_HEROES)
    name = rng.choice(_PET_NAMES) if rng.random() < 0.6 else rng.choice((pick_name(rng), invented_name(rng)))
    kind = rng.randrange(3)
    article = "an" if hero[0] in "aeiou" else "a"
    if kind == 0:
        question = rng.choice(
            ("Tell me a story.", "Tell me a short story.", "Write a short story.", "A story, please.",
            "Can you tell a story?", "I want a story.",
             "Tell me a bedtime story.", "Once upon a time ...", "Please write a little story for children.",
             "Make up a story.", "story time!",
             "Write me a tale.", "Do you know a story?")
        )  # fmt: skip
        question = casual(rng, question)
    else:
        subject = f"{article} {hero}" + (f" {rng.choice(('named', 'called'))} {name}" if kind == 2 else "")
        question = rng.choice(
            ("Tell me a story about {s}.", "Write a short story about {s}.", "A story about {s}, please.",
            "I want to hear about {s}.",
             "Can you tell me a story about {s}?", "Make up a tale about {s}.", "Write about {s}.", "story about {s}")
        ).replace("{s}", subject)  # fmt: skip
    scene = [Exchange(polite(rng, question), tell(rng, hero, name), f"A story about {article} {hero} named {name}.")]
    if rng.random() < 0.12:
        other = rng.choice(_HEROES)
        article = "an" if other[0] in "aeiou" else "a"
        again = rng.choice(("Another one about {s}.", "Now one about {s}.", "And one with {s}, please.")).replace(
            "{s}", f"{article} {other}"
        )
        scene.append(Exchange(again, tell(rng, other, rng.choice(_PET_NAMES)), f"A story about {article} {other}."))
    elif rng.random() < 0.15:
        scene.append(
            Exchange(
                casual(rng, "What was the hero's name?"), f"The name was {name}.", "The story gives the name.", name
            )
        )
    return scene
