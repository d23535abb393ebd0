"""What is frozen: command lines by command and name."""

from dataclasses import dataclass

_AS_THEY_ARE = ("--resize", "none", "--crop", "none")
_INPUTS = {
    "cnn": ("picture.png", *_AS_THEY_ARE),
    "vit": ("picture.png", *_AS_THEY_ARE),
    "unet": ("picture.png", *_AS_THEY_ARE),
    "lstm": ("--input-shape", "2,6,4"),
    "two_inputs": ("--input-shape", "left=2,4", "--input-shape", "right=2,3"),
    "functions": ("picture.png", *_AS_THEY_ARE),
    "dead": ("picture.png", *_AS_THEY_ARE),
    "nan": ("picture.png", *_AS_THEY_ARE),
}
_ON_ANY_NETWORK = ("activations", "grads", "attribute", "attention")
# Where each command writes what it is asked to.
_FILES = {
    **dict.fromkeys(
        ("activations", "grads", "attribute", "attention", "diff", "survey", "history"),
        ("--out", "out/run", "--report", "out/page.html"),
    ),
    "check": ("--report", "out/page.html", "--junit", "out/junit.xml", "--sarif", "out/check.sarif"),
    "layers": ("--csv", "out/layers.csv"),
    "report": ("--out", "out/page.html"),
    "watch": ("--out", "out/run"),
}
_JSON = {"check": ("--format", "json")} | dict.fromkeys(("watch", "models", "report"), ())
# The cases that always run, one for each command: the quickest that says the most.
SAMPLE = (
    *("activations-cnn", "grads-cnn", "attribute-cnn", "attention-vit", "diff-cnn", "survey-cnn", "watch-train"),
    *("history-six", "check-stored", "checkpoint-file", "layers-cnn", "models-resnet", "report-of-gradients"),
    "doctor-machine",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A command line, and command lines that have run before it in the same folder."""

    command: str
    name: str
    arguments: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    files: bool = True  # it is asked for all files that it can write

    @property
    def id(self) -> str:
        return f"{self.command}-{self.name}"

    @property
    def line(self) -> tuple[str, ...]:
        written = _FILES.get(self.command, ()) if self.files else ()
        script = self.command == "watch"  # arguments of the script would follow
        return (self.command, *written, *self.arguments) if script else (self.command, *self.arguments, *written)

    @property
    def json_line(self) -> tuple[str, ...]:
        flags = _JSON.get(self.command, ("--json",))
        return (self.command, *self.arguments, *flags) if flags and self.files else ()


# Networks of which a command says the same as of another: they have no attention, no map, or the layers of `cnn`.
_ALIKE = {
    *(("attention", name) for name in ("unet", "lstm", "two_inputs", "functions", "dead", "nan")),
    *(("attribute", "two_inputs"), ("attribute", "dead"), ("layers", "dead"), ("layers", "nan"), ("diff", "dead")),
}


def _over_networks() -> list[Case]:
    cases = []
    for name, arguments in _INPUTS.items():
        network = f"net.py:{name}"
        cases += [Case(command, name, (network, *arguments)) for command in _ON_ANY_NETWORK]
        cases.append(Case("diff", name, (network, f"{network}_changed", *arguments)))
        shape = arguments if name in {"lstm", "two_inputs"} else ("--input-shape", "1,3,32,32")
        cases.append(Case("layers", name, (network, *shape, "--cost")))
        if name not in {"lstm", "two_inputs"}:
            cases.append(Case("survey", name, (network, "pictures", *_AS_THEY_ARE)))
        cases.append(Case("check", name, (network, *_check_input(arguments))))
    return [case for case in cases if (case.command, case.name) not in _ALIKE]


def _check_input(arguments: tuple[str, ...]) -> tuple[str, ...]:
    return ("--images", *arguments) if arguments[0] == "picture.png" else arguments


def _on_demo() -> list[Case]:
    few = ("demo", "cat.jpg", "--layer", "_blocks.1", "--layer", "_fc")
    return [
        *(Case(command, "demo", few) for command in ("activations", "grads")),
        Case("attribute", "demo", ("demo", "cat.jpg")),
        Case("diff", "demo", ("demo", "same", "cat.jpg", "--edit-b", "_blocks.3._bn1:output:scale(0)")),
        Case("survey", "demo", ("demo", "pictures", "--layer", "/^_blocks.1$/", *_AS_THEY_ARE)),
        Case("check", "demo", ("demo", "--images", "cat.jpg")),
        Case("layers", "demo", ("demo", "--depth", "2")),
    ]


CASES = [
    *_over_networks(),
    *_on_demo(),
    Case("activations", "operations", ("net.py:functions", "picture.png", *_AS_THEY_ARE, "--ops")),
    Case("activations", "no-such-layer", ("net.py:cnn", "picture.png", "--layer", "nothing")),
    Case(
        "grads",
        "labelled",
        ("net.py:cnn", "picture.png", *_AS_THEY_ARE, "--loss", "ce", "--target", "3", "--per-image"),
    ),
    Case("attention", "rollout", ("net.py:vit", "picture.png", *_AS_THEY_ARE, "--rollout", "--query", "mean")),
    Case(
        "diff", "gradients", ("net.py:cnn", "net.py:cnn_changed", "picture.png", *_AS_THEY_ARE, "--grads", "--shadow")
    ),
    Case("survey", "labelled", ("net.py:cnn", "labelled", "--by-class", "--classes", "classes.txt", *_AS_THEY_ARE)),
    Case("history", "six", ("ckpt",)),
    Case("history", "judged-by-all-rules", ("ckpt", "pictures/0*.png", "--arch", "net.py:cnn", *_AS_THEY_ARE)),
    Case("history", "bisect", ("ckpt", "--bisect")),
    Case("check", "stored", ("ckpt/epoch1.pt",)),
    Case("check", "six", ("ckpt/*.pt", "--arch", "net.py:cnn", "--key", "model", "--input-shape", "2,3,16,16")),
    Case(
        "check",
        "labelled",
        ("plain.safetensors", "--arch", "net.py:cnn", "--data", "labelled", "--classes", "classes.txt"),
    ),
    Case("check", "cut", ("cut.pt",)),
    *(
        Case("check", form, ("ckpt/epoch5.pt", "plain.safetensors", "--format", form), files=False)
        for form in ("github", "markdown")
    ),
    Case("check", "rules", ("--rules",), files=False),
    Case("check", "explain", ("--explain", "dead-channels"), files=False),
    Case("checkpoint", "file", ("ckpt/epoch1.pt",)),
    *(
        Case("checkpoint", name, (name,))
        for name in ("ckpt/epoch5.pt", "plain.safetensors", "cut.pt", "code.pkl", "text.json", "missing.pt")
    ),
    *(Case("watch", name, ("--every", "10", f"{name}.py")) for name in ("train", "train_nan", "train_dead", "fails")),
    *(
        Case("models", name, (pattern,))
        for name, pattern in {"resnet": "resnet*", "none": "nosuch", "demo": "demo"}.items()
    ),
    *(
        Case("report", name, ("run",), ((*line, "--out", "run"),))
        for name, line in {
            "of-gradients": ("grads", "net.py:cnn", *_INPUTS["cnn"]),
            "of-attribution": ("attribute", "net.py:cnn", *_INPUTS["cnn"]),
            "of-diff": ("diff", "net.py:cnn", "net.py:cnn_changed", *_INPUTS["cnn"]),
            "of-history": ("history", "ckpt"),
        }.items()
    ),
    *(
        Case("report", f"of-{name}", ("run",), (("watch", "--every", "10", "--out", "run", f"{name}.py"),))
        for name in ("train", "train_nan", "train_dead")
    ),
    Case("report", "nothing", ("missing",)),
    Case("doctor", "machine", ()),
]
COMMANDS = list(dict.fromkeys(case.command for case in CASES))
