"""``export``, ``import`` and ``repair-optimizer``: checkpoints to and from other programs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pyckpt.cli.output import AsJson, format_bytes, local, on_other_nodes, print_json, say
from pyckpt.format import commit

__all__ = ["register"]

_SHOWN = 20

# Not docstrings, whose lines typer would keep apart.
_EXPORT = (
    "Write a checkpoint for other programs: its model, or all of it.\n\n"
    "Each byte that has a checksum is checked. An earlier export as safetensors is replaced "
    "when the new one is whole."
)
_IMPORT = (
    "Make a step of a run of what another program saved, so that training resumes from it.\n\n"
    "Converting is the same thing, and needs no command of its own: the step is a checkpoint that "
    "pyckpt.load, dcp.load and all commands take by its path. No code of the source runs, and the "
    "source is not changed."
)
_REPAIR = (
    "Put right what of an optimizer's saved state belongs on the host, such as Adam's step.\n\n"
    "The new checkpoint is written beside the old one, and takes its place when it is whole."
)

Naming = Annotated[
    str | None,
    typer.Option(
        help="Names of the checkpoints in a run, with {} for the step: 'checkpoint-{}'. Default: "
        "'step-{:08d}'."
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("export", help=_EXPORT)(export)
    app.command("import", help=_IMPORT)(import_)
    # The same command, under the name that other tools have for it.
    app.command("convert", help=_IMPORT, hidden=True)(import_)
    app.command("repair-optimizer", help=_REPAIR)(repair_optimizer)


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            parser=local, help="A checkpoint, or a run, of which the newest valid one is taken."
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(help="A folder; with --format torch --all, a file.", show_default=False),
    ],
    format: Annotated[
        Literal["safetensors", "torch", "dcp"],
        typer.Option(
            help="safetensors and torch: the model, for Hugging Face's loaders. dcp: a plain "
            "checkpoint in one file, which stock PyTorch loads."
        ),
    ] = "safetensors",
    key: Annotated[str | None, typer.Option(help="The part of the state. Default: model.")] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="All of the state. safetensors: all tensors, under their full names. torch: one "
            "file for torch.load, which must fit into memory.",
        ),
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Convert floating point tensors, as to bfloat16.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Of one file: 512MiB. Default: 5GB.")
    ] = None,
    tied: Annotated[
        list[str] | None,
        typer.Option(help="NAME=OTHER: leave out NAME, which has OTHER's values.", metavar="N=O"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A file to write as config.json beside the weights.")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace what is in the way, and not known to be an earlier export.",
        ),
    ] = False,
    naming: Naming = None,
    as_json: AsJson = False,
) -> None:
    from pyckpt.convert.copying import copy_checkpoint
    from pyckpt.dcp.to_torch import to_torch
    from pyckpt.format import metadata as metadata_format
    from pyckpt.tools.contents import metadata_of
    from pyckpt.train.store.export import export as write_model
    from pyckpt.train.store.tensors import NoTensors

    if everything and key is not None:
        raise ValueError("--all and --key exclude each other")
    if format == "dcp" or (format == "torch" and everything):
        options = {
            "--dtype": dtype,
            "--max-shard-size": max_shard_size,
            "--tied": tied,
            "--config": config,
        }
        unused = [name for name, given in options.items() if given]
        if unused:
            how = f"--format {format}" + (" --all" if everything else "")
            raise ValueError(f"{how} writes what was saved, and does not take {', '.join(unused)}")
    source = _checkpoint_at(checkpoint, naming)
    part = None if everything else key or "model"
    with _naming_other_nodes(source):
        if format == "dcp":
            copy_checkpoint(source, out, key=part, overwrite=overwrite)
            written = metadata_format.data_files(metadata_of(out))
            files = [*(out / name for name in sorted(written)), out / commit.metadata_name()]
        elif format == "torch" and everything:
            if not overwrite and os.path.lexists(out):
                raise FileExistsError(
                    errno.EEXIST, "a file is there already; replace it by --overwrite", str(out)
                )
            to_torch(source, out)
            files = [out]
        else:
            try:
                files = write_model(
                    source,
                    out,
                    format=format,
                    key=part,
                    dtype=_dtype(dtype),
                    max_shard_size=max_shard_size or "5GB",
                    tied=_pairs(tied or ()),
                    config=config,
                    overwrite=overwrite,
                )
            except NoTensors as error:
                # With --format torch, --all writes more than tensors.
                hint = (
                    "; --all exports all tensors" if error.hint and format == "safetensors" else ""
                )
                raise ValueError(f"{error.what}{hint}") from error
    sizes = {str(path): path.stat().st_size for path in files}
    if as_json:
        print_json({"checkpoint": str(source), "files": sizes})
        return
    say(f"exported {source}")
    for name, size in sizes.items():
        say(f"  {name}  {format_bytes(size)}")


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            parser=local,
            help="A file of torch.save; safetensors, a file or a folder; a DCP checkpoint; "
            "Lightning's .ckpt; a Trainer's checkpoint-N; a folder of Accelerate's save_state; "
            "torchtitan's step-N.",
        ),
    ],
    directory: Annotated[
        Path, typer.Argument(parser=local, help="The run: where a Checkpointer saves.")
    ],
    step: Annotated[
        int | None, typer.Option(help="The step, if the source does not tell it.", min=0)
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="OLD=NEW: another name for an entry, as net=model.", metavar="OLD=NEW"),
    ] = None,
    named_by_order: Annotated[
        bool,
        typer.Option(
            "--named-by-order",
            help="Name an optimizer's numbered parameters as the weights, by order and shape.",
        ),
    ] = False,
    leave_out: Annotated[
        bool,
        typer.Option("--leave-out", help="Leave out objects that only code of the file makes."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint of that step.")
    ] = False,
    naming: Naming = None,
    as_json: AsJson = False,
) -> None:
    from pyckpt.convert.importing import import_checkpoint

    done = import_checkpoint(
        source,
        directory,
        step=step,
        names=_pairs(name or ()),
        named_by_order=named_by_order,
        leave_out=leave_out,
        overwrite=overwrite,
        naming=naming,
    )
    if as_json:
        print_json(
            {
                "path": str(done.path),
                "step": done.step,
                "kind": done.kind,
                "names": done.names,
                "bytes": done.bytes,
                "notes": done.notes,
            }
        )
        return
    say(f"imported {done.kind} as step {done.step}: {done.path} {format_bytes(done.bytes)}")
    say(f"  it has: {', '.join(done.names)}")
    for note in done.notes:
        say(f"  {note}")


def repair_optimizer(
    checkpoint: Annotated[
        Path, typer.Argument(parser=local, help="A checkpoint, or a file of torch.save.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write there, and leave the checkpoint as it is.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="The class in torch.optim, as AdamW, if the options do not tell it."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    as_json: AsJson = False,
) -> None:
    from pyckpt.convert.repair import repair_optimizer as repair

    repairs = repair(checkpoint, out=out, optimizer=optimizer, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "repairs": [
                    {"key": one.key, "found": one.found, "wanted": one.wanted} for one in repairs
                ],
                "written": not dry_run and (bool(repairs) or out is not None),
            }
        )
        return
    for one in repairs[:_SHOWN]:
        say(f"  {one}")
    if len(repairs) > _SHOWN:
        say(f"  and {len(repairs) - _SHOWN} more")
    if not repairs:
        say("nothing to repair")
    else:
        say(f"{len(repairs)} {'would be put' if dry_run else 'put'} right")


def _checkpoint_at(path: Path, naming: str | None) -> Path:
    """A checkpoint, given by its path, or by that of the run whose newest valid one it is."""
    from pyckpt.errors import CorruptCheckpoint
    from pyckpt.train.finder import Finder

    if (path / commit.metadata_name()).exists() or not path.is_dir():
        return path
    if commit.lost_metadata(os.listdir(path)):
        raise CorruptCheckpoint(f"{path}: {commit.LOST_METADATA}", path=str(path))
    newest = Finder(path, "auto", None, naming).latest()
    if newest is None:
        raise FileNotFoundError(2, "no checkpoint, and no valid one in it", str(path))
    return newest.path


@contextmanager
def _naming_other_nodes(source: Path) -> Iterator[None]:
    """Say it where a file is missing because another node has it."""
    from pyckpt.tools.contents import contents

    try:
        yield
    except FileNotFoundError as error:
        if os.path.dirname(os.path.abspath(error.filename or "")) != os.path.abspath(source):
            raise
        found = contents(source)
        if os.path.basename(error.filename) not in found.elsewhere:
            raise
        which = on_other_nodes(len(found.elsewhere), len(found.files))
        what = f"{which}: export it from the mirror, or bring all files into one directory"
        raise FileNotFoundError(errno.ENOENT, what, str(source)) from error


def _pairs(given: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for one in given:
        old, sign, new = one.partition("=")
        if not (old and sign and new):
            raise ValueError(f"{one!r} must be two names with = between them")
        pairs[old] = new
    return pairs


def _dtype(name: str | None) -> Any:
    import torch

    if name is None:
        return None
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"--dtype {name} is no floating point type of torch, such as bfloat16")
    return found
