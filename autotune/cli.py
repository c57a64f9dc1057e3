"""The command line: `autotune demo, doctor, plan, run, report, passes, schema, verify`. Slow libraries are imported where they are needed."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from autotune import __version__
from autotune.errors import AutotuneError, ConfigError, EnvironmentFault, nearest
from autotune.sweep.streams import silence, take_any_text, write_line

EPILOG = "Exit status: 0 delivered, 2 bad input, 3 environment, 4 no feasible model, 5 not reproduced or not verified, 130 interrupted."
F = TypeVar("F", bound=Callable[..., Any])


class Commands(click.Group):
    """A group whose mistakes come out as one message with the nearest name, and whose errors never show a traceback."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; an unknown one gets the nearest name."""
        name = args[0] if args else ""
        if name and self.get_command(ctx, name) is None and not name.startswith("-"):
            _fail(ConfigError("autotune", "a command must be a known one", repr(name), nearest(name, self.list_commands(ctx))))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command and turn our errors into their message and exit status."""
        try:
            return super().invoke(ctx)
        except AutotuneError as error:
            _fail(error, form=ctx.meta.get("autotune.form", ""))
        except BrokenPipeError:
            silence(sys.stdout)
            sys.exit(0)
        except KeyboardInterrupt:
            write_line("interrupted", sys.stderr)
            sys.exit(130)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if os.environ.get("AUTOTUNE_DEBUG"):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            click.echo(
                f"internal error: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno}). "
                "This is a mistake in autotune, not yours; AUTOTUNE_DEBUG=1 shows more.",
                err=True,
            )
            sys.exit(1)


def _fail(error: AutotuneError, *, form: str = "", more: str = "") -> NoReturn:
    """Say what is wrong and end: on stderr for people, and in the form that the command's output has for machines (json, lines)."""
    facts: dict[str, Any] = {"error": str(error), "exit_status": error.exit_status}
    if form == "json":
        write_line(json.dumps({"status": "error", **facts}), sys.stdout)
    if form == "lines":
        write_line(json.dumps({"event": "error", **facts, "resumable": getattr(error, "resumable", False)}), sys.stdout)
    write_line(f"error: {error}" + (f"\n{more}" if more else ""), sys.stderr)
    sys.exit(error.exit_status)


def _remembering(form: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
        if value:
            ctx.meta["autotune.form"] = form
        return value

    return remember


def _json_option(function: F) -> F:
    option = click.option("--json", "as_json", is_flag=True, callback=_remembering("json"), is_eager=True, help="Print one JSON object last.")
    return option(function)


def _progress_options(function: F) -> F:
    """What a command that runs a sweep can be told about earlier runs, and how it shows what it does."""
    options = [
        click.option("--extend", is_flag=True, help="Go on with a changed sweep and keep the finished trials."),
        click.option("--quiet", is_flag=True, help="Show no progress; errors and the report still."),
        click.option(
            "--json-lines", is_flag=True, callback=_remembering("lines"), is_eager=True,
            help="Print what happens as JSON, one object a line, the result last.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="autotune")
def main() -> None:
    """Search chains of optimization passes for an ONNX model, measure each, deliver the best as a bundle."""
    take_any_text()


def _sweep_options(function: F) -> F:
    options = [
        click.argument("sweep", required=False, type=click.Path(path_type=Path)),
        click.option("--model", type=click.Path(path_type=Path), help="ONNX model, or a folder with model.onnx, eval.npz, calib.npz."),
        click.option("--eval", "eval_path", type=click.Path(path_type=Path), help="Evaluation data: an .npz with one array per input, and labels."),
        click.option("--calib", type=click.Path(path_type=Path), help="Calibration data: an .npz with one array per input."),
        click.option("--metric", help="accuracy, top-5, mse, cosine, roc_auc, ... or script.py:function."),
        click.option("--constraint", "constraints", multiple=True, help='A limit, such as "accuracy >= baseline - 1.0pt". May be repeated.'),
        click.option("--objective", "objectives", multiple=True, help="What to optimize, such as latency, score or size. May be repeated."),
        click.option("--trials", type=int, help="Points to try at most (30)."),
        click.option("--time", "time_limit", help="Longest time for the search, such as 45m."),
        click.option("--seed", type=int, help="Seed of everything random (0)."),
        click.option("--threads", type=int, help="Threads of one run (all this process may use, and searched)."),
        click.option("--ep", help="Execution provider (cpu)."),
        click.option("--batch-size", type=int, help="Examples in one run (1)."),
        click.option("--pick", help="Which front member to deliver (fastest)."),
        click.option("--strict", is_flag=True, default=None, help="Take only what is certain to meet every constraint."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _load(sweep: Path | None, given: dict[str, Any]) -> tuple[Any, list[str]]:
    """The sweep of a file, changed by options, or the one that the short form stands for."""
    from autotune.config import load_sweep

    said = {k: v for k, v in given.items() if v not in (None, ())}
    if sweep is None and given["model"] is None:
        raise ConfigError("run", "give a sweep file or --model", "neither", "Example: autotune run --model m.onnx --eval eval.npz --calib calib.npz")
    if sweep is None:
        from autotune.sweep.shortcut import Shortcut, sweep_from

        names = {"eval_path": "eval", "calib": "calibration", "time_limit": "time"}
        return sweep_from(Shortcut(**{names.get(k, k): v for k, v in said.items()}))
    if given["model"] is not None or given["eval_path"] is not None or given["calib"] is not None:
        raise ConfigError(
            "run", "model and data stand in the sweep file when there is one", "both", "Leave out --model, --eval and --calib, or the file."
        )
    loaded = load_sweep(sweep)
    places = {
        "metric": ("metric",), "constraints": ("constraints",), "objectives": ("objectives",), "trials": ("budget", "trials"),
        "time_limit": ("budget", "time"), "seed": ("seed",), "threads": ("target", "threads"), "ep": ("target", "ep"),
        "batch_size": ("target", "batch_size"), "pick": ("pick",), "strict": ("strict",),
    }  # fmt: skip
    return loaded.changed({places[name]: list(value) if isinstance(value, tuple) else value for name, value in said.items()}), []


@main.command()
@_sweep_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/latest"),
    show_default=True,
    help="The run folder; an earlier run of the same sweep is resumed.",
)
@click.option("--fresh", is_flag=True, help="Throw away what an earlier run left in --out.")
@_progress_options
@_json_option
def run(
    sweep: Path | None, out: Path, fresh: bool, extend: bool, quiet: bool, json_lines: bool, as_json: bool, **given: Any
) -> None:  # fmt: skip
    """Run a sweep: a SWEEP file, or --model with --eval. The same command resumes."""
    loaded, said = _load(sweep, given)
    _run(loaded, out, said, fresh=fresh, extend=extend, quiet=quiet, json_lines=json_lines, as_json=as_json)


def _run(
    loaded: Any, out: Path, said: list[str], *, fresh: bool, extend: bool, quiet: bool, json_lines: bool, as_json: bool
) -> NoReturn:  # fmt: skip
    from autotune.sweep.progress import display_for
    from autotune.sweep.result import INTERRUPTED
    from autotune.sweep.run import run as run_sweep

    if json_lines and as_json:
        raise ConfigError("run", "--json-lines ends with what --json prints", "both", "Give one of them.")
    show = display_for(json_lines=json_lines, quiet=quiet)
    try:
        for line in said:
            show({"event": "note", "seconds": 0.0, "message": line})
        result = run_sweep(loaded, out, fresh=fresh, extend=extend, on_event=show)
    except EnvironmentFault as error:
        show.close()
        more = f"Resume with the same command:\n  {_command()}" if error.resumable else ""
        _fail(error, form="lines" if json_lines else "json" if as_json else "", more=more)
    except KeyboardInterrupt:
        show.close()
        write_line(f"Interrupted before the first trial: nothing is lost. The same command begins:\n  {_command(fresh=fresh)}", sys.stderr)
        sys.exit(130)
    finally:
        show.close()
    if result.status == INTERRUPTED:
        write_line(f"{result.summary['verdict']} Resume with the same command:\n  {_command()}", sys.stderr)
    try:
        if as_json:
            click.echo(json.dumps(result.summary))
        elif result.status != INTERRUPTED and not json_lines:
            from autotune.report import print_report

            print_report(result.summary, result.records)
    except OSError:  # nobody reads any more
        silence(sys.stdout)
    sys.exit(result.exit_status)


def _command(*, fresh: bool = False) -> str:
    """The command that this process was started with, as a shell takes it; without --fresh, which would throw away what is saved."""
    import shlex

    name = Path(sys.argv[0])
    start = [sys.executable, "-m", "autotune"] if name.name == "__main__.py" else [name.name if name.name == "autotune" else str(name)]
    return shlex.join([*start, *(a for a in sys.argv[1:] if fresh or a != "--fresh")])


@main.command()
@_sweep_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/latest"),
    show_default=True,
    help="The run folder that is meant; an earlier run there makes the estimate better.",
)
@_json_option
def plan(sweep: Path | None, out: Path, as_json: bool, **given: Any) -> None:
    """Show what a sweep would do: slots, parameters, counts, rules, cost, first points. No trial is run, nothing is written."""
    from autotune.sweep.plan import describe_plan, render_plan
    from autotune.sweep.prepare import prepare

    loaded, said = _load(sweep, given)
    content = describe_plan(prepare(loaded), said, run=out)
    click.echo(json.dumps(content) if as_json else render_plan(content))


@main.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("demo"), show_default=True, help="Folder for the demo's model and its run.")
@click.option("--trials", type=int, default=None, help="Points to try.")
@click.option("--fresh", is_flag=True, help="Throw away what an earlier demo left there.")
@_progress_options
@_json_option
def demo(
    out: Path, trials: int | None, fresh: bool, extend: bool, quiet: bool, json_lines: bool, as_json: bool
) -> None:  # fmt: skip
    """Train a small network on scikit-learn's digits and tune it: pruning, conversion, quantization, session settings."""
    from autotune.config import load_sweep, parse_sweep, write_sweep
    from autotune.demo import build_demo, demo_sweep

    folder = out / "digits"
    sweep = folder / "sweep.yaml"
    if fresh or not sweep.exists():
        if not quiet:
            write_line(f"demo: training a network on scikit-learn's digits into {folder}", sys.stderr)
        build_demo(folder)
        sweep.write_text(write_sweep(parse_sweep(demo_sweep())), encoding="utf-8")
    loaded = load_sweep(sweep) if trials is None else _load(sweep, {"model": None, "eval_path": None, "calib": None, "trials": trials})[0]
    _run(loaded, out / "run", [], fresh=fresh, extend=extend, quiet=quiet, json_lines=json_lines, as_json=as_json)


@main.command()
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@_json_option
def report(run_folder: Path, as_json: bool) -> None:
    """Show the report of a run folder."""
    from autotune.sweep.result import read_result

    result = read_result(run_folder)
    if as_json:
        click.echo(json.dumps(result.summary))
    else:
        from autotune.report import print_report

        print_report(result.summary, result.records)


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@_json_option
def verify(bundle: Path, as_json: bool) -> None:
    """Check a bundle: every byte, loading, sample outputs, session settings."""
    from autotune.bundle import verify_bundle

    checks = verify_bundle(bundle)
    good = all(c.state != "failed" for c in checks)
    if as_json:
        click.echo(json.dumps({"status": "ok" if good else "failed", "checks": [c.to_json() for c in checks]}))
    else:
        for check in checks:
            click.echo(f"{check.state:8} {check.name}: {check.message}")
        click.echo("verified" if good else "NOT verified: do not deploy this bundle")
    sys.exit(0 if good else 5)


@main.command()
@click.argument("run_folder", metavar="[RUN]", required=False, type=click.Path(path_type=Path), default=Path("runs/latest"))
@click.option("--dry-run", is_flag=True, help="Only say what would go; the real run frees the same bytes.")
@click.option("--all", "everything", is_flag=True, help="Also artifacts that are not part of the best model or the front.")
@_json_option
def clean(run_folder: Path, dry_run: bool, everything: bool, as_json: bool) -> None:
    """Free what a run folder does not need: leftovers, damaged entries, artifacts that nothing refers to.

    Records, evidence, the report and the bundle stay, and so does the best model so far. A sweep that goes on in the folder builds
    again what it misses.
    """
    from autotune.sweep.clean import clean as clean_run
    from autotune.sweep.clean import render

    cleaned = clean_run(run_folder, dry_run=dry_run, everything=everything)
    click.echo(json.dumps(cleaned.to_json()) if as_json else render(cleaned))


@main.command()
@_json_option
def doctor(as_json: bool) -> None:
    """Check this machine: CPUs, versions, which execution providers really start a session."""
    from autotune.sweep.doctor import examine, render

    findings = examine()
    click.echo(json.dumps(findings) if as_json else render(findings))
    sys.exit(0 if findings["usable"] else 3)


@main.command()
@click.option("--out", type=click.Path(path_type=Path), help="Write it into this file instead.")
def schema(out: Path | None) -> None:
    """Print the JSON Schema of sweep files, for editors.

    \b
    autotune schema --out autotune.schema.json, and as the first line of a sweep file:
    # yaml-language-server: $schema=./autotune.schema.json
    """
    from autotune.schema import sweep_schema

    text = json.dumps(sweep_schema(), indent=2, ensure_ascii=False)
    if out is None:
        click.echo(text)
        return
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("schema", "the file must be one that can be written", f"{out}: {error.strerror}") from error
    click.echo(f"wrote {out}", err=True)


@main.group(cls=Commands)
def passes() -> None:
    """List passes, or show one."""


@passes.command("list")
@_json_option
def list_passes(as_json: bool) -> None:
    """List the passes that can be used in a chain."""
    from autotune.passes.base import AcceleratorSpec
    from autotune.passes.registry import get_pass, pass_names

    rows = []
    for name in pass_names():
        pass_class = get_pass(name)
        table = pass_class.default_config(AcceleratorSpec())
        rows.append({
            "name": name, "accepts": pass_class.contract.accepts, "returns": pass_class.contract.returns,
            "does": (pass_class.__doc__ or "").strip().splitlines()[0], "searchable": [n for n, r in table.items() if r.search_defaults is not None],
        })  # fmt: skip
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        click.echo(f"{row['name']:28} {row['accepts']:>7} -> {row['returns']:7} {row['does']}")


@passes.command("show")
@click.argument("name")
@click.option("--ep", default="cpu", show_default=True, help="Execution provider that the table is asked for.")
@_json_option
def show_pass(name: str, ep: str, as_json: bool) -> None:
    """Show a pass: parameters with types, defaults and search defaults."""
    from autotune.passes.base import AcceleratorSpec
    from autotune.passes.registry import get_pass
    from autotune.sweep.plan import render_pass
    from autotune.target import ACCELERATOR_OF, SHORT_PROVIDER_NAMES

    provider = SHORT_PROVIDER_NAMES.get(ep.lower(), ep)
    if provider not in ACCELERATOR_OF:
        raise ConfigError("passes", "an execution provider must be a known one", repr(ep), nearest(ep, SHORT_PROVIDER_NAMES))
    pass_class = get_pass(name)
    accelerator = AcceleratorSpec(ACCELERATOR_OF[provider], provider)
    click.echo(json.dumps(pass_class.json_schema(accelerator)) if as_json else render_pass(pass_class, accelerator))


if __name__ == "__main__":
    main()
