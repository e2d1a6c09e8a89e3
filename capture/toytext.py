"""Templated conversations about sums, small programs and everyday questions: what the toy reads.

Everything here was written for this project. Rows come out the same on every machine. A prompt is
held out by its own hash, so no count or seed can put one prompt on both sides.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

Messages = list[dict[str, str]]
Exchange = tuple[str, str]
Split = Literal["train", "eval"]

DOMAINS = ("math", "code", "chat")
_HELDOUT_ONE_IN = 8

_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Edith", "Felix", "Greta", "Hugo", "Iris", "Jon")
GOODS = (
    "apples", "buttons", "candles", "marbles", "pencils", "plums", "ribbons", "shells", "stamps",
    "stickers",
)  # fmt: skip


def is_heldout(prompt: str) -> bool:
    """Whether a first prompt belongs to the evaluation side."""
    return zlib.crc32(prompt.encode()) % _HELDOUT_ONE_IN == 0


# ---- math --------------------------------------------------------------------------------------


def _price(draw: random.Random) -> Exchange:
    name, goods = draw.choice(_NAMES), draw.choice(GOODS)
    number, price = draw.randint(2, 9), draw.randint(2, 9)
    total = number * price
    ask = draw.choice(("How many coins is that?", "How much does it cost in all?"))
    return (
        f"{name} buys {number} {goods} at {price} coins each. {ask}",
        f"Every one of the {goods} has the same price, so multiply the price by the number "
        f"of pieces.\n{price} * {number} = {total}\nThe answer is {total}.",
    )


def _change(draw: random.Random) -> Exchange:
    name, goods = draw.choice(_NAMES), draw.choice(GOODS)
    start, found = draw.randint(5, 40), draw.randint(2, 9)
    lost = draw.randint(1, 9)
    between = start + found
    if between <= lost:
        lost = 1
    rest = between - lost
    ask = draw.choice(("How many are left?", "How many remain at the end?"))
    return (
        f"{name} has {start} {goods}, finds {found} more and then loses {lost}. {ask}",
        f"First add the {goods} that came in, then take away the ones that went out.\n"
        f"{start} + {found} = {between}\n{between} - {lost} = {rest}\nThe answer is {rest}.",
    )


def _share(draw: random.Random) -> Exchange:
    name, goods = draw.choice(_NAMES), draw.choice(GOODS)
    friends, each = draw.randint(2, 9), draw.randint(2, 9)
    total = friends * each
    ask = draw.choice(("How many does each friend get?", "What is the share of one friend?"))
    return (
        f"{name} shares {total} {goods} equally among {friends} friends. {ask}",
        f"Equal shares mean that the {goods} are divided by the number of friends.\n"
        f"{total} / {friends} = {each}\nThe answer is {each}.",
    )


def _clock(draw: random.Random) -> Exchange:
    vehicle = draw.choice(("train", "bus", "ferry", "coach"))
    start, hours = draw.randint(1, 12), draw.randint(2, 9)
    town = draw.choice(("Bergen", "Cork", "Delft", "Graz", "Lyon", "Turin"))
    return (
        f"The {vehicle} to {town} leaves at {start} and travels for {hours} hours. "
        "When does it arrive?",
        f"The time of arrival is the time of departure plus the hours on the road.\n"
        f"{start} + {hours} = {start + hours}\nThe answer is {start + hours}.",
    )


# ---- code --------------------------------------------------------------------------------------

_POLITE = ("Write", "Please write", "Show me")


def _code(prompt: str, lines: Sequence[str], remark: str) -> Exchange:
    return prompt, "```python\n" + "\n".join(lines) + f"\n```\n{remark}"


def _arithmetic(draw: random.Random) -> Exchange:
    verb, preposition, sign, remark = draw.choice((
        ("adds", "to", "+", "The result is larger than the argument."),
        ("subtracts", "from", "-", "The result is smaller than the argument."),
    ))  # fmt: skip
    number = draw.randint(2, 99)
    return _code(
        f"{draw.choice(_POLITE)} a Python function that {verb} {number} {preposition} its "
        "argument.",
        (
            f"def {verb[:-1]}_number(value: int) -> int:",
            f'    """Return the value {"plus" if sign == "+" else "minus"} {number}."""',
            f"    return value {sign} {number}",
        ),
        f"It works for every whole number. {remark}",
    )


def _filter(draw: random.Random) -> Exchange:
    name, sign = draw.choice((("above", ">"), ("below", "<")))
    number = draw.randint(2, 99)
    return _code(
        f"{draw.choice(_POLITE)} a Python function that keeps the items of a list {name} {number}.",
        (
            f"def keep_{name}(items: list[int]) -> list[int]:",
            f'    """Drop every item that is not {name} {number}."""',
            f"    return [item for item in items if item {sign} {number}]",
        ),
        "The order stays as it was, and the list that was passed in is not changed.",
    )


_LETTER_TESTS = (
    ("digits", "letter.isdigit()"),
    ("capitals", "letter.isupper()"),
    ("spaces", "letter.isspace()"),
    ("vowels", 'letter in "aeiou"'),
)


def _count(draw: random.Random) -> Exchange:
    what, test = draw.choice(_LETTER_TESTS)
    holder, kind = draw.choice((
        ("line", "first"), ("title", "only"), ("word", "last"), ("poem", "whole"), ("name", "full"),
        ("letter", "long"), ("message", "short"),
    ))  # fmt: skip
    ending = draw.choice(("", " Keep it short.", " Use one line.", " Use sum."))
    return _code(
        f"{draw.choice(_POLITE)} a Python function that counts the {what} in the {kind} {holder}."
        f"{ending}",
        (
            f"def count_{what}(text: str) -> int:",
            f'    """How many {what} the {holder} holds."""',
            f"    return sum({test} for letter in text)",
        ),
        "A test is true or false, and sum counts each true one as 1.",
    )


def _loop(draw: random.Random) -> Exchange:
    what, expression = draw.choice((
        ("squares", "number ** 2"), ("doubles", "number * 2"), ("halves", "number / 2"),
    ))  # fmt: skip
    stop = draw.randint(3, 99)
    return _code(
        f"{draw.choice(_POLITE)} a Python loop that prints the {what} of all numbers below {stop}.",
        (f"for number in range({stop}):", f"    print({expression})"),
        "The loop begins at zero and ends one step before the limit.",
    )


# ---- chat --------------------------------------------------------------------------------------

_PLACES = {
    "at the harbour": "watch the boats come in and smell the tar",
    "at the lake": "rent a small boat and row to the far shore",
    "at the market": "taste the cheese and talk with the sellers",
    "at the museum": "join the free tour and draw what you like best",
    "in the forest": "follow the marked path and listen for birds",
    "in the mountains": "take the first lift and walk along the ridge",
    "in the old town": "climb the tower and count the red roofs",
    "in the park": "feed the ducks, then play a round of chess",
}
_WEATHERS = {
    "cold": ("hot soup", "warm your hands at a fire"),
    "foggy": ("sweet tea", "tell each other ghost stories"),
    "hot": ("ice cream", "cool your feet in a fountain"),
    "rainy": ("fresh waffles", "dry your coats and play cards"),
    "sunny": ("a picnic", "stay outside until the stars appear"),
    "windy": ("roast chestnuts", "fly a kite before it gets dark"),
}
_COMPANY = ("my brother", "my children", "my parents", "a friend", "two cousins")
_DAYS = ("Monday", "Friday", "Saturday", "Sunday")


def _plan(draw: random.Random) -> Exchange:
    place, weather = draw.choice(tuple(_PLACES)), draw.choice(tuple(_WEATHERS))
    company, day = draw.choice(_COMPANY), draw.choice(_DAYS)
    food, evening = _WEATHERS[weather]
    return (
        f"What can I do with {company} {place} on a {weather} {day}?",
        f"Start early in the morning and {_PLACES[place]}. At noon, {food} will make everyone "
        f"happy. Later, {evening}. It will be a day to remember!",
    )


_HOBBIES = {
    "baking": ("a set of round tins", "the kitchen will soon smell of cake"),
    "chess": ("a book of famous games", "every page holds a new surprise"),
    "cycling": ("a bright front lamp", "the way home is safer at night"),
    "drawing": ("a box of soft chalk", "no two sheets will look the same"),
    "fishing": ("a folding stool", "waiting is easier when one can sit"),
    "gardening": ("a pair of strong gloves", "roses have thorns in every season"),
    "hiking": ("a light rain jacket", "clouds come quickly in the hills"),
    "knitting": ("a basket of blue wool", "the winter is long and scarves are warm"),
    "music": ("two concert tickets", "songs sound best when they are shared"),
    "reading": ("a small lamp for the bed", "good stories never end before midnight"),
}
_PEOPLE = ("aunt", "uncle", "sister", "neighbour", "teacher", "grandfather", "doctor", "colleague")


def _present(draw: random.Random) -> Exchange:
    hobby, person = draw.choice(tuple(_HOBBIES)), draw.choice(_PEOPLE)
    gift, reason = _HOBBIES[hobby]
    event = draw.choice(("birthday", "wedding", "retirement", "first visit", "farewell"))
    return (
        f"My {person} loves {hobby}. What is a good present for the {event}?",
        f"How about {gift}? That is not expensive, and {reason}. "
        "Wrap it in plain paper and add a short note in your own hand.",
    )


_ANIMALS = {
    "badger": ("digs long tunnels", "under old trees", "worms and fallen fruit"),
    "beaver": ("cuts down young trees", "in slow rivers", "bark and water plants"),
    "crane": ("dances to greet its mate", "in wide wetlands", "grain and beetles"),
    "hedgehog": ("rolls into a ball when afraid", "under hedges", "snails and beetles"),
    "lynx": ("hunts alone and without a sound", "in northern forests", "hares and young deer"),
    "otter": ("floats on its back to rest", "along clean rivers", "fish and crayfish"),
    "owl": ("turns its head almost all the way round", "in quiet barns", "mice and voles"),
    "seal": ("sleeps in the water like a cork", "on rocky coasts", "herring and squid"),
    "stork": ("carries sticks to the same nest each year", "on high chimneys", "frogs and mice"),
    "toad": ("hides from the sun all day", "in damp gardens", "slugs and flies"),
}
_AGES = ("six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def _animal(draw: random.Random) -> Exchange:
    animal = draw.choice(tuple(_ANIMALS))
    habit, home, food = _ANIMALS[animal]
    age, event = draw.choice(_AGES), draw.choice(("class", "club", "group", "choir", "team"))
    return (
        f"Explain the {animal} to a {event} of children aged {age}.",
        f"Have you ever seen this animal? It lives {home}, where few people pass by. "
        f"It eats {food}, and it {habit}. Please look at it from afar and leave it in peace!",
    )


_FOLLOW_UPS = (
    (
        "Thank you! Is there anything I should avoid?",
        "Do not hurry. The best part is often the one that nobody planned.",
    ),
    (
        "That sounds nice. Can you say it in one sentence?",
        "Keep it simple, be kind, and enjoy the moment.",
    ),
)

_KINDS: dict[str, tuple[Callable[[random.Random], Exchange], ...]] = {
    "math": (_price, _change, _share, _clock),
    "code": (_arithmetic, _filter, _count, _loop),
    "chat": (_plan, _present, _animal),
}
_FOLLOWED_SHARE = 0.15


def conversations(domain: str, split: Split, seed: int) -> Iterator[Messages]:
    """Endless answered conversations of one domain; a first prompt may come up again.

    Some training chats have a second turn; evaluation prompts have one.
    """
    draw = random.Random(f"{domain} {split} {seed}")
    while True:
        kind = draw.choice(_KINDS[domain])
        exchanges = [kind(draw)]
        if domain == "chat" and split == "train" and draw.random() < _FOLLOWED_SHARE:
            exchanges.append(draw.choice(_FOLLOW_UPS))
        if is_heldout(exchanges[0][0]) == (split == "eval"):
            yield [
                {"role": role, "content": content}
                for exchange in exchanges
                for role, content in zip(("user", "assistant"), exchange, strict=True)
            ]


def rows(domain: str, split: Split, count: int, seed: int) -> list[dict[str, object]]:
    """`count` rows for a JSONL file: id, domain and messages up to the last user turn.

    First prompts differ. Raises ValueError when the templates hold fewer than `count` of them.
    """
    found: dict[str, Messages] = {}
    for tries, messages in enumerate(conversations(domain, split, seed)):
        found.setdefault(messages[0]["content"], messages[:-1])
        if len(found) == count:
            break
        if tries > 1000 + 100 * count:
            raise ValueError(
                f"the {domain} templates gave {len(found)} different {split} prompts, "
                f"{count} were asked for: ask for fewer"
            )
    return [
        {"id": f"toy-{domain}-{split}-{number}", "domain": domain, "messages": messages}
        for number, messages in enumerate(found.values())
    ]
