"""TorchPruning: take whole channels out of a PyTorch network, then train what is left a little further.

Source: Fang et al., "DepGraph: Towards Any Structural Pruning" (CVPR 2023), by its library torch-pruning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autotune.data import LABELS, Arrays, load_arrays, plan_feeding
from autotune.errors import AutotuneError, PassError, nearest
from autotune.model import PYTORCH, PyTorchModelHandler
from autotune.passes.base import ModelTraits, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.passes.registry import register
from autotune.passes.torch_inputs import call, example_inputs, first_lines, flat_outputs, quiet, symbolic_axes, usual_sizes
from autotune.search_spaces.parameters import Categorical
from autotune.target import AcceleratorSpec

if TYPE_CHECKING:
    import torch

RELOAD_TOLERANCE = 1e-5  # of the largest magnitude; the same sums in the same order differ by nothing
LEAST_GLOBAL_SHARE = 0.1  # of its keep_ratio that every layer keeps when channels compete across layers


@register
class TorchPruning(Pass):
    """Keep a share of the channels of every layer, those that matter most; layers that make the outputs stay whole.

    Channels that depend on each other (residual sums, depthwise layers, normalization) go together. Without training data set
    `fine_tune_epochs` to 0: pruned and untrained, only large shares are worth a try.
    """

    contract = PassContract(
        accepts=PYTORCH, returns=PYTORCH, version=1, data={"train_data_dir": "train"}, packages={"torch_pruning": "torch-pruning"}
    )

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "keep_ratio": PassConfigParam(
                type_=float, default_value=0.5, search_defaults=Categorical([0.75, 0.5, 0.375, 0.25, 0.125]), minimum=0.01, maximum=1.0,
                description="share of the channels of each layer that is kept",
            ),
            "importance": PassConfigParam(
                type_=Literal["l1", "l2", "lamp", "fpgm", "random"], default_value="l1",
                description="what makes a channel matter: size of its weights (l1, l2, lamp), distance from the others (fpgm), or chance (random)",
            ),
            "global_pruning": PassConfigParam(
                type_=bool, default_value=False,
                description="let channels compete across layers, instead of keeping the same share of each layer",
            ),
            "round_to": PassConfigParam(
                type_=int, default_value=8, minimum=1, maximum=256,
                description="round the channels kept to a multiple of this (of a quarter of the layer, if less), to fit the hardware's vectors",
            ),
            "ignored_layers": PassConfigParam(type_=list[str] | None, description="names of submodules that keep all their channels"),
            "fine_tune_epochs": PassConfigParam(
                type_=int, default_value=2, search_defaults=Categorical([0, 1, 2, 4]), minimum=0,
                description="passes over the training data after pruning",
            ),
            "learning_rate": PassConfigParam(
                type_=float, default_value=1e-3, minimum=1e-9, maximum=10.0, description="step size at the start of training"
            ),
            "batch_size": PassConfigParam(type_=int, default_value=64, minimum=1, description="examples in one step of training"),
            "training_loop": PassConfigParam(
                type_=Callable | None, category=ParamCategory.OBJECT,
                description="train(model, arrays, *, epochs, learning_rate, batch_size, seed), or script.py:train; left out: "
                "cross entropy for classes, squared error for numbers",
            ),
            "train_data_dir": PassConfigParam(
                type_=str | Path | None, category=ParamCategory.DATA,
                description="training data: an .npz (or a folder of them) with an array for each input, and labels",
            ),
            "seed": PassConfigParam(
                type_=int, default_value=0, minimum=0, description="seed of the order of examples, of dropout and of random importance"
            ),
        }  # fmt: skip

    @classmethod
    def needed_data(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """Training takes training data."""
        return frozenset({"train"}) if config["fine_tune_epochs"] > 0 else frozenset()

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """Pruning, unless every channel is kept."""
        return ModelTraits(methods=frozenset({"pruning"}) if config["keep_ratio"] < 1.0 else frozenset())

    def _run_for_config(self, model: PyTorchModelHandler, config: Mapping[str, Any], output_model_path: Path) -> PyTorchModelHandler:
        import torch

        epochs = config["fine_tune_epochs"]
        arrays = self._training_data(model, config) if epochs else {}
        train = self.object("training_loop") if config["training_loop"] is not None else fit
        axes = symbolic_axes(model.io)
        inputs = example_inputs(model.io, axes, usual_sizes(axes), who="TorchPruning")
        with _reproducible(config["seed"]), quiet():  # loading too: a loader draws numbers for weights that are then replaced
            module = model.load()
            before = _sizes_of(module)
            shapes = _output_shapes(module, inputs)
            pruned = _prune(module, inputs, config) if config["keep_ratio"] < 1.0 else []
            if pruned and _output_shapes(module, inputs) != shapes:
                raise PassError(
                    "TorchPruning",
                    "outputs must keep their shapes",
                    f"{_output_shapes(module, inputs)} instead of {shapes}",
                    "Name the last layers in ignored_layers.",
                )
            if epochs:
                module.train()
                try:
                    train(module, arrays, epochs=epochs, learning_rate=config["learning_rate"], batch_size=config["batch_size"], seed=config["seed"])
                except AutotuneError:
                    raise
                except Exception as error:
                    raise PassError(
                        "TorchPruning", "training must go through", first_lines(error), "Give a training_loop made for this model."
                    ) from error
                module.eval()
            if not all(bool(torch.isfinite(t).all()) for t in module.state_dict().values() if t.dtype.is_floating_point):
                raise PassError("TorchPruning", "training must leave finite weights", "infinite or no numbers", "Lower learning_rate.")
            after = _sizes_of(module)
            notes = {
                "changed": bool(pruned or epochs), **_as_notes(before, after), "pruned_groups": len(pruned), "fine_tune_epochs": epochs,
                "coverage": {"parameters": before[1] if epochs else before[1] - after[1], "of_parameters": before[1]},
            }  # fmt: skip
            if not pruned:
                notes["reason"] = (
                    "keep_ratio 1 keeps every channel"
                    if config["keep_ratio"] == 1.0
                    else "no layer has channels to spare: each makes an output, or is too narrow"
                )
            result = model.written(output_model_path, module=module, notes=notes)
            _check_reload(result, module, inputs)
        return result

    def _training_data(self, model: PyTorchModelHandler, config: Mapping[str, Any]) -> Arrays:
        folder = config["train_data_dir"]
        if folder is None:
            raise PassError(
                "TorchPruning",
                "fine_tune_epochs above 0 takes training data",
                "no train_data_dir",
                "Give training data, or set fine_tune_epochs to 0.",
            )
        arrays = load_arrays(Path(folder), who="TorchPruning")
        feeding = plan_feeding(arrays, model.io, who="TorchPruning")
        if not feeding.batched and config["training_loop"] is None:
            raise PassError("TorchPruning", "the built-in training takes batches along the first axis", "one example a run", "Give a training_loop.")
        inputs = {s.name: arrays[s.name].astype(s.dtype, copy=False) for s in model.io.inputs}
        others = {name: array for name, array in arrays.items() if name not in inputs and (name == LABELS or config["training_loop"] is not None)}
        return {**inputs, **others}


@dataclass(frozen=True)
class _Group:
    """Channels that can only go together. `root` and `function` name them to the library; `scores` holds one per choice."""

    root: Any
    function: Any
    scores: Any  # float tensor of shape (channels / repeats,)
    repeats: int  # grouped layers lose the same channels in every group


def _prune(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> list[int]:
    """Prune in place; return how many channels each group lost."""
    import torch
    import torch_pruning as tp

    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    for parameter in module.parameters():
        if parameter.dtype.is_floating_point:
            parameter.requires_grad_(True)  # the library follows gradients to see what depends on what
    try:
        graph = tp.DependencyGraph().build_dependency(
            module, example_inputs=dict(inputs), forward_fn=lambda net, example: flat_outputs(call(net, example))
        )
        with torch.no_grad():
            groups = _prunable_groups(graph, module, inputs, config)
            lost = []
            for group, keep in zip(groups, _channels_to_keep(groups, config), strict=True):
                order = torch.argsort(group.scores, stable=True)
                drop = order[: len(order) - keep].sort().values
                if len(drop) == 0:
                    continue
                everywhere = [int(i) + repeat * len(order) for repeat in range(group.repeats) for i in drop]
                graph.get_pruning_group(group.root, group.function, everywhere).prune()
                lost.append(len(everywhere))
    except AutotuneError:
        raise
    except Exception as error:  # the library raises errors of every kind on networks that it can't follow
        raise PassError(
            "TorchPruning",
            "torch-pruning must be able to follow the network",
            first_lines(error),
            "Leave pruning out, or name the layer in ignored_layers.",
        ) from error
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen and parameter.dtype.is_floating_point)
        parameter.grad = None
    return lost


def _prunable_groups(graph: Any, module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> list[_Group]:
    """Find the groups of channels that may be cut: none that reaches an output, a recurrent or attention layer, or a layer to be left alone."""
    import torch
    import torch_pruning as tp

    score = {
        "l1": lambda: tp.importance.GroupMagnitudeImportance(p=1),
        "l2": lambda: tp.importance.GroupMagnitudeImportance(p=2),
        "lamp": tp.importance.LAMPImportance,
        "fpgm": tp.importance.FPGMImportance,
        "random": tp.importance.RandomImportance,
    }[config["importance"]]()
    # The library's own code loses track of gates, heads and channel multipliers (seen with 1.6.0): not even their inputs are cut.
    untouchable = (torch.nn.RNNBase, torch.nn.RNNCellBase, torch.nn.MultiheadAttention)
    kept_whole = {part for name in config["ignored_layers"] or [] for part in _named(module, name).modules()} | _output_layers(module, inputs)
    groups = []
    for group in graph.get_all_groups(ignored_layers=[], root_module_types=_weighted_layers()):
        members = [(dep.target.module, dep) for dep, _ in group]
        if any(dep.target.type == tp.ops.OPTYPE.OUTPUT or isinstance(m, untouchable) or _multiplies(m) for m, dep in members):
            continue
        if any(m in kept_whole and graph.is_out_channel_pruning_fn(dep.handler) for m, dep in members):
            continue
        scores = score(group)
        if scores is None:
            continue
        repeats = max(_repeats(m) for m, _ in members)
        if repeats > 1:
            scores = scores.view(repeats, -1).mean(dim=0)
        groups.append(_Group(group[0].dep.target.module, group[0].dep.handler, scores.detach().cpu(), repeats))
    return groups


def _weighted_layers() -> tuple[type, ...]:
    import torch

    return (torch.nn.modules.conv._ConvNd, torch.nn.Linear)  # noqa: SLF001 -- the common base of all Conv classes has no public name


def _output_layers(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> set[torch.nn.Module]:
    """Find the layers with weights from which an output can be reached without passing another: their channels are the output's."""
    import torch

    made_by: dict[Any, torch.nn.Module] = {}

    def remember(layer: torch.nn.Module, _: Any, output: Any) -> None:
        for tensor in flat_outputs(output):
            if tensor.grad_fn is not None:
                made_by[tensor.grad_fn] = layer

    hooks = [m.register_forward_hook(remember) for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    with torch.enable_grad():
        outputs = flat_outputs(call(module, inputs))
    for hook in hooks:
        hook.remove()
    found, seen = set(), set()
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    while waiting:
        step = waiting.pop()
        if step in seen:
            continue
        seen.add(step)
        if step in made_by:
            found.add(made_by[step])
        else:
            waiting += [following for following, _ in step.next_functions if following is not None]
    return found


def _multiplies(layer: object) -> bool:
    """Say whether this is a depthwise layer that makes several channels of each."""
    return isinstance(layer, _weighted_layers()) and 1 < getattr(layer, "groups", 1) == getattr(layer, "in_channels", 0) != getattr(
        layer, "out_channels", 0
    )


def _repeats(layer: object) -> int:
    """Number of groups in which a layer treats its channels alike: 1 for depthwise layers, whose channels go one by one."""
    import torch

    if isinstance(layer, torch.nn.GroupNorm):
        return layer.num_groups
    groups: int = getattr(layer, "groups", 1) if isinstance(layer, _weighted_layers()) else 1
    return 1 if groups == getattr(layer, "out_channels", 0) else groups


def _named(module: torch.nn.Module, name: str) -> torch.nn.Module:
    known: dict[str, torch.nn.Module] = {n: part for n, part in module.named_modules() if n}
    if name not in known:
        raise PassError("TorchPruning", "ignored_layers must name submodules", repr(name), nearest(name, known))
    return known[name]


def _channels_to_keep(groups: Sequence[_Group], config: Mapping[str, Any]) -> list[int]:
    """Channels that each group keeps (counted within one repeat): whole steps of `round_to`, at least one.

    Odd numbers of channels cost more than they save: the runtime's blocked convolutions take multiples of 8 or 16 (a net cut to 22
    and 45 channels ran no faster than one cut to 32 and 64). In narrow layers steps that large would leave nothing to choose.
    """
    import torch

    share = config["keep_ratio"]
    totals = [len(g.scores) for g in groups]
    wanted = [share * total for total in totals]
    if config["global_pruning"] and groups:
        together = torch.cat([g.scores for g in groups])
        least_kept = torch.sort(together, descending=True).values[max(1, round(share * len(together))) - 1]
        wanted = [max(float((g.scores >= least_kept).sum()), LEAST_GLOBAL_SHARE * share * t) for g, t in zip(groups, totals, strict=True)]
    steps = [max(1, min(config["round_to"], total // 4)) for total in totals]
    return [min(total, max(step, step * round(want / step))) for want, total, step in zip(wanted, totals, steps, strict=True)]


def _sizes_of(module: torch.nn.Module) -> tuple[int, int]:
    """Output channels of all convolutions and linear layers, and numbers in all parameters."""
    layers: list[Any] = [m for m in module.modules() if isinstance(m, _weighted_layers())]
    channels = sum(m.out_channels if hasattr(m, "out_channels") else m.out_features for m in layers)
    return channels, sum(p.numel() for p in module.parameters())


def _as_notes(before: tuple[int, int], after: tuple[int, int]) -> dict[str, Any]:
    return {"channels_before": before[0], "channels_after": after[0], "parameters_before": before[1], "parameters_after": after[1]}


def _output_shapes(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[tuple[int, ...]]:
    import torch

    try:
        with torch.no_grad(), quiet():
            return [tuple(t.shape) for t in flat_outputs(call(module, inputs))]
    except Exception as error:
        shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in inputs.items())
        raise PassError(
            "TorchPruning",
            f"the module must run on {shapes}",
            first_lines(error),
            "A size that stands in its code can't be pruned: name the layer in ignored_layers.",
        ) from error


def _check_reload(result: PyTorchModelHandler, module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Make sure that the file gives back the network that was written: other code than the library's rebuilds it."""
    import torch

    try:
        with torch.no_grad():
            expected, actual = flat_outputs(call(module, inputs)), flat_outputs(call(result.load(), inputs))
    except Exception as error:
        raise PassError("TorchPruning", "the pruned network must load again", first_lines(error), "Name the layer in ignored_layers.") from error
    for a, b in zip(actual, expected, strict=True):
        if a.shape != b.shape or not torch.allclose(
            a.double(), b.double(), rtol=0, atol=RELOAD_TOLERANCE * max(float(b.abs().max()), 1e-6), equal_nan=True
        ):
            raise PassError(
                "TorchPruning",
                "the pruned network must give the same outputs when loaded again",
                "others",
                "Name the layers of unusual kinds in ignored_layers.",
            )


@contextlib.contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """One thread and a seeded generator, so that equal work gives equal bytes; both are put back."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # also the fastest for small networks
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def fit(model: torch.nn.Module, arrays: Arrays, *, epochs: int, learning_rate: float, batch_size: int, seed: int) -> None:
    """Train in place with Adam, its rate falling to nothing along a cosine.

    `arrays` holds one array per input (first axis: examples) and `labels`. Whole-number labels are classes: cross entropy on the
    first output, of shape (examples, classes, ...), or its binary form where that has one number an example. Labels of floats are
    numbers to be met: squared error. Raises `PassError` where labels and outputs don't go together.
    """
    import torch

    if LABELS not in arrays:
        raise PassError(
            "TorchPruning", f"training data must hold an array {LABELS!r}", ", ".join(sorted(arrays)), "Add labels, or give a training_loop."
        )
    inputs = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items() if name != LABELS}
    labels = torch.from_numpy(np.ascontiguousarray(arrays[LABELS]))
    parameters = [p for p in model.parameters() if p.requires_grad]
    batches = -(-len(labels) // batch_size)
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(batch_size):  # type: ignore[no-untyped-call] # torch's own gap
            if len(rows) > 1 or len(labels) == 1:  # one example alone has no statistics to normalize by
                outputs = flat_outputs(call(model, {n: t[rows] for n, t in inputs.items()}))
                loss = _loss(outputs[0], labels[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call] # as above
                optimizer.step()
            schedule.step()


def _loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    import torch
    from torch.nn import functional

    if labels.dtype.is_floating_point:
        if output.numel() != labels.numel():
            raise PassError(
                "TorchPruning",
                "labels of floats must have the shape of the output",
                f"{list(labels.shape)} for {list(output.shape)}",
                "Give a training_loop.",
            )
        return functional.mse_loss(output, labels.reshape(output.shape).to(output.dtype))
    if output.numel() == labels.numel():
        return functional.binary_cross_entropy_with_logits(output, labels.reshape(output.shape).to(output.dtype))
    if output.shape[:1] + output.shape[2:] != labels.shape:
        raise PassError(
            "TorchPruning", "labels of classes must have the output's shape without its axis of classes",
            f"{list(labels.shape)} for {list(output.shape)}", "Give a training_loop.",
        )  # fmt: skip
    with torch.no_grad():
        probabilities = bool((output >= 0).all()) and bool(((output.sum(dim=1) - 1).abs() < 1e-3).all())
    if probabilities:  # the network ends in a softmax of its own
        return functional.nll_loss(output.clamp_min(1e-9).log(), labels.long())
    return functional.cross_entropy(output, labels.long())
