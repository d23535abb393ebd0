"""The published JSON schemas are those of the results, and what commands print and write fits them, key by key."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.numpy import load_file

from docs.schemas import documents
from hookscope.commands.watch.training_log import FILE, TrainingLogFile
from hookscope.text import strict_json
from tests.cli.conftest import CAT, Run, without_arrays
from tests.docs.pages import DOCS
from tests.reporting.trained import train

SCHEMAS = documents()


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_published_schemas_are_those_of_the_results(name: str, request: pytest.FixtureRequest) -> None:
    path = DOCS / "schemas" / f"{name}.json"
    text = json.dumps(SCHEMAS[name], indent=1, ensure_ascii=False) + "\n"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "run with --update-golden, and read the difference"
    Draft202012Validator.check_schema(SCHEMAS[name])


def closed(schema: Any) -> Any:
    """Return a schema that allows no key that it does not name."""
    if isinstance(schema, list):
        return list(map(closed, schema))
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    return inner | ({"additionalProperties": False} if "properties" in inner and "type" in inner else {})


def check(name: str, text: str | bytes) -> dict[str, Any]:
    """Hold a document against the schema of that name, in which every key of it must stand."""
    document: dict[str, Any] = json.loads(text)
    errors = Draft202012Validator(closed(SCHEMAS[name])).iter_errors(document)
    assert "\n".join(f"{error.json_path}: {error.message[:200]}" for error in errors) == ""
    return document


def check_run(folder: Path) -> dict[str, Any]:
    """Hold both documents of a run against their schemas; return its result, whose arrays lie beside it."""
    record = check("run", (folder / "run.json").read_bytes())
    result = check(record["verb"], (folder / "result.json").read_bytes())
    arrays = folder / "arrays.safetensors"
    assert {*own_places(result)} == {*(load_file(arrays) if arrays.exists() else ())}
    return result


def own_places(part: Any, at: str = "") -> Iterator[str]:
    """Yield the texts of a document that are their own place, as the names of arrays are."""
    if isinstance(part, dict | list):
        for name, entry in part.items() if isinstance(part, dict) else enumerate(part):
            yield from own_places(entry, f"{at}.{name}".removeprefix("."))
    elif part == at:
        yield at


def test_activations(run: Run, tmp_path: Path) -> None:
    edit = ("--edit", "0:output:zero")
    ended = run("activations", "net.py:tiny", CAT, "--resize", "32", "--crop", "32", "--ops", *edit, "--json")
    document = check("activations", ended.stdout)
    assert document["rows"]
    assert document == without_arrays(check_run(tmp_path / document["run"])) | {"run": document["run"]}


def test_a_run_with_a_loss_that_is_no_number(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text("def bad(output):\n    return (output * float('nan')).sum()\n", encoding="utf-8")
    shape = ("--input-shape", "2,3,16,16")
    ended = run("grads", "net.py:tiny", *shape, "--loss", "loss.py:bad", "--inputs", "--json", "--no-verify")
    assert ended.code in (0, 6), ended.stderr
    assert check("grads", ended.stdout)["loss"]["value"] == "NaN"


def test_grads(run: Run, tmp_path: Path) -> None:
    ended = run("grads", "net.py:tiny", CAT, "--resize", "32", "--crop", "32", "--per-image", "--json")
    document = check("grads", ended.stdout)
    assert document["inputs_alone"]
    check_run(tmp_path / document["run"])


@pytest.mark.exhaustive
def test_attribute(run: Run, tmp_path: Path) -> None:
    document = check("attribute", run("attribute", "demo", CAT, "--json").stdout)
    assert document["maps"]
    assert document["sanity"]
    check_run(tmp_path / document["run"])


@pytest.mark.exhaustive
def test_attention(run: Run, tmp_path: Path) -> None:
    source = (
        "from tests.commands.attention.small_networks import SmallTransformer as S\n\n\ndef small():\n    return S()\n"
    )
    (tmp_path / "seen.py").write_text(source, encoding="utf-8")
    document = check("attention", run("attention", "seen.py:small", CAT, "--resize=32", "--crop=32", "--json").stdout)
    assert document["maps"]
    assert document["rows"]
    check_run(tmp_path / document["run"])


def test_a_difference_of_passes_and_one_of_weights(run: Run, tmp_path: Path) -> None:
    options = ("--edit-b", "0:output:scale(2)", "--shadow", "--reference", "float64", "--fail-over", "0:rel>0.5")
    ended = run("diff", "net.py:tiny", "same", CAT, "--resize", "32", "--crop", "32", *options, "--json")
    document = check("diff", ended.stdout)
    assert document["first_differences"]
    assert document["exceeded"]
    check_run(tmp_path / document["run"])
    torch.save({"first.weight": torch.zeros(4)}, tmp_path / "a.pt")
    torch.save({"first.weight": torch.ones(4)}, tmp_path / "b.pt")
    document = check("diff", run("diff", "a.pt", "b.pt", "--json").stdout)
    assert document["weights"][0]["measures"]["relative_l2"] == "Infinity"
    check_run(tmp_path / document["run"])


@pytest.mark.exhaustive
def test_check_and_checkpoint(run: Run, tmp_path: Path) -> None:
    weights = {"first.weight": torch.ones(3, 4), "first.bias": torch.tensor([float("nan")])}
    torch.save({"model": weights, "epoch": 3}, tmp_path / "model.pt")
    document = check("check", run("check", "model.pt", "--arch", "none", "--format", "json").stdout)
    assert document["exit_code"] == 1
    assert check("checkpoint", run("checkpoint", "model.pt", "--json").stdout)["nonfinite_count"] == 1


@pytest.mark.exhaustive
def test_a_check_on_labelled_pictures(run: Run, tmp_path: Path) -> None:
    for label in ("Egyptian cat", "espresso"):
        (tmp_path / "data" / label).mkdir(parents=True)
        (tmp_path / "data" / label / "cat.jpg").symlink_to(CAT)
    ended = run("check", "demo", "--data", "data", "--select", "accuracy", "--format", "json")
    [report] = check("check", ended.stdout)["checkpoints"]
    assert (report["accuracy"]["right"], report["accuracy"]["count"]) == (1, 2)


def test_layers_and_doctor(run: Run) -> None:
    assert check("layers", run("layers", "net.py:tiny", "--ops", "--json").stdout)["rows"]
    assert check("doctor", run("doctor", "--json").stdout)["facts"]


def test_every_line_of_a_watched_training(tmp_path: Path) -> None:
    log = train(24, broken_at=17)
    file = TrainingLogFile(tmp_path, resume=False, warn=pytest.fail)
    edited = replace(log.steps[0], edits=(("param:0.*:freeze", 2),))
    records = [*log.starts, edited, *log.steps, *log.watched, *log.verdicts, *log.ends]
    for record in records:
        file.append(record)
    file.close()
    lines = (tmp_path / FILE).read_text(encoding="utf-8").splitlines()
    kinds = {check("watch", line)["type"] for line in lines}
    assert kinds == {"start", "names", "step", "watched", "verdict", "end"}
    step = json.loads(next(line for line in lines if '"NaN"' in line))
    validator = Draft202012Validator(SCHEMAS["watch"])
    assert validator.is_valid(step)
    assert not validator.is_valid(step | {"type": "verdict"})
    assert not validator.is_valid(step | {"loss": "nan"})
    assert validator.is_valid(step | {"edits": [[0, 1]]})
    assert not validator.is_valid(step | {"edits": [["fc:grad:zero", 1]]})


def test_a_key_that_is_gone_or_is_something_else_does_not_fit(run: Run) -> None:
    document = json.loads(run("layers", "net.py:tiny", "--json").stdout)
    validator = Draft202012Validator(SCHEMAS["layers"])
    assert validator.is_valid(document)
    assert validator.is_valid(document | {"new": 1})
    assert not validator.is_valid({name: value for name, value in document.items() if name != "rows"})
    assert not validator.is_valid(json.loads(strict_json(document | {"schema_version": 2})))
    document["rows"][0]["call_count"] = "one"
    assert not validator.is_valid(document)
