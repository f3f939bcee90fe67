"""Words of which tests make texts."""

WORDS = (
    "the",
    "line",
    "holds",
    "when",
    "one",
    "falls",
    "the",
    "next",
    "steps",
    "forward",
    "and",
    "all",
    "move",
    "as",
    "one",
)
