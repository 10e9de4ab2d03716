"""Plain words and made-up ones: material that the model has to copy, not to know."""

from random import Random

from tests.understudy.lessons.phrasing import invented_name

__all__ = ["NOUNS", "VERBS", "message", "phrase", "word"]

NOUNS = [
    "river", "stone", "lamp", "window", "garden", "cloud", "table", "music", "paper", "silver", "forest", "candle",
    "bridge", "apple", "winter", "ocean", "letter", "mountain", "stage", "actor", "curtain", "velvet", "copper",
    "island", "feather", "house", "train", "water", "bread", "friend", "book", "light", "door", "snow", "kitchen",
    "engine", "bicycle", "guitar", "clock", "camera", "toaster", "printer", "phone", "keyboard", "car", "violin",
    "sugar", "salt", "gold", "film", "hotel", "restaurant", "novel", "poem", "shoe", "tent", "boat", "robot",
    "ticket", "order", "invoice", "parcel", "customer", "teacher", "student", "doctor", "patient", "bottle",
    "carpet", "mirror", "pencil", "basket", "button", "blanket", "ladder", "hammer", "needle", "pocket", "pillow",
    "saddle", "shovel", "wallet", "wagon", "whistle", "zipper", "anchor", "barrel", "cabin", "desert", "dinner",
    "dragon", "eagle", "flower", "goose", "harbor", "jacket", "ladder", "lemon", "market", "meadow", "museum",
    "orange", "palace", "parrot", "pepper", "pigeon", "planet", "plate", "potato", "rabbit", "ribbon", "rocket",
    "school", "shadow", "sister", "spider", "spring", "square", "street", "summer", "sunset", "temple", "theatre",
    "thunder", "tower", "tunnel", "turtle", "uncle", "valley", "village", "wheel", "window", "wizard", "account",
    "airport", "answer", "article", "balance", "battery", "branch", "budget", "calendar", "channel", "chapter",
    "coffee", "color", "company", "contract", "course", "device", "document", "employee", "event", "exercise",
    "factory", "field", "flight", "folder", "game", "goal", "group", "guest", "height", "history", "image", "item",
    "journey", "kind", "language", "length", "lesson", "level", "library", "limit", "machine", "manager", "member",
    "memory", "menu", "message", "meeting", "model", "movie", "name", "number", "office", "owner", "page",
    "password", "picture", "player", "policy", "price", "product", "profile", "project", "promise", "quality",
    "question", "rating", "reason", "record", "region", "report", "request", "result", "review", "room", "route",
    "rule", "sample", "score", "season", "seat", "section", "sensor", "service", "session", "shape", "signal",
    "size", "song", "sound", "source", "speed", "staff", "state", "station", "status", "step", "stock", "store",
    "story", "style", "subject", "summary", "supply", "system", "target", "task", "taste", "team", "temperature",
    "test", "theme", "thread", "time", "title", "tool", "topic", "total", "track", "trade", "traffic", "unit",
    "update", "user", "value", "vehicle", "version", "video", "visit", "voice", "volume", "weight", "width", "word",
    "worker", "year", "zone",
]  # fmt: skip
VERBS = [
    "open", "close", "start", "stop", "order", "cancel", "reserve", "rename", "delete", "print", "paint", "lock",
    "unlock", "clean", "charge", "count", "copy", "move", "mark", "check", "confirm", "count", "deliver", "draw",
    "fetch", "fill", "finish", "fix", "follow", "grow", "hide", "invite", "join", "label", "lift", "list", "load",
    "measure", "mix", "monitor", "pack", "pause", "pick", "plan", "post", "prepare", "publish", "repair", "reset",
    "return", "review", "rotate", "scan", "select", "share", "ship", "show", "sign", "sort", "store", "submit",
    "test", "track", "trim", "update", "upload", "verify", "watch", "wrap",
]  # fmt: skip
_GLUE = [
    "the", "a", "my", "your", "and", "to", "for", "with", "on", "in", "at", "from", "is", "are", "not", "this",
    "that", "will", "please", "now", "today", "soon", "it", "me", "you", "we", "new", "old",
]  # fmt: skip


def word(rng: Random) -> str:
    """One lower-case word; four in ten are made up."""
    return invented_name(rng).lower() if rng.random() < 0.4 else rng.choice(NOUNS)


def phrase(rng: Random) -> str:
    """A value as people give it: a word, a name, two words, or a number with letters."""
    kind = rng.randrange(8)
    if kind < 3:
        return word(rng)
    if kind < 5:
        return invented_name(rng)
    if kind == 5:
        return f"{word(rng)} {word(rng)}"
    if kind == 6:
        return f"{invented_name(rng)} {invented_name(rng)}"
    return "".join(rng.choice("ABCDEFGHKLMNPRSTX") for _ in range(rng.randrange(1, 4))) + str(rng.randrange(1000))


def message(rng: Random) -> str:
    """A few words that could be a message."""
    return " ".join(rng.choice(_GLUE) if rng.random() < 0.45 else word(rng) for _ in range(rng.randrange(2, 8)))
