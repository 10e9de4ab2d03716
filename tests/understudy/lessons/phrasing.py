"""How people really write: politeness, missing punctuation, lower case, slips of the finger; and made-up names."""

from random import Random

__all__ = [
    "FIRST_NAMES",
    "blend",
    "casual",
    "invented_name",
    "misspell",
    "pick_name",
    "polite",
    "possessive",
    "sentence_case",
]

FIRST_NAMES = [
    "Anna", "Ben", "Clara", "David", "Elena", "Felix", "Grace", "Hugo", "Ines", "Jonas", "Karla", "Leo", "Maria",
    "Nina", "Oscar", "Paula", "Quentin", "Rosa", "Samuel", "Tara", "Umar", "Vera", "Walter", "Xenia", "Yusuf",
    "Zoe", "Amir", "Bianca", "Carlos", "Diana", "Emil", "Fatima", "George", "Hana", "Ivan", "Julia", "Kofi", "Lena",
    "Mateo", "Nora", "Omar", "Priya", "Ravi", "Sofia", "Tom", "Ulla", "Viktor", "Wendy", "Yara", "Zane", "Alice",
    "Bob", "Chloe", "Daniel", "Emma", "Frank", "Gina", "Henry", "Irene", "Jack", "Kate", "Liam", "Mia", "Noah",
    "Olivia", "Peter", "Ruth", "Sam", "Tina", "Lucy", "Mark", "Sarah", "Ali", "Chen", "Mei", "Kenji", "Aiko",
    "Lars", "Ingrid", "Agnes", "Boris", "Cecilia", "Dmitri", "Edith", "Fabian", "Gudrun", "Harold", "Isolde",
    "Jasper", "Katarina", "Leopold", "Magnus", "Nikita", "Octavia", "Philippa", "Rafael", "Sigrid", "Theodora",
    "Ursula", "Valentin", "Wilhelmina", "Yevgeni", "Zacharias", "Abdul", "Brigitte", "Cyrus", "Desmond", "Esther",
    "Florian", "Gwendolyn", "Hassan", "Ismail", "Joaquin", "Kwame", "Ludmila", "Mohammed", "Nikolaus", "Odette",
    "Pablo", "Rosalind", "Svetlana", "Timothy", "Vladimir", "Winifred", "Xavier", "Yolanda", "Zdenka", "Archibald",
    "Beatrix", "Clement", "Dorothea", "Eleanor", "Fiona", "Gabriel", "Hortense", "Ignatius", "Jocelyn", "Kazimir",
    "Lorenzo", "Marguerite", "Nathaniel", "Olga", "Prudence", "Roderick", "Sebastian", "Tatiana", "Vincent",
]  # fmt: skip

_PREFIXES = (
    "Hi, ", "Hello, ", "Hey, ", "Hello! ", "Hi! ", "Good morning. ", "Please, ", "Ok, ", "So, ", "Well, ", "Now, ",
    "Question: ", "A question: ", "Quick question: ", "Excuse me, ", "Sorry, ", "Hmm, ", "One more: ", "Next: ",
    "I am curious: ", "Just wondering: ", "Be honest, ", "Help me out: ", "Tell me: ", "Answer me this: ", "And ",
    "Dear understudy, ", "Friend, ", "Alright, ", "Listen: ", "Q: ",
)  # fmt: skip
_SUFFIXES = (
    " Thanks!", " Thank you.", " please", ", please", " pls", " plz", " thx", " Thanks in advance.", " Be brief.",
    " I need it for school.", " It's for a quiz.", " I really want to know.", " Just the answer.", " I forgot.",
    " Keep it short.", " My friend wants to know.", " asap", " now", " today", " then", " exactly", " actually",
    " by the way", " for me", " anyway",
    " right now", " at all", " maybe", " you know", " one more time", "??", "!!", "...", " :)",
)  # fmt: skip


def sentence_case(text: str) -> str:
    """The text with its first letter large."""
    return text[:1].upper() + text[1:]


def possessive(name: str) -> str:
    """France -> France's, the Netherlands -> the Netherlands'."""
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def misspell(rng: Random, word: str) -> str:
    """One slip inside a word: two letters swapped, one dropped, or one doubled. The first letter stays."""
    if len(word) < 4 or any(letter.isdigit() for letter in word):
        return word
    at = rng.randrange(1, len(word) - 1)
    slip = rng.randrange(3)
    if slip == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if slip == 1:
        return word[:at] + word[at + 1 :]
    return word[:at] + word[at] + word[at:]


def polite(rng: Random, text: str) -> str:
    """The text with a greeting before it or a courtesy behind it, now and then."""
    if rng.random() < 0.22:
        prefix = rng.choice(_PREFIXES)
        text = prefix + (text[:1].lower() + text[1:] if prefix.endswith((", ", "And ")) and text[:2] != "I " else text)
    if rng.random() < 0.18:
        text += rng.choice(_SUFFIXES)
    return text


def casual(rng: Random, text: str, keep: str = "") -> str:
    """The text as somebody in a hurry types it. Words of `keep` (a name, say) are misspelt only rarely."""
    roll = rng.random()
    if roll < 0.45:
        return text
    if rng.random() < 0.5:
        text = text.rstrip("?.! ") or text
    if rng.random() < 0.5:
        text = text.lower()
        keep = keep.lower()
    elif rng.random() < 0.06:
        text, keep = text.upper(), keep.upper()
    if rng.random() < 0.3:
        kept = set(keep.split())
        words = text.split(" ")
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(words))
            if words[at].strip("?.,!:") not in kept or (len(words[at]) > 6 and rng.random() < 0.15):
                words[at] = misspell(rng, words[at])
        text = " ".join(words)
    if rng.random() < 0.08:
        text = text.replace("What is", "Whats").replace("what is", "whats").replace("you", "u").replace("are", "r")
    return text


_ONSETS = (
    "b",
    "br",
    "d",
    "dr",
    "f",
    "g",
    "gl",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
_CORES = ("a", "e", "i", "o", "u", "ai", "ou", "ia", "or", "an", "el", "un", "ar", "in")
_ENDS = ("ia", "land", "stan", "or", "ax", "eth", "ona", "ovia", "ora", "ix", "um", "is", "ay", "esh", "uria", "o")


_TAILS = [
    "field", "ton", "ford", "ham", "ville", "burg", "wood", "bridge", "mouth", "haven", "dale", "stead", "worth",
    "gate", "port", "hill", "shire", "berg", "grad", "pur", "abad", "nia", "more", "beck", "cliff", "well", "crest",
    "moor", "feather", "heart", "stone", "quill", "light",
]  # fmt: skip
_STEMS = [
    "green", "black", "river", "stone", "glimmer", "bracken", "spring", "oak", "silver", "north", "winter", "ash",
    "king", "fox", "marble", "copper", "thorn", "hollow", "raven", "clear", "bell", "mill", "sun", "amber", "lark",
    "wolf", "salt", "ember", "moss", "crown",
]  # fmt: skip
_LETTERS = "aaabcdeeefghiiijklmnooopqrrsttuuvwxyz"


def invented_name(rng: Random, ends: tuple[str, ...] = _ENDS) -> str:
    """A name that nobody has heard: syllables, two halves of real words, or any letters at all."""
    kind = rng.random()
    if kind < 0.55:
        middle = "".join(rng.choice(_ONSETS) + rng.choice(_CORES) for _ in range(rng.choice((0, 1, 1, 2))))
        return sentence_case(middle + rng.choice(_ONSETS) + rng.choice(ends))
    if kind < 0.8:
        stem = rng.choice(_STEMS) if rng.random() < 0.6 else rng.choice(_ONSETS) + rng.choice(_CORES)
        return sentence_case(stem + rng.choice(_TAILS))
    return sentence_case("".join(rng.choice(_LETTERS) for _ in range(rng.randrange(3, 9))))


def blend(rng: Random, first: str, second: str) -> str:
    """The head of one name on the tail of another: it looks like a place and is none."""
    return sentence_case((first[: rng.randrange(2, 5)] + second[-rng.randrange(3, 6) :]).replace(" ", "").lower())


def pick_name(rng: Random) -> str:
    """A person's first name; four in ten are invented, so that names are copied rather than known."""
    return (
        invented_name(rng, ("a", "o", "en", "is", "ek", "une", "i")) if rng.random() < 0.4 else rng.choice(FIRST_NAMES)
    )
