"""Judge the steps of a training by the rules."""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import torch
from torch.optim import Optimizer

from hookscope.commands.watch import rules
from hookscope.commands.watch.journal import Journal
from hookscope.commands.watch.networks import GraphLeaves, ParameterNames, WatchedNetwork
from hookscope.commands.watch.outside_writes import has_axes
from hookscope.commands.watch.ring import Jump, Ring, Usual, norm_of
from hookscope.commands.watch.stale_gradients import LastStep
from hookscope.commands.watch.steps import ArrivedStep, is_finite, not_finite
from hookscope.results.activations import LayerRow
from hookscope.results.gradients import ParameterRow
from hookscope.results.statistics import TensorStatistics
from hookscope.results.training import TrainingFinding, WatchedParameter, WatchedStep
from hookscope.rules.rule import listed, non_finite_count

# A write to a parameter is reported as a possible cause for this many steps.
_SHORTLY = 5

# After this many steps with a loss below 0, its graph is read for the reason.
_BELOW_ZERO = 10
_ROUNDING = 1e-6


class Judge:
    """Judges every step, and in more detail the steps that were watched in full."""

    def __init__(
        self,
        networks: Sequence[WatchedNetwork],
        optimizers: Sequence[Optimizer],
        names: ParameterNames,
        journal: Journal,
        *,
        is_distributed: bool,
    ) -> None:
        """Judge no step yet; verdicts go to the journal."""
        self._networks = networks
        self._names = names
        self._journal = journal
        self._is_distributed = is_distributed
        self._optimizers = optimizers
        self._is_adaptive = any(type(optimizer) is not torch.optim.SGD for optimizer in optimizers)
        self._has_optimizer = not any(isinstance(optimizer, GraphLeaves) for optimizer in optimizers)
        self.ring = Ring()
        self.verdicts = Verdicts()
        self._idle = IdleParameters()
        self._skips: dict[int, int] = {}  # in a row, by `id` of the optimiser
        self._stepped_though_skipped: int | None = None
        self._was_broken = False
        minimises = not any(group.get("maximize") for optimizer in optimizers for group in optimizer.param_groups)
        self._minimises_one_loss = minimises and len(optimizers) == 1
        self._below_zero = 0
        self._why_below_zero: str | None = None
        self._first = self._jumped = 0  # steps
        self._outside: list[TrainingFinding] = []  # about weights changed before the last step
        self._written: dict[str, int] = {}  # the last step before which a parameter was written to
        self._usual: dict[str, Usual] = {}  # before a jump, by rule
        self._counted: set[str] = set()  # prefixes of networks whose gradients have exceeded rounding

    def judge(self, arrived: ArrivedStep) -> str:
        """Judge a step; return the reason to watch the next step in full, "" without one."""
        record = arrived.record
        causes: list[TrainingFinding] = []
        if arrived.is_broken:
            causes = rules.first_not_finite(
                arrived,
                self.ring,
                self._names.in_order(arrived.broken),
                self._names.in_order([*arrived.norms]),
                stepped_though_skipped=self._stepped_though_skipped,
                is_distributed=self._is_distributed,
            )
        outside = self._outside_changes(arrived)
        if not self.ring.steps:
            self._report(record.step, {"unoptimised-parameter": self._unoptimised()})
        loss_jump, norm_jump = self.ring.add(record)
        diverging = rules.diverging_loss(record.loss, self.ring.first_loss) or self._loss_below_zero(arrived)
        reasons = {
            "non-finite": arrived.is_broken and not self._was_broken,
            "loss": loss_jump,
            "gradient norm": norm_jump,
            "zero gradient": not record.skipped and self._idle.count(arrived),
        }
        self._was_broken = arrived.is_broken
        self._count_skips(arrived)
        idle = self._idle.without or self._idle.zero or self._idle.newly_frozen
        unusual = (arrived.is_broken, diverging, self._skips, arrived.step.unreset, idle, outside)
        if any(unusual) or any(reasons.values()) or self.verdicts.count:  # true at hardly any step
            by_rule = self._about_values(arrived, causes, loss_jump, norm_jump, diverging)
            if outside:
                self._report(record.step, {"large-update": outside}, {finding.where for finding in outside})
            self._report(record.step, by_rule | self._about_steps(arrived))
        return next((reason for reason, is_given in reasons.items() if is_given), "")

    def _about_values(
        self,
        arrived: ArrivedStep,
        causes: Sequence[TrainingFinding],
        loss_jump: Jump | None,
        norm_jump: Jump | None,
        diverging: list[TrainingFinding],
    ) -> dict[str, list[TrainingFinding]]:
        """Return the findings about the loss, gradients and weights of a step, by rule that could be judged."""
        record = arrived.record
        loss, norm = _finite(record.loss), None if record.skipped else _finite(norm_of(record)) or None
        sound = {
            "non-finite-weight": arrived.step.bad_weights == [],
            "non-finite-loss": loss is not None,
            "non-finite-gradient": record.gradient_norm is not None and not record.skipped,
        }
        by_rule: dict[str, list[TrainingFinding]] = {}
        for name, is_sound in sound.items():
            findings = [finding for finding in causes if finding.rule == name]
            # At a step with NaN or Inf only the first cause is reported; the other rules are not judged as passed.
            if findings or (is_sound and not arrived.is_broken):
                by_rule[name] = findings
        by_rule |= self._about_jump("loss-jump", "loss", loss_jump, None if record.skipped else loss)
        grown = rules.grown_gradients(record, norm_jump, self.ring)
        by_rule |= self._about_jump("gradient-jump", "gradient norm", norm_jump, norm, grown)
        if by_rule.get("gradient-jump"):
            self._jumped = record.step
        if loss is not None:
            by_rule["loss-diverges"] = diverging
        written = self._written_before(record.step)
        return {
            rule: [replace(finding, message=f"{finding.message}{written}") for finding in findings]
            for rule, findings in by_rule.items()
        }

    def _about_steps(self, arrived: ArrivedStep) -> dict[str, list[TrainingFinding]]:
        by_rule = {
            "skipped-steps": self._skipped_steps(arrived),
            "repeated-step": [],  # `judge_repeat` judges it
            "gradients-not-reset": rules.gradients_not_reset(arrived.step.unreset),
        }
        if not arrived.record.skipped:
            by_rule["unused-parameter"] = rules.idle_parameters("unused-parameter", self._idle.without)
            by_rule["dead-gradient"] = rules.idle_parameters("dead-gradient", self._idle.zero)
            by_rule["frozen-parameter"] = rules.newly_frozen(self._idle.newly_frozen, self._still_stepped())
        return by_rule

    def _count_skips(self, arrived: ArrivedStep) -> None:
        others = {key: count for key, count in self._skips.items() if key not in arrived.step.readings}
        self._skips = others | {key: self._skips.get(key, 0) + 1 for key in arrived.skipped}

    def _skipped_steps(self, arrived: ArrivedStep) -> list[TrainingFinding]:
        key = max(self._skips, key=self._skips.__getitem__, default=0)
        overflowing = self._names.in_order(not_finite(arrived.skipped.get(key, {})))
        return rules.skipped_steps(self._skips.get(key, 0), overflowing[-1] if overflowing else "")

    def _about_jump(
        self, rule: str, quantity: str, jump: Jump | None, value: float | None, where: str = ""
    ) -> dict[str, list[TrainingFinding]]:
        """Return the finding about a jump, or about a value that is still as high while a verdict stands.

        `where` is a sentence on the part that has jumped. A value that is not sound is None: it does not pass.
        """
        findings = rules.jump_finding(rule, quantity, jump, where)
        stands = self.verdicts.stands(rule)
        if jump is not None and findings and not stands:
            self._usual[rule] = jump.usual
        if stands and not findings and value is not None:
            findings = rules.jump_finding(rule, quantity, Jump(value, self._usual[rule]))
        return {rule: findings} if findings or value is not None else {}

    def _still_stepped(self) -> dict[str, str]:
        held = self._idle.still_stepped
        sentences: dict[str, str] = {}
        for optimizer in self._optimizers if held else ():
            for group in optimizer.param_groups:
                for name in held.keys() & {*self._names.of(group["params"])}:
                    sentences[name] = rules.still_stepped(type(optimizer).__name__, group, is_zero=held[name])
        return sentences

    def judge_repeat(self, number: int, last: LastStep, optimizer: str) -> None:
        """Judge a step with the gradients of the last one, when it begins."""
        if last.scaler == "skipped":
            self._stepped_though_skipped = last.number
        self._report(number, {"repeated-step": rules.repeated_step(last, optimizer)})

    def judge_watched(
        self, watched: WatchedStep, arrived: ArrivedStep, layers: Mapping[str, Sequence[LayerRow]]
    ) -> None:
        """Judge the measurements of a step that was watched in full; `layers` has the rows by prefix of the network."""
        judged: dict[str, list[TrainingFinding]] = {}
        measured: set[str] = set()
        listed_rows = {row.name: row for row in watched.parameters}
        loss, norm, unclipped = arrived.record.loss, arrived.record.gradient_norm, arrived.record.norm_before_clipping
        if loss and norm and unclipped:  # a rule compares gradients with the loss: it must shrink as they did
            loss *= norm / unclipped
        has_gradient = is_finite(arrived.record) and bool(norm) and not arrived.skipped
        for network in self._networks:
            rows = layers.get(network.prefix, ())
            if rows:
                for name, findings in rules.judged_layers(network.inspected().info, rows, network.prefix).items():
                    judged.setdefault(name, []).extend(findings)
                finite = [row for row in rows if not (row.activation.unmeasured or non_finite_count(row.activation))]
                measured |= {f"{network.prefix}{row.label or '(model)'}" for row in finite}
            parameters = [listed_rows[name] for name, _ in network.parameters() if name in listed_rows]
            reached = {row.name for row in parameters if row.gradient_norm is not None}
            if has_gradient and reached and not judged.get("non-finite-activation"):
                measured |= {*reached, f"{network.prefix}(model)"}
                by_rule = self._judged_gradients(network, rows, parameters, loss)
                for name, findings in by_rule.items():
                    judged.setdefault(name, []).extend(findings)
        self._report(watched.step, judged, measured)
        if not arrived.record.skipped and is_finite(arrived.record):
            named = {finding.where for finding in self._outside}
            changed = [row for row in watched.parameters if row.name not in named and row.update_ratio is not None]
            weights = [row for row in changed if has_axes(self._names.all[row.name])]
            updates = rules.large_updates(weights, self._causes_of_updates(arrived))
            places = named.union(row.name for row in changed)
            self._report(watched.step, {"large-update": [*self._outside, *updates]}, places)
        self._report(watched.step, {"unoptimised-parameter": self._unoptimised()})

    @property
    def asks_below_zero(self) -> bool:
        """Whether the loss has been below 0 for some steps, and no graph was read for the reason."""
        is_asked = self._below_zero >= _BELOW_ZERO and self._why_below_zero is None
        return is_asked and self._minimises_one_loss and bool(self._networks)

    def _loss_below_zero(self, arrived: ArrivedStep) -> list[TrainingFinding]:
        loss = arrived.record.loss
        # With several losses or optimisers, one may raise the loss of another, as in a GAN.
        if loss is None or loss > -_ROUNDING or arrived.record.losses:
            self._below_zero, self._why_below_zero = 0, None
            return []
        self._below_zero += 1
        if arrived.step.below_zero is not None:
            self._why_below_zero = arrived.step.below_zero
        why = self._why_below_zero
        return rules.loss_below_zero(loss, self._below_zero, why) if why else []

    def _outside_changes(self, arrived: ArrivedStep) -> list[TrainingFinding]:
        """Note the weights that something other than an optimiser wrote to before a step; return the findings."""
        step = arrived.record.step
        if not self.ring.steps:
            self._first = step
        for reading in arrived.step.outside:
            self._written.update(dict.fromkeys(reading.written, step))
        # A script that clips weights in every step first clips them after its first step.
        self._outside = rules.outside_changes(arrived.outside, step) if step > self._first + 1 else []
        return self._outside

    def _written_before(self, step: int) -> str:
        """Return a sentence on the parameters that were written to shortly before a step, after a space; or ""."""
        names = [name for name, at in self._written.items() if step - at < _SHORTLY]
        if not names:
            return ""
        at = max(self._written[name] for name in names)
        return f" Something other than the optimizer wrote to {listed(names)} between steps {at - 1} and {at}."

    def _causes_of_updates(self, arrived: ArrivedStep) -> dict[str, str]:
        step = arrived.record.step
        norms = [norm_of(past) or 0.0 for past in (*self.ring.before(arrived.record), arrived.record)]
        has_jumped = self._jumped == step or rules.has_exploded(norms)
        causes = dict.fromkeys(arrived.norms, "its gradient has jumped") if has_jumped else {}
        causes |= rules.small_weights(arrived.outside)
        wrote = "something other than the optimizer wrote to it between steps"
        return causes | {
            name: f"{wrote} {at - 1} and {at}" for name, at in self._written.items() if step - at < _SHORTLY
        }

    def _judged_gradients(
        self,
        network: WatchedNetwork,
        layers: Sequence[LayerRow],
        rows: Sequence[WatchedParameter],
        loss: float | None,
    ) -> dict[str, list[TrainingFinding]]:
        inspected = network.inspected()
        kinds = {name: type(module).__name__ for name, module in inspected.modules.items()}
        results = []
        for index, row in enumerate(rows):
            name, parameter = row.name.removeprefix(network.prefix), self._names.all[row.name]
            is_reached = row.gradient_norm is not None and parameter.requires_grad
            results.append(
                ParameterRow(
                    index=index,
                    name=name,
                    kind=kinds.get(name.rpartition(".")[0], ""),
                    trainable=parameter.requires_grad,
                    status="not reached" if not is_reached else "gradient" if row.gradient_norm else "zero",
                    gradient=TensorStatistics(tuple(parameter.shape), "", parameter.numel(), l2=row.gradient_norm),
                    weight_l2=row.weight_norm,
                    ratio=(row.gradient_norm or 0.0) / row.weight_norm if is_reached and row.weight_norm else None,
                )
            )
        left_out = ["zero-gradient"] if network.prefix in self._counted else []  # zeros: it has converged
        left_out += ["gradient-imbalance"] if self._is_adaptive else []
        names = [name for name in rules.GRADIENT_RULES if name not in left_out]
        judged = rules.judged_parameters(inspected.info, layers, results, loss, network.prefix, names)
        if not judged.setdefault("zero-gradient", []):
            self._counted.add(network.prefix)
        return judged

    def _unoptimised(self) -> list[TrainingFinding]:
        names = self._names.not_optimised() if self._has_optimizer else ()
        message = "'{}' is trainable, but in no watched optimizer: add it to one, or freeze it."
        return [rules.finding("unoptimised-parameter", name, None, message.format(name)) for name in names]

    def _report(
        self, step: int, by_rule: Mapping[str, Sequence[TrainingFinding]], measured: AbstractSet[str] | None = None
    ) -> None:
        """Record the verdicts that the findings begin or end; `measured` is None if all places were measured."""
        for rule, findings in by_rule.items():
            if findings or self.verdicts.stands(rule):
                for verdict in self.verdicts.judged(step, rule, findings, measured):
                    self._journal.add(verdict)


@dataclass(slots=True)
class Verdicts:
    """The verdicts in force, by rule, each with the number of judgements in a row that have passed."""

    _standing: dict[str, dict[TrainingFinding, int]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of verdicts that have begun and not ended."""
        return sum(map(len, self._standing.values()))

    def stands(self, rule: str) -> bool:
        """Tell whether a verdict of a rule has begun and not ended."""
        return bool(self._standing.get(rule))

    def judged(
        self, step: int, rule: str, findings: Sequence[TrainingFinding], measured: AbstractSet[str] | None = None
    ) -> list[TrainingFinding]:
        """Add all findings of a rule at a step; return the verdicts that begin or end.

        Findings that begin together are one verdict. It ends when the rule has passed at all of their places often
        enough in a row, or everywhere if the rule reports only one of several places. If only some places were
        `measured`, it passes at those.
        """
        standing = self._standing.setdefault(rule, {})
        failing = {finding.where for finding in findings}
        places = {place for verdict in standing for place in verdict.places}
        patience = rules.TRAINING_RULES[rule].patience if rule in rules.TRAINING_RULES else rules.WATCHED_PATIENCE
        changes: list[TrainingFinding] = []
        for verdict in [*standing]:
            persists = bool(failing) if rule in rules.OF_ONE_PLACE else not failing.isdisjoint(verdict.places)
            if not persists and measured is not None and not {*verdict.places} <= measured:
                continue
            standing[verdict] = 0 if persists else standing[verdict] + 1
            if standing[verdict] >= patience:
                del standing[verdict]
                message = f"Cleared at '{verdict.where}'." if verdict.where else "Cleared."
                changes.append(replace(verdict, step=step, value=None, state="ended", message=message))
        fresh = [finding for finding in findings if finding.where not in places]
        if fresh:
            others = tuple(finding.where for finding in fresh[1:])
            more = f" The same for {len(others):,} more: {listed(others)}." if others else ""
            begun = replace(fresh[0], step=step, message=f"{fresh[0].message}{more}", followed_by=others)
            standing[begun] = 0
            changes.append(begun)
        return changes


@dataclass(slots=True)
class IdleParameters:
    """Numbers of consecutive steps, by name of the parameter.

    Attributes:
        without: Steps without a gradient.
        zero: Steps with a gradient of exactly 0.
        newly_frozen: Parameters that were trained before and are frozen at the last step.
        still_stepped: Frozen parameters with which the optimiser still steps, because they hold a gradient; whether it
            is 0.
    """

    without: dict[str, int] = field(default_factory=dict)
    zero: dict[str, int] = field(default_factory=dict)
    newly_frozen: list[str] = field(default_factory=list)
    still_stepped: dict[str, bool] = field(default_factory=dict)
    _zero_count: int = 0
    _frozen: dict[int, list[str]] = field(default_factory=dict)  # by `id` of the optimiser, at its last step
    _trained: set[str] = field(default_factory=set)

    def count(self, arrived: ArrivedStep) -> bool:
        """Count a step that was not skipped; return whether more gradients are 0 than at the step before."""
        edited = arrived.step.edited
        for key, reading in arrived.step.readings.items():
            if self.without or reading.without:
                self.without = _counted_on(self.without, reading.without, {*reading.names, *reading.frozen})
            self._trained.update(reading.names)
            self._frozen[key] = [name for name in reading.frozen if name in self._trained and name not in edited]
        zeros = arrived.zero
        if zeros or self.still_stepped or arrived.step.measurement is not None:
            zeros = self._without_frozen(arrived, zeros)
        self.newly_frozen = [*(name for names in self._frozen.values() for name in names), *self.still_stepped]
        if self.zero or zeros:
            seen = {name for name, norm in arrived.norms.items() if math.isfinite(norm)}
            self.zero = _counted_on(self.zero, zeros, seen)
        before, self._zero_count = self._zero_count, len(zeros)
        return self._zero_count > before

    def _without_frozen(self, arrived: ArrivedStep, zeros: Sequence[str]) -> list[str]:
        """Note in `still_stepped` the frozen parameters that hold a gradient; return `zeros` without them."""
        for reading in arrived.step.readings.values():
            for name, parameter in zip(reading.names, reading.parameters, strict=True):
                if parameter.requires_grad or name in arrived.step.edited:
                    self.still_stepped.pop(name, None)
                else:
                    self.still_stepped[name] = name in zeros
            for name in (*reading.without, *reading.frozen):
                self.still_stepped.pop(name, None)
        return [name for name in zeros if name not in self.still_stepped]


def _counted_on(counts: Mapping[str, int], names: Iterable[str], seen: AbstractSet[str]) -> dict[str, int]:
    """Return `counts` with one more for each of `names`, and without the other names in `seen`."""
    kept = {name: count for name, count in counts.items() if name not in seen}
    return kept | {name: counts.get(name, 0) + 1 for name in names}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
