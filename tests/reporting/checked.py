"""Hand-made reports on checkpoints that the tests of every renderer of `hookscope check` show."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from hookscope.results.accuracy import Accuracy, ClassAccuracy, WrongPicture
from hookscope.results.check import CheckReport, Finding, RuleOutcome
from hookscope.results.inputs import InputRecord
from hookscope.results.network import ModelInfo

MODEL = ModelInfo("resnet18", "ResNet", "models/good.pt", False, "b627a593" * 8, 11_689_512, arguments={"width": 2})

INPUTS = (
    InputRecord("cat.jpg", "0123abcd" * 8, (640, 480), (3, 224, 224), ("resize 256", "crop 224x224")),
    InputRecord("dog.jpg", "4567cdef" * 8, (640, 480), (3, 224, 224), ("resize 256", "crop 224x224")),
)

LONG_NAME = "encoder.layers.encoder_layer_11.self_attention.out_proj.parametrizations.weight.original0"

# What a stranger may call a layer or a file, and what it would do where it is not taken for text.
HOSTILE_NAMES = (
    "x\n::error::pwned",
    "::set-output name=a::b",
    " ::add-mask::secret",
    "##[error]pwned",
    "a\r::stop-commands::b%0A::error::c",
    "a,file=b:c=d%2C%3A%25",
    "=cmd|' /C calc'!A0",
    "\x1b[31mred\x1b[0m",
    "[bold]rich[/bold] :smile:",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[link](https://example.com)",
    "![picture](https://example.com/a.png)",
    "https://example.com/a_b www.example.com me@example.com @octocat #12 GH-12",
    "`code` ``more`` ```fence",
    "`",
    "a|b\\|c\\",
    "**bold** __bold__ *it* _it_ ~~gone~~ $x^2$ &lt;&#64;",
    "]]></failure><error/>",
    '"quoted" & <amp;',
    "- item\n# heading\n> quote\n---\n| a |\n|---|",
    "nul\x00 bell\x07 \ud800 \udfff \ufffe \uffff",
    "\u202egnp.exe \u200b\u2028\u2029\x85",
    "é 层 🦊",
    "   ",
)


def outcome(rule: str, *findings: Finding) -> RuleOutcome:
    """Return a rule that finds something, or passes."""
    levels = {finding.level for finding in findings}
    return RuleOutcome(rule, "fail" if "fail" in levels else "warn" if levels else "pass", findings)


PASSING = CheckReport(
    checkpoint="models/good.pt",
    outcomes=(
        outcome("integrity"),
        outcome("architecture"),
        outcome("non-finite-parameter"),
        RuleOutcome("unused-parameter", "off"),
    ),
    model=MODEL,
    inputs=INPUTS,
    seconds={"load": 0.25, "forward": 1.0, "total": 1.5},
)

SKIPPING = replace(
    PASSING,
    checkpoint="models/skipping.pt",
    outcomes=(
        outcome("integrity"),
        RuleOutcome("expectation", "skipped", reason="No expectation is configured."),
        RuleOutcome("drift", "skipped", reason="No baseline was given."),
        RuleOutcome("zero-gradient", "off"),
    ),
)

WARNED = replace(
    PASSING,
    checkpoint="models/warned.pt",
    outcomes=(
        outcome("integrity"),
        outcome(
            "dead-channels",
            Finding(
                "dead-channels", "warn", "layer2.0.relu#1", "12 of 128 channels are zero over 2 inputs (limit 5%)."
            ),
        ),
    ),
    warnings=("Only 2 inputs were given.",),
)

FAILED = replace(
    PASSING,
    checkpoint="models/broken.pt",
    outcomes=(
        outcome("integrity"),
        outcome(
            "batchnorm-variance",
            Finding(
                "batchnorm-variance", "fail", "layer1.0.bn1.running_var", "3 of 64 variances are below zero: -0.5."
            ),
            Finding("batchnorm-variance", "fail", "bn1.running_var", "1 of 64 variances is zero (limit: above 0)."),
        ),
        outcome(
            "dead-channels",
            Finding("dead-channels", "fail", "layer1.0.relu", "64 of 64 channels are zero over 2 inputs (limit 50%)."),
            Finding("dead-channels", "warn", LONG_NAME, "9 of 64 channels are zero over 2 inputs (limit 5%)."),
        ),
        RuleOutcome("drift", "skipped", reason="No baseline was given."),
    ),
    evidence="evidence/models-broken.pt",
)

ALL_SKIPPED = tuple(
    RuleOutcome(rule, "skipped", reason="The file could not be read.")
    for rule in ("architecture", "non-finite-parameter", "forward", "dead-channels", "drift")
)

CORRUPT_TEXT = "models/corrupt.pt is cut off: its archive has no end. Save it again."
CORRUPT = CheckReport(
    "models/corrupt.pt",
    (outcome("integrity", Finding("integrity", "fail", "", CORRUPT_TEXT)), *ALL_SKIPPED),
    error=CORRUPT_TEXT,
    error_code=3,
    seconds={"total": 0.125},
)

UNTRUSTED_TEXT = "models/pickle.pt would run code when it is read: os.system. Use --trust if you trust it."
UNTRUSTED = CheckReport(
    "models/pickle.pt",
    (outcome("integrity", Finding("integrity", "fail", "", UNTRUSTED_TEXT)), *ALL_SKIPPED),
    error=UNTRUSTED_TEXT,
    error_code=4,
    seconds={"total": 0.125},
)

KILLED = CheckReport(
    "models/huge.pt",
    tuple(replace(each, reason="Its worker was killed.") for each in ALL_SKIPPED),
    error="The worker was killed by signal 9 (SIGKILL) at its memory limit of 4 GiB. Raise --memory.",
    error_code=3,
    seconds={"total": 7.5},
)

RAISED = CheckReport(
    "net.py:build",
    (outcome("integrity"), *(replace(each, reason="The network could not be built.") for each in ALL_SKIPPED)),
    error="net.py:build raised ValueError: width must be above 0.",
    error_code=6,
    seconds={"total": 0.5},
)

MANY = replace(
    PASSING,
    checkpoint="models/many.pt",
    outcomes=(
        outcome(
            "dead-filter",
            *(
                Finding(
                    "dead-filter", "fail" if n % 2 else "warn", f"blocks.{n}.weight", f"{n} of 2000 filters are zero."
                )
                for n in range(1000)
            ),
        ),
    ),
)


LABELLED = replace(
    PASSING,
    checkpoint="models/labelled.pt",
    accuracy=Accuracy(
        "val",
        "labels are names of classes",
        3,
        20,
        15,
        (ClassAccuracy("cat", (0,), 12, 12), ClassAccuracy("lynx", (1,), 8, 3, "cat", 4)),
        (
            WrongPicture("val/lynx/3.jpg", "89ab" * 16, "lynx", "cat", 0.96, 0.02),
            WrongPicture("val/lynx/5.jpg", "cdef" * 16, "lynx", "NaN", None, None),
        ),
    ),
)
"""15 of 20 are right."""


def hostile(name: str) -> CheckReport:
    """Return a report that says `name` wherever something of unknown origin can stand."""
    findings = (Finding("forward", "fail", name, f"It says: {name}."), Finding("forward", "warn", name, name))
    return CheckReport(
        name,
        (outcome("forward", *findings), RuleOutcome("drift", "skipped", reason=name)),
        model=replace(MODEL, name=name, kind=name, weights=name, arguments={"width": name}),
        inputs=(replace(INPUTS[0], name=name),),
        error=f"Error: {name}",
        error_code=6,
        warnings=(name, f"Warning: {name}"),
        seconds={"total": 1.0},
        evidence=name,
        accuracy=Accuracy(
            name,
            name,
            3,
            4,
            2,
            (ClassAccuracy(name, (0,), 3, 1, name, 2), ClassAccuracy("other", (1,), 1, 1)),
            (WrongPicture(name, name, name, name, 0.5, 0.25),),
        ),
    )


# All code points, lone surrogates included, which `st.text()` leaves out.
anything = st.text(st.characters(exclude_categories=[]), max_size=60)

HOSTILE: Sequence[CheckReport] = tuple(map(hostile, HOSTILE_NAMES))

EVERY: Sequence[CheckReport] = (PASSING, SKIPPING, WARNED, FAILED, CORRUPT, UNTRUSTED, KILLED, RAISED, MANY)
