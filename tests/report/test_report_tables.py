"""The report as text, Markdown and HTML."""

import html.parser

from tfmixed.report.comparison import Comparison
from tfmixed.report.comparison import Row
from tfmixed.report.comparison import Verdict
from tfmixed.report.wording import number
from tfmixed.report.wording import ratio
from tfmixed.report.wording import span

ROWS = (
    Row(
        "float32",
        jit_compile=False,
        accuracy_mean=0.953,
        accuracy_interval=(0.941, 0.965),
        metric_mean=0.953,
        metric_interval=(0.941, 0.965),
        step_ms=485.2,
        step_ms_quartiles=(480.0, 491.0),
        first_step_s=3.21,
        speedup=1.0,
        peak_memory_mb=1303.4,
        memory_ratio=1.0,
        skipped_steps=0,
        trained_steps=192,
    ),
    Row(
        "mixed_bfloat16",
        jit_compile=False,
        memory_note="`build` is defined in a <notebook>",
    ),
)


def comparison(**values):
    return Comparison(
        ROWS,
        Verdict(True, "mixed_bfloat16", ("It is faster: 1 | 2 <b>.",)),
        settings={
            "model": "nets:small_net",
            "data": "nets:load",
            "memory_method": "peak of the meter",
        },
        environment={"cpu": "A & B", "python": "3.11"},
        **values,
    )


def test_text_is_a_table_and_a_verdict():
    assert str(comparison()) == GOLDEN


def test_a_partial_comparison_says_so():
    assert "Verdict (partial: interrupted): use mixed" in str(
        comparison(partial=True)
    )


def test_a_refusal_says_to_stay():
    refusal = Comparison(ROWS, Verdict(False, "float32", ()))
    assert str(refusal).splitlines()[-1] == (
        "Verdict: do not use mixed precision here, stay with float32."
    )


def test_text_fits_a_terminal():
    assert max(map(len, str(comparison()).splitlines())) <= 80


def test_markdown_has_a_cell_for_each_heading():
    lines = comparison().to_markdown().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert {line.replace("\\|", "").count("|") for line in table} == {9}
    assert "| 95.3 % (94.1–96.5) | 485 (480–491) | 1.00 | 1303 |" in table[2]
    assert "| not measured | not measured | not measured |" in table[3]
    assert "| not measurable here | not measurable here |" in table[3]


def test_markdown_escapes_what_would_be_markup():
    text = comparison().to_markdown()
    assert "- It is faster: 1 \\| 2 \\<b\\>." in text
    assert "nets:small\\_net" in text


def test_html_is_whole_and_escaped():
    class Checker(html.parser.HTMLParser):
        opened, rows = [], 0

        def handle_starttag(self, tag, attrs):
            self.rows += tag == "tr"
            if tag not in ("meta", "br"):
                self.opened.append(tag)
            loads = {"src", "href", "rel"} & {name for name, _ in attrs}
            assert not loads, attrs

        def handle_endtag(self, tag):
            assert self.opened.pop() == tag

    page = comparison().to_html()
    checker = Checker()
    checker.feed(page)
    assert checker.opened == []
    assert checker.rows == 3
    assert page.startswith("<!doctype html>")
    assert "1 | 2 &lt;b&gt;." in page
    assert "a &lt;notebook&gt;" in page
    assert "A &amp; B" in page


def test_numbers_have_as_many_digits_as_help():
    assert number(0.95311, True) == "95.3 %"
    assert number(485.4) == "485"
    assert number(2.1449) == "2.14"
    assert number(0.00123456) == "0.00123"
    assert ratio(1.4949) == "1.49"
    assert span((0.94, 0.961), number, True) == "94.0 to 96.1 %"
    assert span((1.0, 2.0), ratio) == "1.00 to 2.00"


GOLDEN = """\
model nets:small_net, data nets:load

                                                      peak
                                 step,             memory,     memory  skipped
 policy         XLA  accuracy       ms speed-up         MB      ratio    steps
 ─────────────────────────────────────────────────────────────────────────────
 float32        no     95.3 %      485     1.00       1303       1.00        0
                    94.1–96.5  480–491                                  of 192
 mixed_bfloat16 no        not      not      not        not        not      not
                     measured measured measured measurable measurable measured
                                                      here       here

accuracy: validation data, mean over seeds and 95 % interval. Step: median and
quartiles, policies in turns. Speed-up: 95 % interval.
Left out of the step time: the first step, with tracing and compilation: float32
3.21 s.
Peak memory: peak of the meter, in a fresh process.
Peak memory is not measurable here for mixed_bfloat16: `build` is defined in a
<notebook>.

Verdict: use mixed_bfloat16 here.
- It is faster: 1 | 2 <b>."""
