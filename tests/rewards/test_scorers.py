r"""The scorers against a table of answers as models write them, each with its right value.

The values are what the data sets' own conventions say: GSM8K's `####` line, MATH's last \boxed{}, DAPO's `Answer:`.
"""

import pytest

from jaxrl_ppo.rewards import methods  # noqa: F401 - registers all scorers
from jaxrl_ppo.rewards.math_answers import last_boxed
from jaxrl_ppo.rewards.scorers import find_scorer, score_by_source

GSM8K_STRICT = [
    ("She sells 9 eggs.\n#### 18", "18", 1),
    ("#### 18.", "18", 1),
    ("#### $18", "18", 1),
    ("#### 18.00", "18", 1),
    ("####18", "18", 1),
    ("#### 18 dollars", "18", 1),
    ("#### **18**", "18", 1),
    ("#### \\$18", "18", 1),
    ("#### \\(18\\)", "18", 1),
    ("#### 1,080", "1080", 1),
    ("#### 1080", "1,080", 1),
    ("#### 12,345,678", "12345678", 1),
    ("#### -5", "-5", 1),
    ("#### \u22125", "-5", 1),
    ("#### 0.5", "0.5", 1),
    ("#### 1/2", "0.5", 1),
    ("#### 3/4", "3", 0),
    ("#### 50%", "50", 1),
    ("#### 18\n#### 20", "20", 1),
    ("#### 18\n#### 20", "18", 0),
    ("#### 18 or 20", "20", 0),
    ("#### eighteen", "18", 0),
    ("The answer is 18.", "18", 0),
    ("####", "18", 0),
    ("", "18", 0),
    ("#### 180", "18", 0),
    ("#### 1.8", "18", 0),
    ("#### 18 " + "and so on " * 20_000, "18", 1),
    ("x" * 200_000, "18", 0),
]

GSM8K_FLEXIBLE = [
    ("The answer is 18.", "18", 1),
    ("He pays $1,250.50 in all.", "1250.5", 1),
    ("So 3 + 4 = 7, not 8", "7", 0),
    ("That leaves 7 apples (and 2 pears)", "2", 1),
    ("Room 3B is the answer", "3", 1),
    ("-3 degrees", "-3", 1),
    ("no number", "18", 0),
    ("\\boxed{42}", "42", 1),
]

MATH = [
    # plain numbers
    (r"So the answer is $\boxed{18}$.", "18", 1),
    (r"\boxed{18}", "19", 0),
    (r"\boxed 7", "7", 1),
    (r"\fbox{7}", "7", 1),
    (r"\boxed{-3}", "-3", 1),
    (r"\boxed{3}", "-3", 0),
    (r"\boxed{1,000}", "1000", 1),
    (r"\boxed{12{,}345}", "12345", 1),
    (r"\boxed{0.50}", "0.5", 1),
    (r"\boxed{.5}", r"\frac{1}{2}", 1),
    # fractions
    (r"\boxed{\frac{3}{4}}", r"\frac34", 1),
    (r"\boxed{\dfrac{3}{4}}", r"\frac{3}{4}", 1),
    (r"\boxed{3/4}", r"\frac{3}{4}", 1),
    (r"\boxed{\frac{6}{8}}", r"\frac{3}{4}", 1),
    (r"\boxed{-\frac{2}{3}}", r"\frac{-2}{3}", 1),
    (r"\boxed{1\frac{1}{2}}", r"\frac{3}{2}", 1),
    (r"\boxed{0.33}", r"\frac{1}{3}", 0),
    (r"\boxed{\frac{4}{3}}", r"\frac{3}{4}", 0),
    # roots, powers, constants
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
    (r"\boxed{11\sqrt2}", r"11\sqrt{2}", 1),
    (r"\boxed{2^{10}}", "1024", 1),
    (r"\boxed{3.14}", r"\pi", 0),
    (r"\boxed{\frac{\pi}{2}}", r"\pi/2", 1),
    # units, currency, per cent, degrees
    (r"\boxed{5 \text{ cm}}", "5", 1),
    (r"\boxed{\$18.90}", "18.90", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{50\%}", r"50\%", 1),
    (r"\boxed{0.5}", r"50\%", 1),
    (r"\boxed{5}", r"50\%", 0),
    # expressions and equations
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
    (r"\boxed{-q+p}", "p - q", 1),
    (r"\boxed{x = 5}", "5", 1),
    (r"\boxed{5}", "x=5", 1),
    (r"\boxed{y = 2x + 1}", "y=2x+1", 1),
    (r"\boxed{y = 2x - 1}", "y=2x+1", 0),
    # intervals, tuples, sets, matrices
    (r"\boxed{(3, \infty)}", r"(3,\infty)", 1),
    (r"\boxed{[0,1]}", "[0,1)", 0),
    (r"\boxed{(-\infty, 2) \cup (3, \infty)}", r"(-\infty,2)\cup(3,\infty)", 1),
    (r"\boxed{(1, 2)}", "(1,2)", 1),
    (r"\boxed{(2, 1)}", "(1,2)", 0),
    (r"\boxed{3, 1, 2}", "1,2,3", 1),
    (r"\boxed{1, 2}", "1,2,3", 0),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1),
    (r"\boxed{1 \pm \sqrt{2}}", r"1+\sqrt{2}, 1-\sqrt{2}", 1),
    (r"\boxed{\begin{bmatrix} 1 \\ 2 \end{bmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\boxed{\left( \frac{1}{2}, -3 \right)}", r"\left(\frac12,-3\right)", 1),
    # words and letters
    (r"\boxed{\text{(C)}}", "C", 1),
    (r"\boxed{C}", r"\text{(C)}", 1),
    (r"\boxed{D}", r"\text{(C)}", 0),
    (r"\boxed{\text{Evelyn}}", "Evelyn", 1),
    (r"\boxed{even}", r"\text{odd}", 0),
    # which box, and none
    (r"First \boxed{3}, but really \boxed{4}.", "4", 1),
    (r"First \boxed{3}, but really \boxed{4}.", "3", 0),
    (r"\boxed{3} and then \boxed{4", "3", 1),
    ("The answer is 18.", "18", 0),
    (r"\boxed{}", "18", 0),
    ("", "18", 0),
    (r"\boxed{5}", "", 0),
    (r"\boxed{\boxed{5}}", "5", 1),
    ("x " * 100_000 + r"\boxed{5}", "5", 1),
    (r"\boxed{" + "9" * 100_000 + "}", "5", 0),
    (r"\boxed{" * 2000 + "5" + "}" * 2000, "5", 1),
]

DAPO = [
    ("Thus.\nAnswer: 42", "42", 1),
    ("**Answer: 42**", "42", 1),
    ("Answer: $42$", "42", 1),
    ("answer : \\boxed{42}.", "42", 1),
    ("Answer: 41\nNo.\nAnswer: 42", "42", 1),
    ("Answer: 42\nNo.\nAnswer: 41", "42", -1),
    ("The result is 42", "42", -1),
    ("", "42", -1),
    ("Answer: \\frac{84}{2}", "42", 1),
]

ARITHMETIC = [
    ("14", "14", 1),
    ("3 + 11 = 14.", "14", 1),
    ("14, since 3 + 11", "14", 0),
    ("-4", "4", 0),
    ("-4", "-4", 1),
    ("It is fourteen", "14", 0),
    ("", "14", 0),
    ("1 4", "14", 0),
    ("0014", "14", 1),
]


def numbered(table):
    """Parameters named by number: some answers are too long for a name."""
    return [pytest.param(*row, id=str(number)) for number, row in enumerate(table)]


@pytest.mark.parametrize(("answer", "truth", "score"), numbered(GSM8K_STRICT))
def test_gsm8k_strict(answer, truth, score):
    assert score_by_source("openai/gsm8k", answer, truth, {}) == score


@pytest.mark.parametrize(("answer", "truth", "score"), numbered(GSM8K_FLEXIBLE))
def test_gsm8k_flexible(answer, truth, score):
    assert score_by_source("openai/gsm8k", answer, truth, {}, method="flexible") == score


def test_gsm8k_format_score_and_unknown_method():
    assert score_by_source("gsm8k", "#### 3", "4", {}, format_score=0.1) == 0.1
    assert score_by_source("gsm8k", "#### x", "4", {}, format_score=0.1) == 0
    with pytest.raises(ValueError, match="method='loose' is neither strict nor flexible"):
        score_by_source("gsm8k", "#### 3", "4", {}, method="loose")


@pytest.mark.parametrize(("answer", "truth", "score"), numbered(MATH))
def test_math(answer, truth, score):
    assert score_by_source("DigitalLearningGmbH/MATH-lighteval", answer, truth, {}) == score


@pytest.mark.parametrize(("answer", "truth", "score"), numbered(DAPO))
def test_dapo_math(answer, truth, score):
    result = score_by_source("math_dapo", answer, truth, {})
    assert (result["score"], result["acc"]) == (score, score == 1)


@pytest.mark.parametrize(("answer", "truth", "score"), numbered(ARITHMETIC))
def test_arithmetic(answer, truth, score):
    assert score_by_source("arithmetic", answer, truth, {}) == score


def test_boxes():
    assert last_boxed(r"\boxed{a_{1}\{} b}") == r"a_{1}\{"
    assert last_boxed(r"\boxed{\frac{1}{2}} then \boxed{x") == r"\frac{1}{2}"
    assert last_boxed("none") is None


def test_sources():
    assert find_scorer("aime_2024") is find_scorer("aime25") is find_scorer("math_dapo")
    assert find_scorer("unheard of") is None
    with pytest.raises(LookupError, match="no scorer for data_source 'unheard of'"):
        score_by_source("unheard of", "1", "1", {})
