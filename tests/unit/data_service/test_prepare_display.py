"""What a person sees of a preparation."""

import io

from rich.console import Console

from phalanx.cli.data_display import PrepareDisplay, print_part, print_report
from phalanx.data.prepare import PartReport, Phase, PrepareReport, Progress
from phalanx.data.prepare.report import SplitSummary


class Clock:
    """Seconds that the test sets."""

    now_s = 100.0

    def __call__(self):
        return self.now_s


def shown(console):
    return console.file.getvalue().splitlines()


def plain_console():
    return Console(file=io.StringIO(), width=200)


def test_display_without_a_terminal_prints_a_line_every_few_seconds_with_rates_and_the_time_left():
    console, clock = plain_console(), Clock()
    with PrepareDisplay(console, clock) as display:
        for second in range(12):
            clock.now_s = 100.0 + second
            # 40 MB of 100 were there already when this start began; 1 MB a second since
            display.observe(Progress(Phase.CHUNKS, 200 * second, (40 + second) * 10**6, 3000 * second, 10**8))
    assert shown(console) == [
        "tokenize: 45.0% of 100.0 MB  200 documents/s  3,000 tokens/s  0:00:55 left",
        "tokenize: 50.0% of 100.0 MB  200 documents/s  3,000 tokens/s  0:00:50 left",
    ]


def test_display_on_a_terminal_shows_a_bar_and_no_lines():
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    with PrepareDisplay(console) as display:
        display.observe(Progress(Phase.TOKENIZER, 10, 50, 0, 100))
        display.observe(Progress(Phase.SHARDS, 0, 100, 0, 100))
    text = console.file.getvalue()
    assert "train tokenizer" in text and "write shards" in text and "left" not in text


def test_display_of_an_empty_input_divides_by_nothing():
    console, clock = plain_console(), Clock()
    with PrepareDisplay(console, clock) as display:
        display.observe(Progress(Phase.CHUNKS, 0, 0, 0, 0))
        clock.now_s += 60
        display.observe(Progress(Phase.CHUNKS, 0, 0, 0, 0))
    assert shown(console) == ["tokenize: 0.0% of 0.0 MB  "]


def test_report_names_what_was_dropped_with_an_example():
    train = SplitSummary("train", "sha256:1", 1, 2, 3, 4)
    counts = {"exact_duplicates": 7, "invalid_utf8": 0}
    report = PrepareReport("file:///d", "sha256:t", 300, 9, 90, counts, train, None, {"exact_duplicates": ("[b]x",)})
    console = plain_console()
    print_report(console, report)
    assert "7 exact duplicates, as '[b]x'" in shown(console) and "invalid" not in console.file.getvalue()


def test_part_report_says_what_comes_next():
    console = plain_console()
    print_part(console, PartReport("file:///d", 2, 3, 10, 4, 4, 5, 6, 7))
    print_part(console, PartReport("file:///d", 2, 3, 10, 4, 0, 0, 0, 0, is_finished=True))
    assert shown(console) == [
        "part 2/3: 4 of its 4 pieces made now (5 documents, 7 tokens); "
        "once all parts are done: phalanx data merge --out file:///d",
        "file:///d is finished already: nothing left to do",
    ]
