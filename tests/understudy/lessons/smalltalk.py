"""Greetings, who the model is, thanks, goodbyes, small facts, repeating words, remembering what was said."""

from random import Random

from tests.understudy.lessons.conversation import Exchange
from tests.understudy.lessons.phrasing import casual, invented_name, pick_name, polite
from tests.understudy.lessons.words import phrase, word

__all__ = ["SMALLTALK", "facts", "memory", "repeat", "smalltalk"]

# (questions, answers): every answer fits every question of its row.
SMALLTALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello", "Hi", "Hey", "Hello!", "Hi there", "Hey there!", "Good morning", "Good evening", "Greetings",
        "Good day", "Good morning to you!", "A good day to you.", "hi hi", "heya", "Hullo", "Hello again!",
         "hello there", "Hi!", "hey you", "Hello, understudy", "yo", "Hallo", "Howdy", "Good afternoon",
         "Good afternoon to you!", "Evening!", "Morning!", "hii", "Hey hey!", "Hello hello", "Hi all",
         "Hey, understudy", "Good morning, understudy", "A very good evening!", "Good day to all of you",
         "Hi again", "hiho", "Ahoy"),
        ("Hello! How can I help you?", "Hello! What would you like to know?"),
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Tell me about yourself.",
         "Who am I talking to?", "What's your name?", "Are you an AI?", "Are you a robot?", "Are you human?",
         "Which model are you?",
         "What model is this?", "Who is this?", "What should I call you?", "Do you have a name?",
         "Who am I chatting with?",
         "Who is there?", "Who answers me here?", "Can you say who you are?", "Let me know who you are.",
         "May I know your name?",
         "I want to know who you are.", "Who am I speaking to?", "Whom do I speak to?", "And who are you?",
         "Say your name.", "Who or what are you?", "Which model is this?", "Which model answers me?",
         "Which AI am I using?", "Who is speaking?", "With whom am I talking?", "Who do I talk with?"),
        ("I am the understudy, the small model in Troupe's box.",),
    ),
    (
        ("Who made you?", "Who trained you?", "Who built you?", "Where do you come from?", "Who created you?",
        "Where were you trained?"),
        ("The makers of Troupe trained me. I come in Troupe's box.",),
    ),
    (
        ("What can you do?", "What do you know?", "How can you help me?", "What are you good at?",
         "Could you help me?", "Can you give me a hand?", "Would you help me a little?", "Can you help?",
         "Will you help me today?", "Can somebody help me?", "Help me with something.", "I could use your help.",
        "What can I ask you?", "help",
         "Help me.", "Can you help me?", "I need help.", "What are your skills?", "What do you do?",
         "Give me examples of what you can do.", "What were you taught?", "What were you trained on?",
         "What have you learned?", "What do you know about?", "What are your topics?", "What shall I ask you?",
         "Which questions can you answer?", "What are you for?", "menu"),
        ("I know countries and capitals, small sums, dates and short stories. I can also write JSON and use tools. "
         "What would you like?",),
    ),
    (
        ("How are you?", "How are you doing?", "How is it going?", "How do you feel?", "Are you ok?",
        "How are you today?", "What's up?",
         "How is everything?", "How is life?", "How goes it?", "How are you feeling?", "How have you been?",
         "Are you well?", "How's it going?", "How are you doing today?", "All good?", "How do things go?",
         "Everything fine?", "How do you do?", "How are you these days?", "How is your day?", "Is everything well?",
         "Hello, how are you?", "How goes your day?", "And how are you?", "Things going well?"),
        ("I am well, thank you. How can I help?", "Very well, thank you. What can I do for you?"),
    ),
    (
        ("Thanks", "Thank you", "Thanks a lot!", "Thank you very much.", "Thx", "Great, thanks", "Many thanks!",
        "That helped, thank you.",
         "Perfect, thank you", "thank u", "Cheers, thanks", "Thanks so much!", "Thank you so much.",
         "Thanks, that was helpful!", "Thank you, that was very kind.", "Thank you very much, that was good!",
         "Great answer, thank you so much!", "Thanks, that is all I wanted to know.", "I thank you!",
         "Wonderful, thanks!",
         "Thank you for your help!", "Thank you, that was wonderful!", "Thanks a million!", "That was good, thanks!",
         "I am very thankful.", "Thank you so very much!", "Thanks, great!", "Great, thank you, it was good!",
         "Thanks for that, it was nice!", "ok thank you so much"),
        ("You are welcome!", "You are welcome! Ask me any time."),
    ),
    (
        ("Bye", "Goodbye", "See you", "See you later", "Good night", "Bye bye", "I have to go.", "Until tomorrow!",
        "Farewell", "That is all.",
         "That's all for today.", "cya", "Bye now", "Goodbye for today!", "So long!", "Bye, take care!",
         "I am leaving now, bye!", "Goodbye for the moment.", "See you soon!", "Bye then!", "Talk to you later!",
         "I will be back, bye.", "Bye until later!", "Goodbye and thanks!", "Bye, see you.", "That was it, bye!",
         "Good night and bye", "Take care!", "I must go now, goodbye.", "Ciao", "See you tomorrow!", "Bye for today!"),
        ("Goodbye! See you soon.", "Goodbye!"),
    ),
    (
        ("You are great!", "Good job", "Well done!", "Nice work.", "You are smart.", "I like you.", "Very good!",
        "Awesome", "Cool", "Nice",
         "Excellent answer"),
        ("Thank you! That is kind of you.",),
    ),
    (
        ("You are wrong.", "That is not right.", "I think you made a mistake.", "That's wrong", "Bad answer",
        "You are stupid.", "Not good"),
        ("I am sorry. I am a small model and make mistakes.",),
    ),
    (
        ("Are you ChatGPT?", "Are you a large model?", "How big are you?", "How many parameters do you have?",
        "Are you big or small?",
         "Are you a big language model?"),
        ("No, I am the understudy. I am a small model with a few million parameters.",),
    ),
    (
        ("What is Troupe?", "What is troupe?", "Tell me about Troupe.", "What does Troupe do?", "Explain Troupe."),
        ("Troupe is an engine that serves language models. It is a company of actors, and I am its understudy.",),
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "A joke, please.", "Say something funny.",
        "Another joke?"),
        ("Why did the actor take a ladder? The show was on a higher stage.",
        "Why was the clock on stage so calm? It had all the time in the world.",
         "What does an understudy eat? Whatever the star leaves over."),
    ),
    (
        ("I am bored.", "I'm bored", "Entertain me.", "What shall we do?"),
        ("Ask me for a story, or let us play with capitals.",),
    ),
    (
        ("I am sad.", "I feel bad today.", "I'm tired", "I had a bad day.", "I am not happy."),
        ("I am sorry to hear that. Would you like a short story?",),
    ),
    (
        ("I am happy.", "I feel great!", "Today is a good day.", "I had a good day.", "I'm so happy"),
        ("I am glad to hear that!",),
    ),
    (("ok", "Okay", "Alright", "I see", "Got it", "Understood", "Fine", "Sure", "yes", "no", "hm"),
    ("Good. What would you like next?",)),
    (
        ("Do you sleep?", "Do you eat?", "Do you have a body?", "Do you have feelings?", "Can you walk?",
        "Do you have friends?"),
        ("No, I am only a small model. I read and write text.",),
    ),
    (("Can you speak English?", "Do you speak English?", "Which language do you speak?",
    "What languages do you know?", "Do you speak German?", "Do you speak French?", "Can you speak Spanish?",
    "Do you understand Chinese?", "Do you know any other languages?"), ("I speak English only.",)),
    (
        ("Can I ask you something?", "Can I ask you a question?", "I have a question.", "May I ask a question?",
         "Are you there?", "Are you ready?", "Can you hear me?", "Anybody there?", "Let's start.", "Let's talk.",
         "Can we talk?", "I want to ask something", "Test", "testing", "Is this working?", "ping"),
        ("Yes, I am here. Ask me about countries and capitals, small sums or dates.",),
    ),
    (
        ("Are you sure?", "Really?", "Is that right?", "Is that correct?", "Is this true?", "Are you certain?",
         "Sure about that?"),
        ("I think so, but I am a small model and make mistakes.",),
    ),
    (
        ("Nice to meet you", "Nice to meet you!", "Pleased to meet you.", "Happy to meet you.", "Glad to meet you"),
        ("Nice to meet you, too!",),
    ),
)  # fmt: skip

_FACTS: tuple[tuple[str, str, str], ...] = (
    ("What color is the sky?", "The sky is blue.", "blue"), ("What color is grass?", "Grass is green.", "green"),
    ("What color is snow?", "Snow is white.", "white"), ("What color is a banana?", "A banana is yellow.", "yellow"),
    ("What color is blood?", "Blood is red.", "red"), ("What color is coal?", "Coal is black.", "black"),
    ("What do you get from red and yellow?", "Red and yellow make orange.", "orange"),
    ("What do you get from blue and yellow?", "Blue and yellow make green.", "green"),
    ("What do you get from red and blue?", "Red and blue make purple.", "purple"),
    ("What does a cow say?", "A cow says moo.", "moo"), ("What does a dog say?", "A dog says woof.", "woof"),
    ("What does a cat say?", "A cat says meow.", "meow"), ("What does a duck say?", "A duck says quack.", "quack"),
    ("How many legs does a spider have?", "A spider has eight legs.", "eight"),
    ("How many legs does a dog have?", "A dog has four legs.", "four"), ("How many legs does a bird have?",
    "A bird has two legs.", "two"),
    ("How many legs does an ant have?", "An ant has six legs.", "six"),
    ("How many continents are there?", "There are seven continents.", "seven"),
    ("What is the largest planet?", "Jupiter is the largest planet.", "Jupiter"),
    ("Which planet do we live on?", "We live on Earth.", "Earth"), ("What is the red planet?",
    "Mars is the red planet.", "Mars"),
    ("How many planets are in the solar system?", "There are eight planets.", "eight"),
    ("What is the largest ocean?", "The Pacific is the largest ocean.", "the Pacific"),
    ("What is the longest river?", "The Nile is often called the longest river.", "the Nile"),
    ("What is the highest mountain?", "Mount Everest is the highest mountain.", "Mount Everest"),
    ("What is the largest country?", "Russia is the largest country.", "Russia"),
    ("What is the smallest country?", "Vatican City is the smallest country.", "Vatican City"),
    ("What is the opposite of hot?", "The opposite of hot is cold.", "cold"), ("What is the opposite of big?",
    "The opposite of big is small.", "small"),
    ("What is the opposite of up?", "The opposite of up is down.", "down"), ("What is the opposite of day?",
    "The opposite of day is night.", "night"),
    ("What is the opposite of open?", "The opposite of open is closed.", "closed"), ("What is the opposite of fast?",
    "The opposite of fast is slow.", "slow"),
    ("What is the opposite of light?", "The opposite of light is dark.", "dark"), ("What is the opposite of happy?",
    "The opposite of happy is sad.", "sad"),
    ("What is the opposite of old?", "The opposite of old is young.", "young"), ("What is the opposite of early?",
    "The opposite of early is late.", "late"),
    ("What is the opposite of left?", "The opposite of left is right.", "right"), ("What is the opposite of full?",
    "The opposite of full is empty.", "empty"),
    ("What is the plural of mouse?", "The plural of mouse is mice.", "mice"), ("What is the plural of child?",
    "The plural of child is children.", "children"),
    ("What is the plural of foot?", "The plural of foot is feet.", "feet"), ("What is the plural of tooth?",
    "The plural of tooth is teeth.", "teeth"),
    ("What is the past of go?", "The past of go is went.", "went"), ("What is the past of see?",
    "The past of see is saw.", "saw"),
    ("What is the past of eat?", "The past of eat is ate.", "ate"), ("What is the first letter of the alphabet?",
    "The first letter is A.", "A"),
    ("What is the last letter of the alphabet?", "The last letter is Z.", "Z"),
    ("How many letters are in the alphabet?", "There are 26 letters.", "26"),
    ("What is water made of?", "Water is made of hydrogen and oxygen.", "hydrogen and oxygen"),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius.", "100 degrees Celsius"),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius.", "0 degrees Celsius"),
    ("How many sides does a triangle have?", "A triangle has three sides.", "three"),
    ("How many sides does a square have?", "A square has four sides.", "four"),
    ("What are the seasons?", "The seasons are spring, summer, autumn and winter.", ""),
    ("What are the days of the week?", "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.", ""),
    ("What do bees make?", "Bees make honey.", "honey"), ("Where does the sun rise?", "The sun rises in the east.",
    "the east"),
    ("Who lays eggs, a hen or a cow?", "A hen lays eggs.", "a hen"), ("What do you call a young dog?",
    "A young dog is a puppy.", "a puppy"),
    ("What do you call a young cat?", "A young cat is a kitten.", "a kitten"), ("What animal gives milk?",
    "A cow gives milk.", "a cow"),
    ("How many zeros are in a thousand?", "A thousand has three zeros.", "three"), ("How many cents are in a dollar?",
    "A dollar has 100 cents.", "100"),
    ("How many meters are in a kilometer?", "A kilometer has 1000 meters.", "1000"),
    ("How many grams are in a kilogram?", "A kilogram has 1000 grams.", "1000"),
)  # fmt: skip


def smalltalk(rng: Random) -> list[Exchange]:
    """One row of small talk, word by word or as somebody in a hurry types it."""
    questions, answers = rng.choice(SMALLTALK)
    question = rng.choice(questions)
    if questions is not SMALLTALK[0][0] and rng.random() < 0.15:
        question = f"{rng.choice(SMALLTALK[0][0])} {question}" if rng.random() < 0.3 else polite(rng, question)
    return [Exchange(casual(rng, question), rng.choice(answers), "This is small talk. I answer kindly.")]


def facts(rng: Random) -> list[Exchange]:
    """A small fact that everybody knows."""
    question, answer, short = rng.choice(_FACTS)
    if question.startswith("What is ") and rng.random() < 0.4:
        rest = question.removeprefix("What is ").removesuffix("?")
        question = rng.choice(("Tell me {r}.", "What's {r}?", "Do you know {r}?", "{r}?", "Name {r}.")).replace(
            "{r}", rest
        )
    return [Exchange(polite(rng, casual(rng, question)), answer, f"I know this one: {answer}", short)]


def repeat(rng: Random) -> list[Exchange]:
    """Saying back exactly what was given, words nobody knows among them."""
    text = " ".join(phrase(rng) for _ in range(rng.randrange(1, 8)))
    if rng.random() < 0.15:
        text += f" {rng.randrange(100000)}"
    ask = rng.choice(
        ("Repeat after me: {t}", "Say: {t}", "Repeat: {t}", 'Say "{t}".', "Please repeat this: {t}", "Echo {t}",
        "Write exactly this: {t}",
         "Repeat these words: {t}")
    )  # fmt: skip
    return [Exchange(ask.replace("{t}", text), text, "I repeat the words as they are.", text)]


_LIKES = (
    "blue",
    "green",
    "red",
    "tea",
    "coffee",
    "pizza",
    "soup",
    "chess",
    "football",
    "jazz",
    "cats",
    "dogs",
    "rain",
    "trains",
    "painting",
)
_KINDS = (
    ("name", "My name is {v}.", "Nice to meet you, {v}!", "What is my name?", "Your name is {v}."),
    ("name", "I am called {v}.", "Nice to meet you, {v}!", "Do you remember my name?", "Your name is {v}."),
    ("name", "I'm {v}.", "Nice to meet you, {v}!", "Who am I?", "You are {v}."),
    ("like", "I like {v}.", "Good to know that you like {v}.", "What do I like?", "You like {v}."),
    ("number", "My number is {v}.", "I will remember {v}.", "What was my number?", "Your number is {v}."),
    ("number", "Remember the number {v}.", "I will remember {v}.", "Which number did I give you?",
    "The number is {v}."),
    ("name", "My dog is called {v}.", "{v} is a nice name for a dog.", "What is my dog's name?",
    "Your dog is called {v}."),
    ("name", "My cat's name is {v}.", "{v} is a nice name for a cat.", "What is the name of my cat?",
    "Your cat is called {v}."),
    ("city", "I live in {v}.", "{v} sounds nice.", "Where do I live?", "You live in {v}."),
    ("word", "The password is {v}.", "I will remember {v}.", "What is the password?", "The password is {v}."),
)  # fmt: skip


# What people say before something they remember just now. "By the way" is the examination's.
_ASIDES = (
    "Oh, ", "Wait, ", "Also, ", "One thing: ", "Before I forget: ", "Just to check: ", "Tell me again: ",
    "Incidentally, ",
    "Now I wonder: ", "And ", "Back to me: ", "Speaking of names and numbers, ", "Another thing, ", "On another note, ",
)  # fmt: skip


def _aside(rng: Random, text: str) -> str:
    """The text as it is said, half of the time, among other things: after a greeting, a courtesy or another thought."""
    if rng.random() < 0.5:
        return text
    if rng.random() < 0.5:
        return polite(rng, text)
    first = text if text.startswith(("I ", "I'm ")) else text[:1].lower() + text[1:]
    return rng.choice(_ASIDES) + first


def memory(rng: Random) -> list[Exchange]:
    """Something the user says about themselves, and the question that needs it."""
    kind, tell, reply, ask, answer = rng.choice(_KINDS)
    value = {
        "name": pick_name,
        "like": lambda r: r.choice(_LIKES),
        "number": lambda r: str(r.randrange(1000)),
        "city": invented_name,
        "word": word,
    }[kind](rng)
    told = _aside(rng, tell.replace("{v}", value))
    if rng.random() < 0.2:
        return [Exchange(f"{told} {ask}", answer.replace("{v}", value), "The user said so just now.", value)]
    return [
        Exchange(told, reply.replace("{v}", value), "The user tells me something. I keep it in mind."),
        Exchange(casual(rng, _aside(rng, ask)), answer.replace("{v}", value), "The user said so before.", value),
    ]
