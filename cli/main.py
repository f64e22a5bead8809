"""`rlhf`: its commands and options. Each command imports what it needs when it runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.commands.bench import bench
from cli.commands.calibrate import calibrate
from cli.commands.chat import chat
from cli.commands.compare import compare
from cli.commands.data import app as data_app
from cli.commands.export import export
from cli.commands.feedback import app as feedback_app
from cli.commands.fetch import fetch
from cli.commands.init import init
from cli.commands.label import label, label_import
from cli.commands.plan import app as plan_app
from cli.commands.report import report
from cli.commands.retrain import promote, rollback
from cli.commands.serve import serve
from cli.commands.study import study
from cli.ignored_options import refuse_ignored
from cli.output import survive_closed_output
from cli.project import typed_path
from cli.tables.past_runs import restore, runs
from config.errors import EXIT_INTERRUPTED, RlhfError
from config.ports import spare_proxy_for_local_servers
from config.terminal_text import visible

app = typer.Typer(
    name="rlhf",
    help="RLHF pipelines that know what they cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        from importlib.metadata import version

        from config.workspace.checkout import commit_of

        commit = commit_of(Path(__file__).parent)[:12]
        typer.echo(f"rlhf-ledger {version('rlhf-ledger')}{f', commit {commit}' if commit else ''}")
        raise typer.Exit


@app.callback()
def rlhf(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """RLHF pipelines that know what they cost."""


Recipe = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        parser=typed_path,
        metavar="FILE",
        help="Params file to run, such as recipes/demo.yaml; without it, params.yaml.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one parameter, such as sft.epochs=1; repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs instead of a table.")]
ChangedCode = Annotated[
    str | None,
    typer.Option(
        metavar="continue|restart",
        help="What to do with a checkpoint that other code made; without it, asks on a terminal, else restarts.",
    ),
]


@app.command()
def run(
    recipe: Recipe = None,
    overrides: Overrides = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Start without asking, also above budget.approval_usd.")
    ] = False,
    as_json: AsJson = False,
    changed_code: ChangedCode = None,
) -> None:
    """Run the pipeline: data, sft, reward, the method of align.method, evaluate, report. Only what changed is done
    again.
    """
    from cli.commands.run import run_pipeline

    raise typer.Exit(run_pipeline(recipe, overrides or [], yes, as_json, changed_code))


@app.command()
def retrain(
    recipe: Recipe = None,
    overrides: Overrides = None,
    force: Annotated[
        bool, typer.Option("--force", help="Train without a reason in the data; budget and gate stay.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Start without asking, also above budget.approval_usd.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check for new data and votes; if retraining is worthwhile, train, compare with the champion, and promote only on
    evidence.
    """
    from cli.commands.retrain import retrain_cycle

    raise typer.Exit(retrain_cycle(recipe, overrides or [], force, yes, as_json))


app.command()(init)
app.add_typer(plan_app, name="plan")
app.command()(report)
app.command()(compare)
app.command()(runs)
app.command()(restore)
app.command()(chat)
app.command()(export)
app.command()(fetch)
app.command()(serve)
app.command()(bench)
app.command()(study)
app.command()(label)
app.command()(promote)
app.command()(rollback)
app.command("label-import")(label_import)
app.add_typer(data_app, name="data")
app.add_typer(feedback_app, name="feedback")


app.command()(calibrate)


UP_HERE = {"prefect_port", "mlflow_port", "serve", "open_page", "notify", "no_auth", "mlflow_auth"}
"""Options of `up` that apply to servers of this machine; containers ignore them."""


@app.command()
def up(
    context: typer.Context,
    prefect_port: Annotated[
        int, typer.Option(help="Port of the Prefect server and its pages.", min=1, max=65535)
    ] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow's pages.", min=1, max=65535)] = 5000,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the champion too, as rlhf serve does.")] = False,
    serve_port: Annotated[int, typer.Option(help="With --serve: the port.", min=1, max=65535)] = 8000,
    open_page: Annotated[
        str | None,
        typer.Option("--open", metavar="SERVER", help="Open the newest run in prefect's or mlflow's pages."),
    ] = None,
    docker: Annotated[
        bool, typer.Option("--docker", help="Start the stack of docker/compose.yaml instead, in containers.")
    ] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="With --docker: a worker for containers with GPUs too.")] = False,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Webhook that is called for runs that finish, fail or reach their budget, and for promotions.",
        ),
    ] = None,
    no_auth: Annotated[
        bool,
        typer.Option(
            "--no-auth", help="Prefect asks for no key: only where every user of this machine may run commands as you."
        ),
    ] = False,
    mlflow_auth: Annotated[
        bool,
        typer.Option("--mlflow-auth", help="MLflow asks for a name and a password: where others use this machine."),
    ] = False,
) -> None:
    """Start the Prefect and MLflow servers and a worker in the background, and deploy the flows of prefect.yaml."""
    refuse_ignored(
        context,
        {"docker", "gpu", "serve"} if docker else UP_HERE | ({"serve_port"} if serve else set()),
        {"gpu": "--docker", **({} if serve else {"serve_port": "--serve"})},
        "--docker",
    )
    if docker:
        from cli.docker import up as start_stack

        start_stack(gpu, serve)
        return
    from cli.commands.servers import up as start

    serving = serve_port if serve else None
    start(prefect_port, mlflow_port, serving, open_page, notify, no_auth, mlflow_auth)


@app.command()
def down(
    docker: Annotated[bool, typer.Option("--docker", help="Stop the stack of docker/compose.yaml instead.")] = False,
) -> None:
    """Let running stages checkpoint, then stop what `rlhf up` started."""
    if docker:
        from cli.docker import down as stop_stack

        stop_stack()
        return
    from cli.commands.servers import down as stop

    stop()


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show the servers, the worker and the state of the newest run."""
    from cli.commands.servers import status as show

    show(as_json)


@app.command()
def clean(
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="DAYS", help="What was last written before goes.")
    ] = 14.0,
    max_gib: Annotated[
        float | None, typer.Option("--max-gib", metavar="GIB", help="The oldest go too until this suffices.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove it; else it is only shown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints, studies and outputs of runs. The champion's and those of a running run are kept."""
    from cli.commands.clean import clean as remove_old

    remove_old(older_than, max_gib, yes, as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check what a run needs: versions, device, disk, ports, params, data. Each problem is printed with its fix."""
    from cli.commands.doctor import examine

    raise typer.Exit(examine(as_json))


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit code 2, never a traceback."""
    survive_closed_output()
    spare_proxy_for_local_servers()
    try:
        app()
    except RlhfError as error:
        print(f"rlhf: {visible(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("rlhf: stopped.", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
